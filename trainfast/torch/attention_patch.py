"""What takes the place of torch's names under trainfast.patch("attention").

The patch serves each call by what is faster at its size: the kernels, or for small
calls torch's own function, counted in trainfast.stats(). `trainfast.torch.attention`
and `trainfast.torch.scaled_dot_product_attention` run the kernels at any size.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainfast.stats import _fallbacks
from trainfast.torch import sdpa
from trainfast.torch.attention_route import PLAIN, count_once, torchs_are_faster
from trainfast.torch.sdpa import by_torch

__all__ = [
    "get_fastpath_enabled",
    "multi_head_attention_forward",
    "scaled_dot_product_attention",
]

_torchs = functional.multi_head_attention_forward
_NEED_WEIGHTS = list(inspect.signature(_torchs).parameters).index("need_weights")
_FUSED = "a small input: torch's fused inference path is faster"
_SMALL = ("attention", "a small call: torch's function is faster")

# Limits of what torch is faster at, measured as torch's time over the kernels' in
# float32 and bfloat16 on 2 threads of a Zen 4 with AVX-512, torch 2.13.
SMALL_TENSOR = 2**10  # elements of query and key: 4 to 15 us, half of it Python
# For float32 alone, since torch's bfloat16 converts:
SMALL_KEYS = 2**18  # elements of key for a query of SMALL_TENSOR, as in decoding
SMALL_HEAD = 2**7  # n_k * dim: the kernels' tiles are mostly empty
# with gradients, where torch's autograd in C++ saves 15 of 60 to 200 us:
SMALL_WIDTH, SMALL_SCORES = 2**9, 2**13  # batch * heads times dim, times n_q * n_k


def is_small(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch's function is faster for plain tensors without mask and dropout.
    Reads shapes, dtype, device and requires_grad, the quickest first."""
    elements = query.numel()
    if elements <= SMALL_TENSOR:
        keys = key.numel()
        if keys <= SMALL_TENSOR:
            return True
        return keys <= SMALL_KEYS and query.dtype is torch.float32 and query.is_cpu
    if query.dtype is not torch.float32 or not query.is_cpu:
        return False
    *_, n_k, dim = key.shape
    if n_k * dim <= SMALL_HEAD:
        return True
    n_q = query.shape[-2]
    return (
        elements <= SMALL_WIDTH * n_q
        and elements * n_k <= SMALL_SCORES * dim
        and torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad)
    )


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
    try:
        small = (
            attn_mask is None
            and not dropout_p
            and type(query) is Tensor
            and is_small(query, key, value)
        )
    except (AttributeError, RuntimeError, TypeError, ValueError):
        small = False  # torch words the error
    if not small:
        run = _not_small
    else:
        try:  # count_once() takes 0.2 us longer
            _fallbacks[_SMALL] += 1
        except KeyError:
            count_once(_SMALL[1])
        if not is_causal and scale is None and not enable_gqa:
            return by_torch(query, key, value)  # keywords take 0.3 us
        run = by_torch
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
    out: Tensor = by_torch(query, *args, **kwargs)
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
        _here.attended += 1
    wanted = args[_NEED_WEIGHTS:][:1] or (kwargs.get("need_weights", True),)
    if wanted[0]:
        count_once("need_weights=True of multi-head attention")
    return _torchs(*args, **kwargs)


# ---- The fused inference path of torch's modules -------------------------------------
# torch.backends.mha.get_fastpath_enabled() is what the modules ask in each call. The
# classes' __call__ decides before that, by the size of the input.


class _Here(threading.local):
    unfused = False  # the module in call shall take the path through torch's names
    attended = 0  # how often it has been taken, or the fused path been counted


_here = _Here()
_torchs_fastpath = torch.backends.mha.get_fastpath_enabled


@functools.wraps(_torchs_fastpath)
def get_fastpath_enabled() -> bool:
    if torch.compiler.is_compiling() or _here.unfused:
        return False
    return _torchs_fastpath()


def is_fused_faster(x: Tensor, n: int, dim: int) -> bool:
    """Whether torch's fused path is faster for an input [batch, n, dim] on a CPU.

    The kernels gain on the n * n scores and lose 20 to 50 us of Python a layer: torch's
    time over theirs is 0.73 to 0.9 at n = 32; at n = 128 with a batch of 8 it is 1.1
    for dim 64 and 0.95 for dim 256.
    """
    return n <= max(64, dim // 2) or (n <= 128 and x.numel() <= 2**14)


def _stays_fused(x: Tensor, masked: bool, weights: bool) -> str | None:
    """Why a module shall take torch's fused path if it can; None for the kernels."""
    if x.is_nested:
        return "a nested tensor, in multi-head attention"
    if weights:
        return "need_weights=True of multi-head attention"
    if not x.is_cpu:
        return torchs_are_faster(x) if x.is_cuda else f"device {x.device.type}"
    if masked:
        return None
    shape = x.shape
    if len(shape) == 3 and is_fused_faster(x, shape[1], shape[2]):
        return _FUSED
    return None


def _choosing(
    input_name: str, mask: tuple[int, str], padding: tuple[int, str], weights_at: int
) -> Callable[..., Any]:
    """Module.__call__ with the choice between the fused path and torch's names. The
    arguments: names and places of the module's own; weights_at 0: it has none."""

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if args else kwargs.get(input_name)
        if self.training or torch.compiler.is_compiling() or type(x) not in PLAIN:
            return torch.nn.Module.__call__(self, *args, **kwargs)
        given = len(args)
        masked = (
            args[mask[0]] if given > mask[0] else kwargs.get(mask[1])
        ) is not None or (
            args[padding[0]] if given > padding[0] else kwargs.get(padding[1])
        ) is not None
        weights = weights_at and (
            args[weights_at] if given > weights_at else kwargs.get("need_weights", True)
        )
        reason = _stays_fused(x, masked, bool(weights))
        before, attended = _here.unfused, _here.attended
        _here.unfused = reason is None
        try:
            out = torch.nn.Module.__call__(self, *args, **kwargs)
        finally:
            _here.unfused = before
        if reason is not None and _here.attended == attended:
            _here.attended += 1
            count_once(reason)
        return out

    return call


_CALLS: dict[type[torch.nn.Module], Callable[..., Any]] = {
    torch.nn.MultiheadAttention: _choosing(
        "query", (5, "attn_mask"), (3, "key_padding_mask"), weights_at=4
    ),
    torch.nn.TransformerEncoderLayer: _choosing(
        "src", (1, "src_mask"), (2, "src_key_padding_mask"), weights_at=0
    ),
    torch.nn.TransformerEncoder: _choosing(
        "src", (1, "mask"), (2, "src_key_padding_mask"), weights_at=0
    ),
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


def _keep_scriptable(ours: Any, torchs: Callable[..., Any]) -> None:
    """torch.jit.script goes on compiling torch's function where it finds ours."""
    ours.__dict__["__script_if_tracing_wrapper"] = True
    ours.__dict__["__original_fn"] = torchs


def _keep_builtin() -> None:
    try:
        from torch.jit._builtins import _register_builtin
    except ImportError:
        return
    for ours in (scaled_dot_product_attention, sdpa.scaled_dot_product_attention):
        _register_builtin(ours, "aten::scaled_dot_product_attention")


_keep_scriptable(multi_head_attention_forward, _torchs)
_keep_scriptable(get_fastpath_enabled, _torchs_fastpath)
_keep_builtin()
