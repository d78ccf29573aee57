"""What takes the place of torch's names under trainfast.patch("attention"), and torch's
registration of attention implementations."""

import functools
import inspect
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainfast.torch import attention_math, attention_ops
from trainfast.torch.attention import (
    DTYPES,
    MAX_DIM,
    count_once,
    scaled_dot_product_attention,
)
from trainfast.torch.attention_math import Extras, Inputs, Options

__all__ = [
    "multi_head_attention_forward",
    "register_flash_attention_impl",
    "scaled_dot_product_attention",
]

# ---- Names of torch.nn.functional ----------------------------------------------------

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


# ---- torch.nn.attention.activate_flash_attention_impl --------------------------------


class _Registered:
    """The kernels under torch's operators, until remove()."""

    def __init__(self) -> None:
        self._library: torch.library.Library | None = torch.library.Library(
            "aten", "IMPL"
        )
        name = "_scaled_dot_product_flash_attention_for_cpu"
        with warnings.catch_warnings():  # that torch's own are overridden
            warnings.simplefilter("ignore")
            self._library.impl(name, _flash_for_cpu, "CPU")
            self._library.impl(f"{name}_backward", _flash_for_cpu_backward, "CPU")

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None


def _taken(q: Tensor, v: Tensor) -> bool:
    dims = (q.shape[-1], v.shape[-1])
    return q.dtype in DTYPES and min(dims) > 0 and max(dims) <= MAX_DIM


def _flash_for_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention_for_cpu."""
    options = Options(query.shape[-1] ** -0.5 if scale is None else scale, is_causal)
    inputs, extras = Inputs(query, key, value), Extras(attn_mask)
    if _taken(query, value):
        return attention_ops.forward(inputs, extras, options)
    return attention_math.attention(inputs, extras, options)


def _flash_for_cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_for_cpu_backward."""
    options = Options(query.shape[-1] ** -0.5 if scale is None else scale, is_causal)
    inputs, extras = Inputs(query, key, value), Extras(attn_mask)
    if _taken(query, value):
        lse = logsumexp.contiguous()
        wanted = (True, True, True, False, False, False)
        grads = attention_ops.backward(
            grad_out, None, wanted, inputs, extras, out, lse, options
        )
        return tuple(grads[:3])
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        again, _ = attention_math.attention(Inputs(*leaves), extras, options)
    return torch.autograd.grad(again, leaves, grad_out)


def register_flash_attention_impl() -> bool:
    """Tells torch of these kernels as the implementation "trainfast".

    torch.nn.attention.activate_flash_attention_impl("trainfast") then puts them under
    torch's own operators on the CPU, which also reaches code that patch() cannot, and
    restore_flash_attention_impl() takes them away. Calls with dropout or a learned mask
    do not get that far in torch. Returns whether this torch has the registration.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl as register
    except ImportError:
        return False
    register("trainfast", register_fn=_Registered)
    return True
