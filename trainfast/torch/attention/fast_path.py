"""The calls that most models make, on the shortest way: plain tensors, eagerly, with
nothing but a scale and perhaps causal or a mask. Every other call takes the way through
dispatch.py; so does one of these that the core refuses, to find out why.

What a call of scaled_dot_product_attention costs on [1, 1, 1, 8], in microseconds, and
what torch's own does (torch 2.13, a virtual EPYC with AVX-512):

    torch.no_grad()   6.7    4.6   checks 1.7, out 1.1, the core 1.3
    forward          10.7    4.3   autograd.Function 3.2, lse 1.5, and these
    backward         23.3   19.9   with three empty gradients 18, the core 1.9
    both             35.8   24.2

A mask adds 2 us to a forward pass, as it does to torch's.
With the second level of caches overwritten before each call it is 13, 23 and 38 beside
torch's 11, 8 and 40: there every line of Python that does not run counts for more.
"""

import math
from typing import Any

import torch
from torch import Tensor

from trainfast import _core
from trainfast.torch.attention.autograd import (
    N_INPUTS,
    AttentionBackward,
    backward_by_operator,
    count,
    dense_rows,
    empty_grad,
    empty_lse,
    empty_rows,
    is_mapped,
    launch,
)
from trainfast.torch.attention.dispatch import PLAIN
from trainfast.torch.attention.math_backend import Extras, Inputs, Options
from trainfast.torch.private import (
    forward_ad,
    is_any_autocast_enabled,
    is_tracing,
    n_dispatch_modes,
    transform_level,
)


def is_open(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> bool:
    """Whether these are plain tensors, the first three of 4 dims and the mask without a
    gradient, and plain numbers, eagerly, and nobody else looks at operators or changes
    what they do."""
    if (
        torch.compiler.is_compiling()
        or type(is_causal) is not bool
        or not (scale is None or type(scale) is float)
    ):
        return False
    for x in (q, k, v) if mask is None else (q, k, v, mask):
        if (
            type(x) not in PLAIN
            or x.layout != torch.strided
            or x.is_nested
            or x.is_neg()
        ):
            return False
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        return False
    return not (
        (mask is not None and mask.requires_grad)
        or is_any_autocast_enabled()
        or is_tracing()
        or n_dispatch_modes() > 0
        or transform_level() is not None
        or forward_ad._current_level >= 0
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor | None:
    """Attention [batch, heads, n_q, dim_v] with its history, where the way is open;
    None where the core refuses."""
    if scale is None:
        scale = 1 / math.sqrt(q.size(-1) or 1)
    try:
        if torch.is_grad_enabled() and (
            q.requires_grad or k.requires_grad or v.requires_grad
        ):
            out: Tensor = _apply(q, k, v, mask, is_causal, scale)
            return out
        return _forward(q, k, v, mask, None, is_causal, scale)
    except (NotImplementedError, ValueError):
        return None


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    lse: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Tensor:
    out, how = empty_rows(q, v.size(-1)), _how(q, mask)
    _core.attention(q, k, v, out, lse, scale=scale, is_causal=is_causal, **how)
    count(q)
    return out


def _how(q: Tensor, mask: Tensor | None) -> dict[str, Any]:
    """Further keywords of the core's calls."""
    return launch(q) if mask is None else {"mask": mask, **launch(q)}


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        lse = empty_lse(q, bnhd=False)
        out = _forward(q, k, v, mask, lse, is_causal, scale)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.scale, ctx.is_causal = float(scale), is_causal
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> Any:
        if dout is None:
            return (None,) * 6
        if torch.is_grad_enabled() or dout._is_zerotensor() or is_mapped(dout):
            return (*_with_history(ctx, dout), None, None, None)
        q, k, v, mask, out, lse = ctx.saved_tensors
        dq_wanted, dk_wanted, dv_wanted, *_ = ctx.needs_input_grad
        dq = empty_grad(q) if dq_wanted else None  # a loop takes 2 us longer
        dk = empty_grad(k) if dk_wanted else None
        dv = empty_grad(v) if dv_wanted else None
        _core.attention_backward(
            dense_rows(dout, count=False),
            *(q, k, v, out, lse, None),
            *(dq, dk, dv, None, None, None),
            scale=ctx.scale,
            is_causal=ctx.is_causal,
            **_how(q, mask),
        )
        count(q)
        return dq, dk, dv, None, None, None


def _with_history(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of q, k and v, which can be differentiated again."""
    q, k, v, mask, out, lse = ctx.saved_tensors
    wanted = (*ctx.needs_input_grad[:3], *(False,) * (N_INPUTS - 3))
    tensors = (*Inputs(q, k, v), *Extras(mask), out, lse)
    options = Options(ctx.scale, ctx.is_causal)
    arguments = (options, wanted, dout, None, *tensors)
    if is_mapped(dout):
        return backward_by_operator(*arguments)[:3]
    grads: tuple[Tensor | None, ...] = AttentionBackward.apply(*arguments)
    return grads[:3]


# Function.apply without its look for function transforms, which is_open() has done.
_apply = super(torch.autograd.Function, _Attention).apply
