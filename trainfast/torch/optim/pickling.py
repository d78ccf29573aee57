"""Pickles of whole optimizers that load as torch's, without trainfast."""

import pkgutil
from typing import Any

import torch

from trainfast.torch import private
from trainfast.torch.optim.state import OPTIONS


class ClassByName:
    """Pickled in place of a class of torch.optim; loading looks the name up there.

    That gives trainfast's class where the name is patched, and torch's elsewhere.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return pkgutil.resolve_name, (f"torch.optim:{self.name}",)


def reduce_as_torchs(optimizer: Any) -> tuple[Any, ...] | None:
    """__reduce_ex__() of an optimizer that is to load as torch's; None for others.

    Those are others that use an option which only trainfast has, subclasses, and all
    while the name in torch.optim is not patched: their scripts name trainfast.
    """
    cls = type(optimizer)
    if getattr(torch.optim, cls.__name__, None) is not cls:
        return None
    offered = vars(optimizer).get("_step_supports_amp_scaling")
    defaults = optimizer.defaults
    options = any(defaults.get(name, plain) != plain for name, plain in OPTIONS.items())
    if (
        options
        or not optimizer._is_plain()
        or offered is not (True if defaults["fused"] else None)
    ):
        return None
    state = optimizer.__getstate__()
    del state["max_grad_norm"]
    state["defaults"] = _without_options(defaults)
    state["param_groups"] = [_without_options(g) for g in state["param_groups"]]
    return object.__new__, (ClassByName(cls.__name__),), state


def _without_options(entries: dict[str, Any]) -> dict[str, Any]:
    """The entries that torch's class of this version has."""
    own = set(OPTIONS)
    if not private.ADAM_DECOUPLES:
        own.add("decoupled_weight_decay")
    return {name: value for name, value in entries.items() if name not in own}
