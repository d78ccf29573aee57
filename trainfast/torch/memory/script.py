"""Runs a script up to its first batch, and its next steps on fake tensors.

    python -m trainfast.torch.memory.script

The job is in the environment, as that of `trainfast.torch.probe.child`. The script's
data, model and optimizer are its own. Once it asks for a batch and has an optimizer
or has run a backward pass, the weights become fakes, and so does every batch: the loop
goes on as it is, and takes no memory and little time. After `steps` steps the process
ends.
"""

import contextlib
import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import torch

from trainfast.memory.gpus import Gpu
from trainfast.memory.trace import BACKWARD, FORWARD, STEP
from trainfast.torch.memory.batches import batch_size
from trainfast.torch.memory.cuda_rules import cuda_rules
from trainfast.torch.memory.estimate import faked, replayed
from trainfast.torch.memory.pretend import pretend_gpu
from trainfast.torch.memory.redirect import cuda_means_cpu, numbers_of_fakes
from trainfast.torch.memory.tracker import Tracker
from trainfast.torch.memory.values import Values
from trainfast.torch.optim.fused_step import FusedStep
from trainfast.torch.private import (
    FakeTensor,
    FakeTensorMode,
    tree_map,
    without_dispatch_modes,
)
from trainfast.torch.probe import hooks
from trainfast.torch.probe.child import Child, begin, write
from trainfast.torch.probe.loop import Loop, Switch


class OnFakes(Switch):
    """Turns the loop's tensors into fakes at its first batch, and tracks them.

    Args:
        loop: the script's.
        gpu: whose rules hold; None: the CPU's.
        fake: False tracks the script's real tensors instead.
        ended: called after each step on fakes: the first optimizer's, or a backward
            pass where there is no optimizer.
    """

    name = "estimate"

    def __init__(
        self,
        loop: Loop,
        gpu: Gpu | None,
        fake: bool,
        ended: Callable[[], None],
    ) -> None:
        self.tracker = Tracker(gpu)
        self.steps = 0
        self.batch_size: int | None = None
        self.values: Values | None = None
        self.began = self.recurrent = False
        self._gpu, self._fake, self._ended = gpu, fake, ended
        self._params: list[torch.Tensor] = []
        self._kept = contextlib.ExitStack()  # closed by the end of the process
        self._loop = loop
        module = torch.nn.modules.module
        module.register_module_forward_pre_hook(self._called)

    @staticmethod
    def _is_training(loop: Loop) -> bool:
        return loop.backwards > 0 or bool(_optimizers())

    def next_batch(self, loop: Loop, iterator: Any, original: Any) -> Any:
        with without_dispatch_modes():
            batch = original(iterator)
        if not self.began and self._is_training(loop):
            self._begin()
        if not self.began:
            return batch
        batch = self._faked(batch)
        self.tracker.see_all(batch, "batch")
        self.batch_size = batch_size(batch) or self.batch_size
        return batch

    def backward(self, loop: Loop, original: Any, args: Any, kwargs: Any) -> None:
        self._moment(BACKWARD)
        original(*args, **kwargs)
        if self.began:
            for param in self._params:
                if param.grad is not None:
                    self.tracker.see(param.grad, "gradients")
            if not _optimizers():  # the script updates its parameters by hand
                self._step_ended()
        self._moment(FORWARD)

    def step(self, loop: Loop, original: Any, args: Any, kwargs: Any) -> Any:
        self._moment(STEP)
        result = None
        if self.began and isinstance(args[0], FusedStep) and args[1:] == ():
            args[0].make_state()  # the kernel takes no fake tensors
        else:
            result = original(*args, **kwargs)
        if self.began:
            for optimizer in loop.optimizers:
                states = [dict(state) for state in optimizer.state.values()]
                self.tracker.see_all(states, "optimizer state")
            if args[0] is loop.optimizers[0]:
                self._step_ended()
        self._moment(FORWARD)
        return result

    def _step_ended(self) -> None:
        self.steps += 1
        self._ended()

    def _called(self, module: torch.nn.Module, args: Any) -> Any:
        """Before a module's forward(): for loops whose batches no loader makes."""
        if self.began or not (module.training and torch.is_grad_enabled()):
            return None
        if next(module.parameters(), None) is None:
            return None
        if not self._is_training(self._loop):
            return None
        self._begin()
        return self._faked(args)

    def _faked(self, batch: Any) -> Any:
        if self.values is None:
            return batch
        with without_dispatch_modes():
            return faked(batch, self.values)

    def _moment(self, moment: str) -> None:
        if self.began:
            self.tracker.trace.begin(moment)
            of_forward = moment == FORWARD
            self.tracker.kind = "activations" if of_forward else "temporaries"

    def _begin(self) -> None:
        self.began = True
        modules: list[torch.nn.Module] = _objects(torch.nn.Module)
        self.recurrent = any(isinstance(m, torch.nn.RNNBase) for m in modules)
        if self.recurrent and self._fake and self._gpu is None:
            raise NotImplementedError("the CPU's recurrent layers need real tensors")
        if self._fake:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            self.values = Values(mode)
            _swap(modules, self.values)
            self._kept.enter_context(mode)
            self._kept.enter_context(self.values)
            self._kept.enter_context(numbers_of_fakes(self.values))
            torch.save = lambda *_, **__: None
            if self._gpu is not None:
                self._kept.enter_context(cuda_rules(self._gpu.capability))
        self._kept.enter_context(self.tracker)
        for module in modules:
            for param in module._parameters.values():
                if param is not None:
                    self.tracker.see(param, "weights")
                    self._params.append(param)
            for buffer in module._buffers.values():
                if buffer is not None:
                    self.tracker.see(buffer, "buffers")
        inner = {id(child) for module in modules for child in module.children()}
        for module in modules:
            if id(module) not in inner:
                self.tracker.name_modules(module)
        self._moment(FORWARD)


def _objects(kind: type) -> list[Any]:
    """Every object of this class that lives."""
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def _optimizers() -> list[torch.optim.Optimizer]:
    return _objects(torch.optim.Optimizer)


def _swap(modules: list[torch.nn.Module], values: Values) -> None:
    """Puts a fake in the place of each tensor of the modules and optimizers."""
    fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):  # of an optimizer that wraps another one
            return tensor
        if id(tensor) not in fakes:
            made = values.blank(tensor)
            if isinstance(tensor, torch.nn.Parameter):
                made = torch.nn.Parameter(made, tensor.requires_grad)
            fakes[id(tensor)] = tensor, made  # the real one lives on: its id is taken
        return fakes[id(tensor)][1]

    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = fake(tensor)  # type: ignore[assignment]
        if isinstance(module, torch.nn.RNNBase):
            flat: Any = module._flat_weights
            module._flat_weights = list(map(fake, flat))
    for optimizer in _optimizers():
        for group in optimizer.param_groups:
            group["params"] = [fake(param) for param in group["params"]]
        states = {
            fake(param): tree_map(lambda leaf: faked(leaf, values), dict(state))
            for param, state in optimizer.state.items()
        }
        optimizer.state.clear()
        optimizer.state.update(states)


class Script(Child):
    """A script whose steps are estimated."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__({**job, "switches": [], "rounds": 0, "seconds": 0, "seed": 0})
        self.gpu = Gpu(*job["gpu"]) if job["gpu"] is not None else None
        self.on_fakes = OnFakes(self.loop, self.gpu, job["fake"], self.fake_step_ended)
        self.loop.switch = self.on_fakes

    def run(self) -> None:
        hooks.install(self.loop, lambda: None)
        with contextlib.ExitStack() as stack:
            if self.gpu is not None:
                pretend_gpu(self.gpu)
                stack.enter_context(cuda_means_cpu())
            error = self.run_once()
        if error is None and not self.on_fakes.steps:
            error = "ended without a training step that torch shows"
        self.finish(error)

    def fake_step_ended(self) -> None:
        if self.on_fakes.steps == self.job["steps"]:
            self.finish()

    def finish(
        self, error: str | None = None, backwards: int = 0, cut: bool = False
    ) -> None:
        """Writes what the steps took and ends the process."""
        on_fakes, values = self.on_fakes, self.on_fakes.values
        on_fakes.tracker.close()
        with without_dispatch_modes():
            done = replayed(on_fakes.tracker.trace, self.gpu, self.job["expandable"])
        result = {
            "replay": dataclasses.asdict(done),
            "guesses": values.guesses if values is not None else {},
            "batch_size": on_fakes.batch_size,
            "recurrent": on_fakes.recurrent,
            "error": error,
        }
        write(self.job, result)


if __name__ == "__main__":
    Script(begin()).run()
