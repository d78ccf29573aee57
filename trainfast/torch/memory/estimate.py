"""Memory of a training step, without the GPU and without the memory."""

import contextlib
import copy
import dataclasses
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainfast.machine import available_memory, resident_memory
from trainfast.memory.allocator import Allocator
from trainfast.memory.estimate import Estimate, estimate_of
from trainfast.memory.gpus import MIB, Gpu, gpu_of
from trainfast.memory.trace import Replay, Trace, replay
from trainfast.torch.memory.batches import batch_size, resized
from trainfast.torch.memory.cuda_rules import cuda_rules
from trainfast.torch.memory.recompute import is_recomputed, recompute
from trainfast.torch.memory.redirect import (
    copied_as_fakes,
    cuda_means_cpu,
    numbers_of_fakes,
)
from trainfast.torch.memory.scratch import workspace_of
from trainfast.torch.memory.step import (
    Optimizer,
    autocast_dtype,
    forward_and_loss,
    run_steps,
)
from trainfast.torch.memory.tracker import Tracker
from trainfast.torch.memory.values import Values
from trainfast.torch.private import (
    MEMORY_REFUSAL,
    FakeCopyMode,
    FakeTensorMode,
    fakes_converted,
    memory_events,
    tree_leaves,
    tree_map,
)

# Guesses of these are sizes: what the step takes depends on them.
_SIZES = {"mask", "nonzero", "masked_select", "unique", "_unique2", "unique_dim"}
_FEW = (2, 4)  # samples; batch normalisation refuses a single one
_CONVOLUTIONS = (
    *(torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d),
    *(torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d),
)
_LOCK = threading.Lock()  # the rules of cuda_rules hold for the whole process


def estimate_memory(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    batch: Any,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    step: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: Optimizer = "adamw",
    amp: str | None = None,
    device: str = "cuda",
    gpu: str | int | Gpu | None = None,
    steps: int = 2,
    validation: Any = None,
    checkpointing: bool = False,
    expandable_segments: bool = False,
    release_gradients: bool = False,
    attention_patch: bool = False,
) -> Estimate:
    """Estimates the memory of training, without a GPU and without computing anything.

    The step runs on fake tensors, which have shapes and no data: forward pass, loss,
    backward pass and optimizer, `steps` times, then a validation batch. Every storage's
    birth and death is replayed through a model of torch's caching allocator. A model
    that fakes cannot run, such as one with an operator of its own in C, runs really on
    the CPU at batch sizes 2 and 4, and a line through both is the answer.

    Args:
        model: the model, which stays as it is, or a function that builds it. A function
            is called with fake tensors, so that a model larger than the memory can be
            estimated.
        batch: one batch as the loader gives it, on the CPU: a tensor, a pair of inputs
            and targets, a tuple or dict of the model's arguments, or a batch of PyG.
        loss_fn: loss_fn(output, target), or loss_fn(output, batch) where the batch is
            no pair. Without it: the output's `loss`, or its mean.
        step: step(model, batch) gives the loss, instead of `loss_fn`.
        optimizer: "adamw", "adam", "sgd", "trainfast" (trainfast.AdamW), a pair of a
            name and its arguments, or a function of the parameters.
        amp: "bf16" or "fp16" for autocast.
        device: "cuda" or "cpu".
        gpu: a GPU's name such as "T4" or "RTX 4090", or its memory: bytes or "16GB";
            None: this machine's, or a T4 if it has none.
        steps: optimizer steps. The second one has the optimizer's state from its start.
        validation: a batch that runs at the end without gradients in eval mode.
        checkpointing: with `trainfast.enable_checkpointing`.
        expandable_segments: with torch's allocator setting of this name.
        release_gradients: each gradient is freed during the backward pass, as by
            `trainfast.AdamW(...).release_gradients()`; with optimizer="trainfast".
        attention_patch: with `trainfast.patch("attention")`, on a GPU.

    Returns:
        An `Estimate`, which prints as tables and has `fits`, `total`, `capacity`, ...

    Raises:
        TypeError, ValueError: an argument is wrong.
        Exception: what the step itself raises, where it fails on real tensors as well.
    """
    if MEMORY_REFUSAL:
        raise NotImplementedError(f"{MEMORY_REFUSAL}, which estimates need")
    if loss_fn is not None and step is not None:
        raise TypeError("`loss_fn` cannot be combined with `step`; pass one of them")
    if device not in ("cuda", "cpu"):
        raise ValueError(f'`device` must be "cuda" or "cpu", got {device!r}')
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"`steps` must be a positive integer, got {steps!r}")
    if not callable(model):
        raise TypeError(
            "`model` must be a module or a function that builds one, got "
            f"{type(model).__name__}"
        )
    autocast_dtype(amp)
    plan = _Plan(
        *(model, _plain(batch), loss_fn, step, optimizer, amp, device),
        *(gpu_of(gpu) if device == "cuda" else None, steps, _plain(validation)),
        *(checkpointing or is_recomputed(model), expandable_segments),
        *(release_gradients, attention_patch),
    )
    return plan.estimate()


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The arguments of `estimate_memory`, checked."""

    model: Any
    batch: Any
    loss_fn: Any
    step: Any
    optimizer: Optimizer
    amp: str | None
    device: str
    gpu: Gpu | None
    steps: int
    validation: Any
    checkpointing: bool
    expandable_segments: bool
    release_gradients: bool
    attention_patch: bool

    def estimate(self) -> Estimate:
        started = time.monotonic()
        method = "fake tensors"
        notes: list[str] = []
        guesses: dict[str, int] = {}
        base, before = 0, resident_memory()
        failure: Exception | None = None
        done: Replay | None = None
        try:
            if self.gpu is None and _has_recurrent_layers(self.model):
                raise NotImplementedError("recurrent layers allocate inside of kernels")
            trace, guesses = self._on_fakes()
            done = self._replayed(trace)
            if _SIZES.intersection(guesses):
                failure = ValueError("sizes depend on values that only a real step has")
        except Exception as error:
            failure = error
        if failure is not None:
            try:
                done, most = self._by_a_line(failure), done
            except Exception:
                if done is None:
                    raise
            else:
                method = "two small steps, a line"
                reason = " ".join(f"{type(failure).__name__}: {failure}".split())
                notes.append(f"fake tensors cannot run this step ({reason[:200]})")
                if most is not None:
                    size = f"{most.allocated / MIB:,.0f} MiB in tensors"
                    notes.append(f"with the largest sizes that are possible: {size}")
        assert done is not None
        if guesses and method == "fake tensors":
            names = ", ".join(f"{name} ({n})" for name, n in guesses.items())
            notes.append(f"values that no one knows were guessed, from above: {names}")
        notes += self._notes()
        # What the process takes besides: torch's code and the interpreter.
        if self.gpu is None:
            if failure is None:
                before = resident_memory()  # with all code that a step loads
            base = before - self._resident()
        return estimate_of(
            done,
            device=self.gpu.name if self.gpu else "the CPU",
            total=(done.reserved + self.gpu.context)
            if self.gpu
            else base + done.reserved,
            capacity=self.gpu.memory if self.gpu else base + available_memory(),
            exact=method == "fake tensors" and not guesses,
            method=method,
            seconds=time.monotonic() - started,
            batch_size=batch_size(self.batch),
            notes=notes,
            settings=self._settings(),
            again=self._again,
        )

    def _resident(self) -> int:
        """Bytes of the real model and batch, which the estimate counts once more."""
        held = [self.batch, self.validation]
        if isinstance(self.model, torch.nn.Module):
            held += [*self.model.parameters(), *self.model.buffers()]
        tensors = [t for t in tree_leaves(held) if isinstance(t, torch.Tensor)]
        return sum({t.data_ptr(): t.nbytes for t in tensors}.values())

    def _settings(self) -> dict[str, Any]:
        return {
            "amp": self.amp,
            "checkpointing": self.checkpointing,
            "optimizer": self.optimizer if isinstance(self.optimizer, str) else None,
            "expandable_segments": self.expandable_segments,
            "attention_patch": self.attention_patch,
            "release_gradients": self.release_gradients,
            "capability": self.gpu.capability if self.gpu else 0,
        }

    def _again(self, **changes: Any) -> Estimate:
        size = changes.pop("batch_size", None)
        if size is not None:
            changes["batch"] = resized(self.batch, size)
            changes["validation"] = resized(self.validation, size)
        if "gpu" in changes:
            changes["gpu"] = gpu_of(changes["gpu"])
        return dataclasses.replace(self, **changes).estimate()

    def _loss(self, model: Any, batch: Any, variables: dict[str, Any]) -> torch.Tensor:
        if self.step is not None:
            loss: torch.Tensor = self.step(model, batch)
            return loss
        return forward_and_loss(model, batch, self.loss_fn, variables)

    def _run(self, tracker: Tracker, model: Any, batch: Any, validation: Any) -> None:
        if self.checkpointing and not is_recomputed(model):
            recompute(model)
        tracker.name_modules(model)
        run_steps(
            tracker,
            model,
            batch,
            step=self._loss,
            optimizer=self.optimizer,
            dtype=autocast_dtype(self.amp),
            device=self.device,
            steps=self.steps,
            validation=validation,
            release_gradients=self.release_gradients,
        )

    def _on_fakes(self) -> tuple[Trace, dict[str, int]]:
        rng = torch.get_rng_state()
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        values, tracker = Values(mode), Tracker(self.gpu)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_LOCK)
            stack.callback(torch.set_rng_state, rng)
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            if self.gpu is not None:
                stack.enter_context(cuda_means_cpu())
            if isinstance(self.model, torch.nn.Module):
                with FakeCopyMode(mode):
                    model = copy.deepcopy(self.model)
            else:
                with mode, copied_as_fakes(), fakes_converted():
                    model = _built(self.model)
            batch, validation = (
                faked(given, values) for given in (self.batch, self.validation)
            )
            for one in (mode, values, numbers_of_fakes(values), tracker):
                stack.enter_context(one)
            if self.gpu is not None:
                rules = cuda_rules(self.gpu.capability, self.attention_patch)
                stack.enter_context(rules)
            self._run(tracker, model, batch, validation)
            tracker.close()
        return tracker.trace, values.guesses

    def _replayed(self, trace: Trace) -> Replay:
        return replayed(trace, self.gpu, self.expandable_segments)

    def _by_a_line(self, error: Exception) -> Replay:
        """Real steps on the CPU with few samples."""
        size = batch_size(self.batch)
        if size is None:
            raise error
        few, more = _FEW
        if size <= more:
            trace, inside = self._really(size)
            return _with_kernels(self._replayed(trace), inside)
        (one, inside), (two, more_inside) = (self._really(n) for n in _FEW)
        factor = (size - more) / (more - few)
        done = self._replayed(_stretched(one, two, factor))
        inside = more_inside + round((more_inside - inside) * factor)
        return _with_kernels(done, inside)

    def _really(self, size: int) -> tuple[Trace, int]:
        """The trace, and what the CPU's kernels allocate by themselves at the peak."""
        model = (
            copy.deepcopy(self.model)
            if isinstance(self.model, torch.nn.Module)
            else _built(self.model)
        )
        tracker = Tracker()
        rng = torch.get_rng_state()
        try:
            on_cpu = dataclasses.replace(self, device="cpu")
            batch, validation = (
                resized(given, size) for given in (self.batch, self.validation)
            )
            with _profile(self.gpu is None) as profile, tracker, cuda_means_cpu():
                on_cpu._run(tracker, model.cpu(), batch, validation)
            tracker.close()
        finally:
            torch.set_rng_state(rng)
        return tracker.trace, _inside(profile, tracker.trace) if profile else 0

    def _notes(self) -> list[str]:
        if self.gpu is None:
            return []
        notes = [
            f"{self.gpu.context / MIB:.0f} MiB of the total are CUDA's context, and "
            f"{2 * workspace_of(self.gpu) / MIB:.0f} cuBLAS's "
            "workspaces: constants, not measured here"
        ]
        if isinstance(self.model, torch.nn.Module):
            modules = list(self.model.modules())
            if any(isinstance(module, torch.nn.RNNBase) for module in modules):
                notes.append("what cuDNN's recurrent layers take is approximate")
            if any(isinstance(module, _CONVOLUTIONS) for module in modules):
                notes.append("cuDNN's workspaces for convolutions are approximate")
        return notes


def replayed(trace: Trace, gpu: Gpu | None, expandable: bool) -> Replay:
    """What the trace comes to on a GPU; None: on the CPU.

    Where the GPU's memory does not suffice the figures are those of a larger one.
    """
    if gpu is None:
        # The C library's heap has holes, much as a pool that grows at its end.
        heap = replay(trace, Allocator(None, expandable=True)).reserved
        return dataclasses.replace(replay(trace), reserved=heap)
    # Where the CPU's kernels ran: for the threads of the forward and backward pass.
    seen = "workspaces" in trace.kinds
    workspaces = () if seen else (workspace_of(gpu), workspace_of(gpu))
    done = replay(trace, Allocator(gpu.memory - gpu.context, expandable), workspaces)
    if not done.failed:
        return done
    needed = replay(trace, Allocator(None, expandable), workspaces)
    return dataclasses.replace(needed, failed=done.failed)


def _plain(batch: Any) -> Any:
    """A mapping such as transformers' BatchEncoding as a dict."""
    if isinstance(batch, Mapping) or (
        hasattr(batch, "keys") and hasattr(batch, "data") and hasattr(batch, "items")
    ):
        return dict(batch.items())
    return batch


def _built(build: Callable[[], Any]) -> torch.nn.Module:
    model = build()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            "`model` must be a module or a function that builds one; the function "
            f"returned {type(model).__name__}"
        )
    return model


def faked(batch: Any, values: Values) -> Any:
    def fake(leaf: Any) -> Any:
        return values.fake(leaf) if isinstance(leaf, torch.Tensor) else leaf

    if hasattr(batch, "to_data_list"):
        return copy.copy(batch).apply(fake)
    return tree_map(fake, batch)


def _has_recurrent_layers(model: Any) -> bool:
    return isinstance(model, torch.nn.Module) and any(
        isinstance(module, torch.nn.RNNBase) for module in model.modules()
    )


def _profile(wanted: bool) -> Any:
    if not wanted:
        return contextlib.nullcontext()
    cpu = torch.profiler.ProfilerActivity.CPU
    return torch.profiler.profile(profile_memory=True, activities=[cpu])


def _inside(profile: Any, trace: Trace) -> int:
    """How much higher the profiler's peak is than the trace's."""
    kept = ("weights", "buffers")  # were there before the profiler
    level = most = sum(
        n for n, k in zip(trace.sizes, trace.kinds, strict=True) if k in kept
    )
    for size in memory_events(profile):
        level += size
        most = max(most, level)
    return max(0, most - replay(trace).allocated)


def _with_kernels(done: Replay, inside: int) -> Replay:
    if not inside:
        return done
    return dataclasses.replace(
        done,
        allocated=done.allocated + inside,
        reserved=done.reserved + inside,
        kinds={**done.kinds, "inside of kernels": inside},
    )


def _stretched(one: Trace, two: Trace, factor: float) -> Trace:
    """The second trace with every storage grown by `factor` times what it has more than
    in the first.

    Raises:
        NotImplementedError: the two steps did not do the same.
    """
    if one.events != two.events:
        raise NotImplementedError(
            "the step does something else for each batch size, so neither fake tensors "
            "nor small steps tell what it needs"
        )
    sizes = [
        max(0, b + round((b - a) * factor))
        for a, b in zip(one.sizes, two.sizes, strict=True)
    ]
    return dataclasses.replace(two, sizes=sizes)
