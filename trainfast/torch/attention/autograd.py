"""Calls of the attention kernels from torch, and their autograd in eager mode, which
costs a few microseconds (custom_ops.py has the same for graphs)."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainfast import _core, sequence_lengths
from trainfast.stats import count_call, count_fallback
from trainfast.torch import private
from trainfast.torch.attention import math_backend
from trainfast.torch.attention.kept_memory import empty_large, is_large
from trainfast.torch.attention.math_backend import Extras, Inputs, Options
from trainfast.torch.private import forward_ad, is_batched, is_batched_by_grad

FORWARD_MODE = "forward-mode differentiation"
N_INPUTS = len(Inputs._fields)
Grads = tuple[Tensor | None, ...]
_OTHERS = (*Inputs._fields[3:], *Extras._fields)
_USUAL = Options(1.0)[2:]  # all but the scale and causal
_ON_CPU = {"scratch": lambda n: torch.empty(n, dtype=torch.float32, device="cpu")}


# ---- Calls of the core ---------------------------------------------------------------


def empty_rows(like: Tensor, dim: int) -> Tensor:
    """An uninitialised tensor of like's sizes but the last, its dims in memory in the
    order of like's, the last one dense."""
    if dim == like.size(-1):
        return empty_grad(like)
    return _empty_rows(like, dim)


def empty_grad(x: Tensor) -> Tensor:
    """empty_rows of x's own sizes."""
    if is_large(x, x.numel()):
        made = torch.empty_like(x, device="meta")
        if made.stride(-1) == 1:
            return empty_large(made.shape, made.stride(), x)
    else:
        made = torch.empty_like(x)
    return made if made.stride(-1) == 1 else _empty_rows(x, x.size(-1))


def _empty_rows(like: Tensor, dim: int) -> Tensor:
    shape, strides = [*like.shape[:-1], dim], [0] * like.dim()
    strides[-1], step = 1, dim
    order = sorted(range(like.dim() - 1), key=lambda i: (like.stride(i), -i))
    for i in order:
        strides[i] = step
        step *= shape[i]
    if is_large(like, step):
        return empty_large(shape, strides, like)
    return like.new_empty_strided(shape, strides)


def empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """An uninitialised contiguous tensor of like's dtype."""
    if is_large(like, math.prod(shape)):
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        return empty_large(shape, strides, like)
    return like.new_empty(shape)


def empty_lse(q: Tensor, bnhd: bool) -> Tensor:
    *shape, _ = q.shape
    if bnhd or len(shape) == 2:  # heads come after rows
        shape[-2:] = shape[-1], shape[-2]
    return q.new_empty(*shape, dtype=_lse_dtype(q))  # torch is slower with a list


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def dense_rows(x: Tensor, count: bool = True) -> Tensor:
    """x, or a copy whose last stride is 1."""
    if x.stride(-1) == 1:
        return x
    if count:
        count_fallback("attention", "an array without stride 1 was copied")
    return x.clone(memory_format=torch.contiguous_format)


def _fill_rest(x: Tensor, cu_seqlens: Tensor | None, value: float, dim: int) -> None:
    """Fills x where its rows, its dim `dim`, are past the last item: the core does not
    touch them. On a GPU all of x: a look at the lengths would wait for it."""
    if cu_seqlens is not None and cu_seqlens.numel() > 0:
        used = 0 if x.is_cuda else int(cu_seqlens.view(-1)[-1])
        if 0 <= used < x.shape[dim]:  # otherwise an error of the core's
            x.narrow(dim, used, x.shape[dim] - used).fill_(value)


def count(q: Tensor) -> None:
    count_call("attention", "cuda" if q.is_cuda else _core.backend_in_use())


def launch(q: Tensor) -> dict[str, Any]:
    """Where the core's calls run, and have their scratch from."""
    if not q.is_cuda:
        return _ON_CPU
    return {
        "stream": private.cuda_stream(q.device.index),
        "scratch": partial(torch.empty, dtype=torch.float32, device=q.device),
    }


def _keywords(inputs: Inputs, extras: Extras, o: Options) -> dict[str, Any]:
    """What both of the core's calls take beside arrays of rows; what is not there is
    left out, since each costs 50 ns to build and to parse."""
    if sequence_lengths.CHECK_ON_DEVICE and inputs.q.is_cuda:
        _check_lengths(inputs, extras, o)
    keywords = {"scale": o.scale, "is_causal": o.is_causal, **launch(inputs.q)}
    if o[2:] != _USUAL:
        keywords.update(zip(Options._fields[2:], o[2:]))
    for name, x in zip(_OTHERS, (*inputs[3:], *extras)):
        if x is not None:
            keywords[name] = x
    return keywords


def _check_lengths(inputs: Inputs, extras: Extras, o: Options) -> None:
    """Of lengths on a GPU, unless its work is captured, when nobody can look."""
    given = (extras.cu_seqlens_q, extras.cu_seqlens_k, extras.kv_lens)
    if given != (None,) * 3 and not torch.cuda.is_current_stream_capturing():
        sequence_lengths.check_lengths(
            inputs.q.shape,
            inputs.k.shape,
            cu_seqlens_q=given[0],
            cu_seqlens_k=given[1],
            kv_lens=given[2],
            max_seqlen_q=o.max_seqlen_q,
            max_seqlen_k=o.max_seqlen_k,
            bnhd=o.bnhd,
        )


def forward(
    inputs: Inputs, extras: Extras, o: Options, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out, in the tensor that is given or a new one, and lse; knows nothing of
    autograd."""
    q, k, v = inputs[:3]
    if out is None:
        out = empty_rows(q, v.shape[-1])
    lse = empty_lse(q, o.bnhd)
    _fill_rest(out, extras.cu_seqlens_q, 0.0, 0)
    _fill_rest(lse, extras.cu_seqlens_q, -math.inf, 1)
    _core.attention(
        dense_rows(q),
        dense_rows(k),
        dense_rows(v),
        out,
        lse,
        **_keywords(inputs, extras, o),
    )
    count(q)
    return out, lse


def empty_grads(inputs: Inputs, wanted: Sequence[bool]) -> list[Tensor | None]:
    """Where the core writes gradients; None for what is not wanted."""
    dtype = _lse_dtype(inputs.q)
    made: list[Tensor | None] = [None] * N_INPUTS
    for i, x in enumerate(inputs):
        if wanted[i] and x is not None:
            if i < 3:
                made[i] = empty_grad(x)
            else:
                made[i] = empty(x.new_empty(0, dtype=dtype), x.shape)
    return made


def backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    wanted: Sequence[bool],
    inputs: Inputs,
    extras: Extras,
    out: Tensor,
    lse: Tensor,
    o: Options,
    into: Sequence[Tensor] | None = None,
) -> list[Tensor | None]:
    """The gradients of `inputs` that are wanted, those of q, k and v in `into` if it is
    given; knows nothing of autograd."""
    q, k, v = inputs[:3]
    grads = empty_grads(inputs, wanted) if into is None else [*into, None, None, None]
    lengths = (extras.cu_seqlens_q, extras.cu_seqlens_k, extras.cu_seqlens_k)
    for grad, cu_seqlens in zip(grads, lengths):
        if grad is not None:
            _fill_rest(grad, cu_seqlens, 0.0, 0)
    if dout is None or dout._is_zerotensor():
        dout = torch.zeros_like(out)
    _core.attention_backward(
        dense_rows(dout, count=False),
        dense_rows(q),
        dense_rows(k),
        dense_rows(v),
        out,
        lse,
        None if dlse is None else dlse.contiguous(),
        *grads,
        **_keywords(inputs, extras, o),
    )
    count(q)
    if inputs.bias is not None and grads[3] is not None:
        grads[3] = grads[3].to(inputs.bias.dtype)
    return grads


# ---- Autograd ------------------------------------------------------------------------


def is_mapped(*tensors: Tensor | None) -> bool:
    """Whether a gradient is many at once, under torch.vmap or with is_grads_batched:
    operators are taken apart then.

    Raises:
        NotImplementedError: a gradient has a tangent, which would be lost.
    """
    mapped = False
    for x in tensors:
        if x is None:
            continue
        if (
            forward_ad._current_level >= 0
            and forward_ad.unpack_dual(x).tangent is not None
        ):
            raise NotImplementedError(f"{FORWARD_MODE} of attention's backward pass")
        if is_batched(x) or is_batched_by_grad(x):
            mapped = True
    return mapped


def backward_by_operator(
    options: Options,
    wanted: Sequence[bool],
    dout: Tensor | None,
    dlse: Tensor | None,
    *tensors: Tensor | None,
) -> Any:
    """The gradients of Inputs; `tensors` are Inputs, Extras, out and lse."""
    *given, out, lse = tensors
    grads = torch.ops.trainfast.attention_backward(
        dout, dlse, out, lse, wanted, *given, *options
    )
    return tuple(x if n else None for x, n in zip(grads, wanted))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: Options, *tensors: Any) -> Any:
        inputs, extras = Inputs(*tensors[:N_INPUTS]), Extras(*tensors[N_INPUTS:])
        out, lse = forward(inputs, extras, options)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, *tensors)
        ctx.options = options
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        none = (None,) * len(Extras._fields)
        if dout is None and dlse is None:
            return (None, *[None] * N_INPUTS, *none)
        out, lse, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1 : 1 + N_INPUTS]
        arguments = (ctx.options, wanted, dout, dlse, *tensors, out, lse)
        if is_mapped(dout, dlse):
            return (None, *backward_by_operator(*arguments), *none)
        if torch.is_grad_enabled():
            return (None, *AttentionBackward.apply(*arguments), *none)
        inputs, extras = Inputs(*tensors[:N_INPUTS]), Extras(*tensors[N_INPUTS:])
        grads = backward(dout, dlse, wanted, inputs, extras, out, lse, ctx.options)
        return (None, *grads, *none)


class AttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        options: Options,
        wanted: Sequence[bool],
        dout: Tensor | None,
        dlse: Tensor | None,
        *tensors: Tensor,
    ) -> Any:
        *given, out, lse = tensors
        inputs, extras = Inputs(*given[:N_INPUTS]), Extras(*given[N_INPUTS:])
        if dout is None:
            dout = torch.zeros_like(out)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dout, dlse, *given)
        ctx.options = options
        grads = backward(dout, dlse, wanted, inputs, extras, out, lse, options)
        return tuple(grads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        dout, dlse, *given = ctx.saved_tensors
        made = second(grads, dout, dlse, given, ctx.options, ctx.needs_input_grad[2:])
        return (None, None, *made, *[None] * (len(Extras._fields) + 2))


def second(
    grads: Grads,
    dout: Tensor,
    dlse: Tensor | None,
    given: Sequence[Any],
    options: Options,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of dout, dlse and the inputs, given those of the first gradients."""
    count_fallback("attention", "double backward")
    with torch.autocast(dout.device.type, enabled=False):
        return math_backend.double_backward(
            grads,
            dout,
            dlse,
            Inputs(*given[:N_INPUTS]),
            Extras(*given[N_INPUTS:]),
            options,
            tuple(needed[: 2 + N_INPUTS]),
        )


class _Packed(torch.autograd.Function):
    """Attention of the parts of one tensor, [..., 3, heads, dim], whose gradient is
    made in one piece, not put together from three."""

    @staticmethod
    def forward(
        ctx: Any, options: Options, packed: Tensor, *others: Tensor | None
    ) -> Tensor:
        inputs, extras = _parts(packed, others)
        out, lse = forward(inputs, extras, options)
        ctx.save_for_backward(packed, out, lse, *others)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        packed, out, lse, *others = ctx.saved_tensors
        inputs, extras = _parts(packed, others)
        wanted = (True, True, True, False, False, False)
        arguments = (ctx.options, wanted, dout, None, *inputs, *extras, out, lse)
        if is_mapped(dout):
            grad = torch.stack(backward_by_operator(*arguments)[:3], -3)
        elif torch.is_grad_enabled():
            grad = torch.stack(AttentionBackward.apply(*arguments)[:3], -3)
        else:
            grad = empty_rows(packed, packed.shape[-1])
            parts = grad.unbind(-3)
            backward(
                dout, None, wanted, inputs, extras, out, lse, ctx.options, into=parts
            )
        return (None, grad, *[None] * len(others))


def _parts(packed: Tensor, others: Sequence[Tensor | None]) -> tuple[Inputs, Extras]:
    alibi_slopes, *extras = others
    q, k, v = packed.unbind(-3)
    return Inputs(q, k, v, None, alibi_slopes), Extras(*extras)


def differentiable_packed(
    packed: Tensor, alibi_slopes: Tensor | None, extras: Extras, options: Options
) -> Tensor:
    """out of the parts of an eager tensor [..., 3, heads, dim], with its history; the
    slopes have no gradient."""
    out: Tensor = _Packed.apply(options, packed, alibi_slopes, *extras)
    return out


# Function.apply without its look at function transforms, of which there are none here:
# 2 us less.
_apply = super(torch.autograd.Function, _Attention).apply


def differentiable(
    inputs: Inputs, extras: Extras, options: Options
) -> tuple[Tensor, Tensor]:
    """out and lse of eager tensors, with their history."""
    if torch.is_grad_enabled():
        for x in inputs:
            if x is not None and x.requires_grad:
                out, lse = _apply(options, *inputs, *extras)
                return out, lse
    return forward(inputs, extras, options)
