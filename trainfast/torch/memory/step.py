"""A training step as the memory tools run it: forward, loss, backward, optimizer."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from trainfast.memory.trace import BACKWARD, FORWARD, STEP, VALIDATION
from trainfast.torch.memory.tracker import Tracker
from trainfast.torch.optim.adamw import AdamW
from trainfast.torch.optim.fused_step import FusedStep
from trainfast.torch.private import tree_leaves, tree_map

Optimizer = str | tuple[str, dict[str, Any]] | Callable[..., Any]
_OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}
_DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_dtype(amp: str | None) -> torch.dtype | None:
    if amp not in _DTYPES:
        raise ValueError(f'`amp` must be None, "bf16" or "fp16", got {amp!r}')
    return _DTYPES[amp]


def autocast(device: str, dtype: torch.dtype | None) -> Any:
    return torch.autocast(device, dtype) if dtype else contextlib.nullcontext()


def forward_and_loss(
    model: Any,
    batch: Any,
    loss_fn: Callable[..., Any] | None,
    variables: dict[str, Any],
) -> torch.Tensor:
    """The loss; the model's output goes to variables["out"], as in a plain loop, where
    it lives until the next one takes its place.

    The batch goes into the model as keyword arguments where it is a mapping. A tuple
    of two, the usual pair of a loader, gives the model its first and `loss_fn` its
    second; other tuples give the model everything. `loss_fn(output, target)` is
    called, or loss_fn(output, batch) where the batch is no pair. Without it the
    output's `loss` counts, else the output itself where it is a number, else its mean.
    """
    pair = isinstance(batch, tuple | list) and len(batch) == 2
    if loss_fn is not None and pair:
        out = variables["out"] = model(batch[0])
        loss: torch.Tensor = loss_fn(out, batch[1])
        return loss
    if hasattr(batch, "keys") and not hasattr(batch, "edge_index"):
        out = model(**batch)
    elif isinstance(batch, tuple | list):
        out = model(*batch)
    else:
        out = model(batch)
    variables["out"] = out
    if loss_fn is not None:
        loss = loss_fn(out, batch)
        return loss
    found = getattr(out, "loss", None)
    if found is None:
        found = next((t for t in tree_leaves(out) if isinstance(t, torch.Tensor)), None)
    if found is None:
        raise TypeError(
            "the model's output holds no tensor; pass `loss_fn`, or `step` for a step "
            "of your own"
        )
    return found if found.dim() == 0 else found.float().mean()


def make_optimizer(optimizer: Optimizer, model: torch.nn.Module, cuda: bool) -> Any:
    """An optimizer from its name, (name, arguments) or a function of the parameters.

    "trainfast" is trainfast.AdamW, with all its options.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    if not params:
        return None
    if callable(optimizer):
        return optimizer(params)
    name, given = optimizer if isinstance(optimizer, tuple) else (optimizer, {})
    kwargs: dict[str, Any] = {"lr": 1e-3, **given}
    if name == "trainfast":
        return AdamW(params, **kwargs)
    if name not in _OPTIMIZERS:
        raise ValueError(
            '`optimizer` must be "adamw", "adam", "sgd", "trainfast", a pair of a '
            f"name and arguments, or a function of the parameters, got {name!r}"
        )
    if cuda and not kwargs.get("fused"):
        kwargs.setdefault("foreach", True)  # torch's choice for CUDA tensors
    return _OPTIMIZERS[name](params, **kwargs)


def run_steps(
    tracker: Tracker,
    model: torch.nn.Module,
    batch: Any,
    *,
    step: Callable[[Any, Any, dict[str, Any]], torch.Tensor],
    optimizer: Optimizer,
    dtype: torch.dtype | None,
    device: str,
    steps: int,
    validation: Any,
    release_gradients: bool,
) -> None:
    """Runs training steps and a validation batch, and tells the tracker what is what.

    Every step has a batch of its own; as in a plain loop, the old one and the old
    output live until the new ones have come.
    """
    begin = tracker.trace.begin
    for parameter in model.parameters():
        tracker.see(parameter, "weights")
    for buffer in model.buffers():
        tracker.see(buffer, "buffers")
    made = make_optimizer(optimizer, model, device == "cuda")
    if release_gradients and made is not None:
        _release_gradients(model, made)

    variables: dict[str, Any] = {}
    own = batch
    for _ in range(steps):
        begin(FORWARD)
        tracker.kind = "batch"
        own = fresh(batch)
        tracker.kind = "activations"
        with autocast(device, dtype):
            loss = step(model, own, variables)
        begin(BACKWARD)
        tracker.kind = "temporaries"
        if loss.requires_grad:
            loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                tracker.see(parameter.grad, "gradients")
        begin(STEP)
        if made is not None:
            # our kernel takes no fake tensors, and needs no memory but the state
            made.make_state() if isinstance(made, FusedStep) else made.step()
            tracker.see_all([dict(s) for s in made.state.values()], "optimizer state")
            made.zero_grad()
    variables.clear()
    del own, loss
    if validation is not None:
        begin(VALIDATION)
        tracker.kind = "batch"
        own = fresh(validation)
        tracker.kind = "activations"
        model.eval()
        with torch.no_grad(), autocast(device, dtype):
            step(model, own, variables)


def _release_gradients(model: torch.nn.Module, optimizer: Any) -> None:
    """Frees each gradient as optimizer.release_gradients() does, without its step."""
    if not isinstance(optimizer, FusedStep):
        raise ValueError(
            "`release_gradients` needs an optimizer of trainfast; pass "
            '`optimizer="trainfast"`'
        )

    def release(param: torch.Tensor) -> None:
        optimizer.make_state()
        param.grad = None

    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(release)


def fresh(batch: Any) -> Any:
    """A copy of the batch's tensors, as a loop gets them from the host."""
    if hasattr(batch, "edge_index") or hasattr(batch, "to_data_list"):
        return batch.clone()
    return tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, batch)
