"""The attention kernels as operators, torch.ops.trainfast.attention and others: for
torch.compile, fake tensors, tracers and modes, which look at operators."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.flop_counter
from torch import Tensor

from trainfast.torch.attention.autograd import (
    N_INPUTS,
    backward,
    backward_by_operator,
    empty_grads,
    empty_lse,
    empty_rows,
    forward,
    second,
)
from trainfast.torch.attention.math_backend import Extras, Inputs, Options

_TENSORS = """Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi_slopes,
    Tensor? sinks, Tensor? mask, Tensor? seed, Tensor? cu_seqlens_q,
    Tensor? cu_seqlens_k, Tensor? kv_lens"""
_OPTIONS = """float scale, bool is_causal, bool bottom_right, SymInt window_left,
    SymInt window_right, float softcap, float dropout_p, SymInt max_seqlen_q,
    SymInt max_seqlen_k, bool bnhd"""
_N_TENSORS = N_INPUTS + len(Extras._fields)


def _unpack(arguments: Sequence[Any]) -> tuple[Inputs, Extras, Options]:
    return (
        Inputs(*arguments[:N_INPUTS]),
        Extras(*arguments[N_INPUTS:_N_TENSORS]),
        Options(*arguments[_N_TENSORS:]),
    )


def _some(x: Tensor | None, like: Tensor) -> Tensor:
    """x; where there is none, an empty tensor, since operators return no None."""
    return like.new_empty(0) if x is None else x


# ---- Forward and backward ------------------------------------------------------------


@torch.library.custom_op(
    "trainfast::attention",
    mutates_args=(),
    schema=f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)",
)
def _op(*arguments: Any) -> tuple[Tensor, Tensor]:
    return forward(*_unpack(arguments))


@_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs, _, options = _unpack(arguments)
    out = empty_rows(inputs.q, inputs.v.shape[-1])
    return out, empty_lse(inputs.q, options.bnhd)


@torch.library.custom_op(
    "trainfast::attention_backward",
    mutates_args=(),
    schema=f"(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, bool[] wanted, "
    f"{_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    wanted: Sequence[bool],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    inputs, extras, options = _unpack(arguments)
    made = backward(dout, dlse, wanted, inputs, extras, out, lse, options)
    return tuple(_some(x, inputs.q) for x in made)


@_backward_op.register_fake
def _(
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    wanted: Sequence[bool],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    inputs, _, _ = _unpack(arguments)
    made = empty_grads(inputs, wanted)
    if inputs.bias is not None and made[3] is not None:
        made[3] = made[3].to(inputs.bias.dtype)
    return tuple(_some(x, inputs.q) for x in made)


# ---- Autograd ------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs[:_N_TENSORS])
    ctx.options = inputs[_N_TENSORS:]
    ctx.wanted = list(ctx.needs_input_grad[:N_INPUTS])


def _op_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
    if dout is None and dlse is None:
        return (None,) * (_N_TENSORS + len(Options._fields))
    out, lse, *tensors = ctx.saved_tensors
    options = Options(*ctx.options)
    made = backward_by_operator(options, ctx.wanted, dout, dlse, *tensors, out, lse)
    return (*made, *[None] * (len(Extras._fields) + len(Options._fields)))


_op.register_autograd(_op_backward, setup_context=_keep)


def _keep_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    dout, dlse, out, _, wanted, *arguments = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dout, dlse, out, *arguments[:_N_TENSORS])
    ctx.options, ctx.wanted = arguments[_N_TENSORS:], wanted
    needs = ctx.needs_input_grad
    ctx.needed = (*needs[:2], *needs[5 : 5 + N_INPUTS])


def _op_second(ctx: Any, *grads: Tensor | None) -> Any:
    dout, dlse, out, *given = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    asked = tuple(g if w else None for g, w in zip(grads, ctx.wanted))
    made = second(asked, dout, dlse, given, Options(*ctx.options), ctx.needed)
    others = len(Extras._fields) + len(Options._fields)
    return (*made[:2], None, None, None, *made[2:], *[None] * others)


_backward_op.register_autograd(_op_second, setup_context=_keep_backward)


def as_operator(
    inputs: Inputs, extras: Extras, options: Options
) -> tuple[Tensor, Tensor]:
    """`differentiable`, as an operator that tracers, modes and fake tensors see."""
    out, lse = torch.ops.trainfast.attention(*inputs, *extras, *options)
    return out, lse


# ---- What they cost ------------------------------------------------------------------


@torch.utils.flop_counter.register_flop_formula(torch.ops.trainfast.attention)
def _flops(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    """As torch counts its own: neither masks nor lengths make it less."""
    if len(q) == 3:
        return 2 * q[0] * q[1] * k[0] * (q[2] + v[2])
    bnhd = args[-1]
    return 2 * q[0] * q[1] * q[2] * k[1 if bnhd else 2] * (q[3] + v[3])


@torch.utils.flop_counter.register_flop_formula(torch.ops.trainfast.attention_backward)
def _backward_flops(*args: Any, **kwargs: Any) -> int:
    q, k, v = args[5:8]
    return _flops(q, k, v, args[-1]) * 5 // 2
