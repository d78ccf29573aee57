"""What torch does differently for CUDA tensors, done to fakes on the CPU.

Fake tensors on the device "cuda" need a GPU in their backward pass. So the fakes stay
on the CPU, and for as long as an estimate runs the CPU has the kernels that decide
what CUDA saves for the backward pass: attention, dropout, recurrent layers and
autocast's list of operations in float32.
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from trainfast.torch.attention import sdpa
from trainfast.torch.private import below_autocast, remove_kernels, tree_map

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
# aten/src/ATen/autocast_mode.h, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE.
_FLOAT32 = (
    *("layer_norm", "group_norm", "norm", "pow", "exp", "log", "log10", "log2"),
    *("log1p", "rsqrt", "reciprocal", "cumsum", "cumprod", "prod", "sum", "cosh"),
    *("sinh", "tan", "acos", "asin", "erfinv", "expm1", "softplus", "mse_loss"),
    *("cosine_similarity", "cdist", "l1_loss", "nll_loss", "kl_div", "huber_loss"),
    *("smooth_l1_loss", "cosine_embedding_loss", "triplet_margin_loss"),
)


@contextlib.contextmanager
def cuda_rules(capability: int, attention_patch: bool = False) -> Iterator[None]:
    """For as long as it lasts the process's CPU kernels behave as CUDA's.

    Args:
        capability: the GPU's compute capability times ten, such as 75.
        attention_patch: as after trainfast.patch("attention").
    """
    attention = _attention_for(capability, attention_patch)
    library = torch.library.Library("aten", "IMPL")
    # Newer torch asks for the argument; older torch only warns.
    known = "allow_override" in inspect.signature(library.impl).parameters
    options: dict[str, Any] = {"allow_override": True} if known else {}

    def put(name: str, kernel: Callable[..., Any], key: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl(name, kernel, key, **options)

    try:
        put("dropout", _dropout, "AutogradCPU")
        put("scaled_dot_product_attention", attention, "AutogradCPU")
        put("lstm.input", _recurrent(gates=6), "AutogradCPU")
        put("gru.input", _recurrent(gates=5), "AutogradCPU")
        put("log_softmax.int", _half_softmax("log_softmax"), "AutocastCPU")
        put("softmax.int", _half_softmax("softmax"), "AutocastCPU")
        put("cross_entropy_loss", _cross_entropy, "AutocastCPU")
        for name in _FLOAT32:
            packet = getattr(_aten, name)
            for overload in packet.overloads():
                if "out" not in overload and "imname" not in overload:
                    full = name if overload == "default" else f"{name}.{overload}"
                    put(full, _in_float32(getattr(packet, overload)), "AutocastCPU")
        yield
    finally:
        remove_kernels(library)


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """CUDA saves one byte an element, the CPU a mask of the input's type."""
    if not train or p == 0:
        return x
    return torch.native_dropout(x, p, True)[0]


def _attention_for(capability: int, patched: bool) -> Callable[..., torch.Tensor]:
    """Chooses the backend as torch's sdp_utils.cpp does for CUDA; `patched`: calls that
    trainfast's kernel takes go there."""

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        ours = patched and q.dtype in _HALVES
        given = (q, k, v, attn_mask, is_causal, enable_gqa)
        if ours and sdpa.shape_refusal(*given) is None:
            with contextlib.suppress(NotImplementedError, ValueError):
                return sdpa.on_kernel(q, k, v, attn_mask, dropout_p, is_causal, scale)
        groups = enable_gqa and k.shape[1] != q.shape[1]
        half = q.dtype == torch.float16 or (
            q.dtype == torch.bfloat16 and capability >= 80
        )
        fits = q.dim() == 4 and q.shape[-1] == v.shape[-1]
        flash = half and capability >= 80 and attn_mask is None
        if fits and flash and q.shape[-1] <= 256:
            return _aten._scaled_dot_product_flash_attention(
                q, k, v, dropout_p, is_causal, False, scale=scale
            )[0]
        learned = attn_mask is not None and attn_mask.requires_grad  # as T5's bias
        efficient = fits and not groups and not learned
        if not efficient or not (half or q.dtype == torch.float32):
            return _aten._scaled_dot_product_attention_math(
                *(q, k, v, attn_mask, dropout_p, is_causal, None),
                scale=scale,
                enable_gqa=enable_gqa,
            )[0]
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype)
            attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
        return _aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]

    return attention


def _recurrent(gates: int) -> Callable[..., Any]:
    def run(
        x: torch.Tensor,
        states: Any,
        weights: Any,
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        states = states if isinstance(states, list | tuple) else [states]
        directions = 2 if bidirectional else 1
        width = states[0].shape[-1] * directions
        sizes = _RecurrentSizes(width, gates, layers * gates - 1, len(states))
        return _CudnnRecurrent.apply(sizes, x, *states, *weights)

    return run


class _RecurrentSizes(NamedTuple):
    """Values of a recurrent module, for each sample and step where it is not said."""

    width: int  # outputs
    workspace: int  # times the width: what a pass takes and gives back
    reserve: int  # times the width: what the backward pass needs
    states: int  # tensors of states


class _CudnnRecurrent(torch.autograd.Function):
    """cuDNN's recurrent layers: outputs, last states, a reserve and a workspace.

    cuDNN does not publish the sizes of the last two. Those here are 0 and 3 % off those
    of an LSTM with two layers on an H200; other layers were not measured.
    """

    @staticmethod
    def forward(ctx: Any, sizes: _RecurrentSizes, x: torch.Tensor, *rest: Any) -> Any:
        steps = x.shape[0] * x.shape[1]
        out = x.new_empty(*x.shape[:2], sizes.width)
        packed = x.new_empty(sum(w.numel() for w in rest[sizes.states :]))
        workspace = x.new_empty(steps * sizes.width * sizes.workspace)
        reserve = x.new_empty(steps * sizes.width * sizes.reserve)
        del workspace
        ctx.sizes = sizes
        ctx.save_for_backward(x, out, reserve, packed, *rest)
        return (out, *(torch.empty_like(state) for state in rest[: sizes.states]))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        x, out, _reserve, packed, *rest = ctx.saved_tensors
        workspace = out.new_empty(out.numel() * ctx.sizes.workspace)
        gradients = torch.empty_like(packed)  # cuDNN's come in one piece
        made = [torch.empty_like(tensor) for tensor in (x, *rest)]
        del gradients, workspace
        return (None, *made)


class _HalfSoftmax(torch.autograd.Function):
    """softmax and log_softmax of half inputs in one kernel with a float32 result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x, dtype=torch.float32)
        ctx.save_for_backward(out)
        ctx.dtype = x.dtype
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(gradient, dtype=ctx.dtype)


def _half_softmax(name: str) -> Callable[..., torch.Tensor]:
    usual = getattr(_aten, name).int

    def run(x: torch.Tensor, dim: int, dtype: Any = None) -> Any:
        with below_autocast():
            if x.dtype in _HALVES and dtype is None:
                return _HalfSoftmax.apply(x)
            return usual(x, dim, dtype)

    return run


def _cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    if target.is_floating_point() or label_smoothing:
        with below_autocast():
            return _aten.cross_entropy_loss(
                x.float(), target, weight, reduction, ignore_index, label_smoothing
            )
    scores = _half_softmax("log_softmax")(x, 1 if x.dim() > 1 else 0)
    with below_autocast():
        return _aten.nll_loss_nd(scores, target, weight, reduction, ignore_index)


def _in_float32(function: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with below_autocast():
            return function(*tree_map(_raised, args), **tree_map(_raised, kwargs))

    return run


def _raised(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.dtype in _HALVES:
        return leaf.float()
    return leaf
