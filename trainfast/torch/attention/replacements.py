"""The functions that trainfast.patch("attention") puts in the place of torch's.

Each call runs on the kernels or, where torch's own function is faster, on torch's. The
choice depends on shapes, dtype and device, and trainfast.stats() counts what torch ran.
`trainfast.torch.attention` and `trainfast.torch.scaled_dot_product_attention` run the
kernels at any size.
"""

import functools
import inspect
import operator
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainfast import _core
from trainfast.stats import add_fallbacks
from trainfast.torch.attention import sdpa
from trainfast.torch.attention.dispatch import PLAIN, count_once, torchs_are_faster
from trainfast.torch.private import (
    compile_as_torchs,
    has_amx,
    script_as_operator,
    torchs_sdpa,
)

__all__ = [
    "get_fastpath_enabled",
    "multi_head_attention_forward",
    "scaled_dot_product_attention",
]

_torchs = functional.multi_head_attention_forward
_NEED_WEIGHTS = list(inspect.signature(_torchs).parameters).index("need_weights")
_FUSED = "a small input: torch's fused inference path is faster"
_SMALL = "a small call: torch's function is faster"
_AMX = "bfloat16 on a CPU with AMX: torch's function is faster"

# The rules by size are in C, because a small call takes torch 4 us; csrc/python/
# small_calls.c has the limits.
_calls = _core.SmallCalls(
    (Tensor, torch.nn.Parameter),
    (torch.float32, torch.float64, torch.float16, torch.bfloat16),
    torch.is_grad_enabled,
    has_amx(),
)
is_small = _calls.leaves_attention
is_fused_faster = _calls.leaves_module


def _counted(reset: bool) -> dict[tuple[str, str], int]:
    counts = zip((_SMALL, _AMX, _FUSED), _calls.counts(reset), strict=True)
    return {("attention", reason): count for reason, count in counts}


add_fallbacks(_counted)


@functools.wraps(sdpa.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    # Masks and dropout stay with the kernels at any size: for rows without a key
    # versions of torch differ, and a seed shall give one result.
    if not is_small(query, key, value, attn_mask, dropout_p):
        run = _not_small
    elif is_causal or scale is not None or enable_gqa:
        run = torchs_sdpa
    else:
        return torchs_sdpa(query, key, value)  # keywords take 0.3 us
    return run(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _not_small(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The kernels, or torch's function on a device where it is the better choice."""
    reason = torchs_are_faster(query) if getattr(query, "is_cuda", False) else None
    if reason is None:
        return sdpa.scaled_dot_product_attention(query, *args, **kwargs)
    count_once(reason)
    out: Tensor = torchs_sdpa(query, *args, **kwargs)
    return out


# Compiled graphs hold the operator at any size: a size may change between their calls.
scaled_dot_product_attention.__dict__["_torchdynamo_inline"] = (
    sdpa.scaled_dot_product_attention
)


@functools.wraps(_torchs)
def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
    """torch's own, but it counts the calls that no attention kernel can take: those
    that ask for the weights, as nn.MultiheadAttention does by default."""
    if not torch.compiler.is_compiling():
        _thread.state.attended += 1
    wanted = args[_NEED_WEIGHTS:][:1] or (kwargs.get("need_weights", True),)
    if wanted[0]:
        count_once("need_weights=True of multi-head attention")
    return _torchs(*args, **kwargs)


# ---- The fused inference path of torch's modules -------------------------------------
# torch.backends.mha.get_fastpath_enabled() is what the modules ask in each call. The
# classes' __call__ decides before that, by the size of the input.


class _State:
    __slots__ = ("attended", "unfused")

    def __init__(self) -> None:
        self.unfused = False  # the module in call must not take the fused path
        self.attended = 0  # calls of the other path, and of the fused path


class _Thread(threading.local):
    """Holds the state in one attribute, because each access takes 0.1 us."""

    def __init__(self) -> None:
        self.state = _State()


_thread = _Thread()
_torchs_fastpath = torch.backends.mha.get_fastpath_enabled


@functools.wraps(_torchs_fastpath)
def get_fastpath_enabled() -> bool:
    if torch.compiler.is_compiling() or _thread.state.unfused:
        return False
    return _torchs_fastpath()


def _stays_fused(x: Tensor, weights: bool) -> str | None:
    """Why a module takes torch's fused path if it can, apart from the size of its
    input; None for the kernels."""
    if x.is_nested:
        return "a nested tensor, in multi-head attention"
    if weights:
        return "need_weights=True of multi-head attention"
    if not x.is_cpu:
        return torchs_are_faster(x) if x.is_cuda else f"device {x.device.type}"
    return None


def _choosing(
    input_name: str,
    mask: tuple[int, str],
    padding: tuple[int, str],
    weights_at: int,
    heads_of: Callable[[Any], int],
) -> Callable[..., Any]:
    """Module.__call__ with the choice between the fused path and torch's names.

    input_name, mask, padding, weights_at: names and places of the module's arguments;
    weights_at 0: no need_weights. heads_of: returns the module's number of heads.
    torch.nn.Module.__call__ is looked up in each call, because torch.fx replaces it.
    """

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.training or torch.compiler.is_compiling():
            return torch.nn.Module.__call__(self, *args, **kwargs)
        given = len(args)
        x: Any = args[0] if given else kwargs.get(input_name)
        masked = (
            args[mask[0]] if given > mask[0] else kwargs.get(mask[1])
        ) is not None or (
            args[padding[0]] if given > padding[0] else kwargs.get(padding[1])
        ) is not None
        weights = weights_at and (
            args[weights_at] if given > weights_at else kwargs.get("need_weights", True)
        )
        if not (masked or weights) and is_fused_faster(x, heads_of(self)):
            reason: str | None = _FUSED
        elif type(x) in PLAIN:
            reason = _stays_fused(x, bool(weights))
        else:
            return torch.nn.Module.__call__(self, *args, **kwargs)
        here = _thread.state
        before, attended = here.unfused, here.attended
        here.unfused = reason is None
        try:
            out = torch.nn.Module.__call__(self, *args, **kwargs)
        finally:
            here.unfused = before
        if reason is not None and here.attended == attended:
            here.attended += 1
            _calls.count_module() if reason is _FUSED else count_once(reason)
        return out

    return call


_call_padded_encoder = _choosing(
    "src",
    (1, "mask"),
    (2, "src_key_padding_mask"),
    weights_at=0,
    heads_of=lambda encoder: 1,
)


def _call_encoder(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """TransformerEncoder.__call__. With a padding mask an encoder packs its input into
    a nested tensor, which only fused layers take; otherwise its layers choose."""
    padding = args[2] if len(args) > 2 else kwargs.get("src_key_padding_mask")
    if padding is None:
        return torch.nn.Module.__call__(self, *args, **kwargs)
    return _call_padded_encoder(self, *args, **kwargs)


_CALLS: dict[type[torch.nn.Module], Callable[..., Any]] = {
    torch.nn.MultiheadAttention: _choosing(
        "query",
        (5, "attn_mask"),
        (3, "key_padding_mask"),
        weights_at=4,
        heads_of=operator.attrgetter("num_heads"),
    ),
    torch.nn.TransformerEncoderLayer: _choosing(
        "src",
        (1, "src_mask"),
        (2, "src_key_padding_mask"),
        weights_at=0,
        heads_of=lambda layer: getattr(layer.self_attn, "num_heads", 1),
    ),
    torch.nn.TransformerEncoder: _call_encoder,
}


def are_modules_patched() -> bool:
    return all(kind.__dict__.get("__call__") is call for kind, call in _CALLS.items())


def set_modules_patched(value: bool) -> None:
    """Lets torch's transformer modules choose by size between their fused inference
    path and the kernels, or takes the choice back."""
    for kind, call in _CALLS.items():
        if value:
            kind.__call__ = call  # type: ignore[method-assign]
        elif kind.__dict__.get("__call__") is call:
            del kind.__call__


compile_as_torchs(multi_head_attention_forward, _torchs)
compile_as_torchs(get_fastpath_enabled, _torchs_fastpath)
for _ours in (scaled_dot_product_attention, sdpa.scaled_dot_product_attention):
    script_as_operator(_ours, "aten::scaled_dot_product_attention")
