"""What takes the place of torch's names under trainfast.patch("attention")."""

import functools
import inspect
from threading import Lock
from typing import Any

import torch
from torch.nn import functional

from trainfast.torch.attention_route import count_once
from trainfast.torch.sdpa import scaled_dot_product_attention

__all__ = ["multi_head_attention_forward", "scaled_dot_product_attention"]

_torchs = functional.multi_head_attention_forward
_NEED_WEIGHTS = list(inspect.signature(_torchs).parameters).index("need_weights")


@functools.wraps(_torchs)
def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
    """torch's own, but it counts the calls that no attention kernel can take: those
    that ask for the weights, as nn.MultiheadAttention does by default."""
    wanted = args[_NEED_WEIGHTS:][:1] or (kwargs.get("need_weights", True),)
    if wanted[0]:
        count_once("need_weights=True of multi-head attention")
    return _torchs(*args, **kwargs)


class _FastPath:
    """Torch's, there for all threads as long as one of them is within."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = Lock(), 0, False

    def __enter__(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.before = torch.backends.mha.get_fastpath_enabled()
            self.inside += 1
            torch.backends.mha.set_fastpath_enabled(True)

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0 and _is_patched():  # it may have ended meanwhile
                torch.backends.mha.set_fastpath_enabled(self.before)


_fast_path = _FastPath()


def _call(self: torch.nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
    """MultiheadAttention's: nested tensors take torch's fast path, since only that one
    does."""
    call = torch.nn.Module.__call__
    query = args[0] if args else kwargs.get("query")
    if getattr(query, "is_nested", False) is not True:  # a proxy of torch.fx has all
        return call(self, *args, **kwargs)
    count_once("a nested tensor, in multi-head attention")
    with _fast_path:
        return call(self, *args, **kwargs)


def _is_patched() -> bool:
    return torch.nn.MultiheadAttention.__dict__.get("__call__") is _call


def take_nested(value: bool) -> None:
    """Lets nn.MultiheadAttention take nested tensors without torch's fast path."""
    kind: Any = torch.nn.MultiheadAttention
    if value:
        kind.__call__ = _call
    elif _is_patched():
        del kind.__call__


def _keep_scriptable() -> None:
    """torch.jit.script goes on compiling torch's functions where it finds these."""
    multi_head_attention_forward.__dict__["__script_if_tracing_wrapper"] = True
    multi_head_attention_forward.__dict__["__original_fn"] = _torchs
    try:
        from torch.jit._builtins import _register_builtin
    except ImportError:
        return
    _register_builtin(
        scaled_dot_product_attention, "aten::scaled_dot_product_attention"
    )


_keep_scriptable()
