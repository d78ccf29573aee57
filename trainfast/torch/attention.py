"""Attention on trainfast's kernels: torch's scaled_dot_product_attention, and one with
all that the kernels can do.

What the kernels do not take goes torch's own way and is counted, with the reason, in
trainfast.stats().
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainfast.stats import count_fallback
from trainfast.torch import attention_math, attention_ops
from trainfast.torch.attention_math import Extras, Inputs, Options

MAX_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_PLAIN = (Tensor, Parameter)
_TRACED = (FakeTensor, FunctionalTensor)
_FORWARD_MODE = "forward-mode differentiation"
_by_torch = torch._C._nn.scaled_dot_product_attention  # whatever is patched


# ---- Who takes a call ----------------------------------------------------------------


def count_once(reason: str) -> None:
    """Counts a fallback; in a compiled function once, when it is traced."""
    count_fallback("attention", reason)


# As torch.compiler.assume_constant_result does, which takes a second to import torch's
# compiler for it.
count_once.__dict__["_dynamo_marked_constant"] = True


def _refusal(tensors: Sequence[Tensor | None]) -> str | None:
    """Why the kernels cannot take these tensors, q first; None where they can."""
    compiling = torch.compiler.is_compiling()
    for x in tensors:
        if x is None:
            continue
        if type(x) not in _PLAIN and not isinstance(x, _TRACED):
            return f"a tensor of type {type(x).__name__}"
        if x.is_nested or x.layout != torch.strided:
            return "a nested or sparse tensor"
        if not compiling and x.is_neg():  # a compiled graph resolves it
            return "a tensor with its negative bit set"
    q = tensors[0]
    assert q is not None
    if q.device.type not in ("cpu", "cuda", "meta"):
        return f"device {q.device.type}"
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype}"
    return _refusal_when_compiling() if compiling else _refusal_when_eager()


def _refusal_when_eager() -> str | None:
    if forward_ad._current_level >= 0:
        return _FORWARD_MODE
    if torch._C._functorch.maybe_current_level() is not None:
        return "a function transform (vmap, grad)"
    if torch.jit.is_tracing():
        return "torch.jit.trace"
    return None


def _refusal_when_compiling() -> str | None:
    if torch.compiler.is_exporting():
        return "torch.export: its programs run without trainfast"
    return None


def _is_watched(q: Tensor) -> bool:
    """Whether somebody looks at operators rather than results."""
    return (
        torch.compiler.is_compiling()
        or q.device.type == "meta"
        or torch._C._len_torch_dispatch_stack() > 0
        or isinstance(q, _TRACED)
    )


def _run(inputs: Inputs, extras: Extras, options: Options) -> tuple[Tensor, Tensor]:
    if _is_watched(inputs.q):
        return attention_ops.as_operator(inputs, extras, options)
    return attention_ops.differentiable(inputs, extras, options)


def _draw_seed(q: Tensor) -> Tensor:
    """From torch's generator, so that manual_seed and checkpointing hold."""
    return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=q.device)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast does to the arguments of torch's attention."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


# ---- torch's function ----------------------------------------------------------------


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
    """torch.nn.functional.scaled_dot_product_attention on trainfast's kernel.

    Args:
        query: [..., heads, n_q, dim]; [n_q, dim] and [heads, n_q, dim] will do.
        key: [..., kv_heads, n_k, dim].
        value: [..., kv_heads, n_k, dim_v].
        attn_mask: broadcasts to [..., heads, n_q, n_k]. bool: True takes part; floating
            point: added to the scores, with a gradient where it requires one.
        dropout_p: applied whenever it is above 0, with a seed from torch's generator.
        is_causal: query i sees keys 0 .. i.
        scale: of the scores; None: 1 / sqrt(dim).
        enable_gqa: heads is a multiple of kv_heads, and heads / kv_heads queries share
            each key and value head. Nothing is repeated in memory.

    Returns:
        [..., heads, n_q, dim_v], of query's dtype and order of dims in memory. A row
        without an allowed key is 0, and so are its gradients.

    float64, float32, float16 and bfloat16, dims up to 256, on the CPU and CUDA. Works
    under autocast, torch.compile and fake tensors, and may be differentiated twice.
    Everything else runs torch's own function, which raises torch's errors;
    trainfast.stats() counts it with the reason.
    """
    refusal = _refusal((query, key, value, attn_mask))
    if refusal is None:
        refusal = sdpa_refusal(query, key, value, attn_mask, is_causal, enable_gqa)
    if refusal is None and not 0 <= dropout_p < 1:
        refusal = "dropout_p outside [0, 1)"
    if refusal is None:
        try:
            return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale)
        except (NotImplementedError, ValueError) as error:
            refusal = str(error)
    # Forward mode: torch's fused kernels cannot, its plain operations can.
    way = sdpa_kernel(SDPBackend.MATH) if refusal == _FORWARD_MODE else nullcontext()
    with way:
        out = _by_torch(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    count_once(refusal)
    return out


def sdpa_refusal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
) -> str | None:
    """Why shapes, dtypes or devices are none of the kernel's."""
    dims = q.dim()
    if dims < 2 or k.dim() != dims or v.dim() != dims:
        return "numbers of dims that differ, or below 2"
    shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not 0 < shape[-1] <= MAX_DIM or not 0 < v_shape[-1] <= MAX_DIM:
        return f"a head dim of 0 or above {MAX_DIM}"
    if k_shape[-1] != shape[-1] or k_shape[:-1] != v_shape[:-1]:
        return "shapes of query, key and value that do not go together"
    if 0 in shape or k_shape[-2] == 0:
        return "a size of 0"
    if dims > 3 and shape[:-3] != k_shape[:-3]:
        return "batch dims that differ"
    if dims > 2 and shape[-3] != k_shape[-3]:
        heads, kv_heads = shape[-3], k_shape[-3]
        if kv_heads != 1 and (not enable_gqa or heads % kv_heads != 0):
            return "numbers of heads that differ"
    if not q.device == k.device == v.device:
        return "devices that differ"
    if not q.dtype == k.dtype == v.dtype and not _casts(q.device.type):
        return "dtypes that differ"
    return None if mask is None else _mask_refusal(q, k, mask, is_causal)


def _casts(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)


def _mask_refusal(q: Tensor, k: Tensor, mask: Tensor, is_causal: bool) -> str | None:
    if is_causal:
        return "attn_mask with is_causal"
    if mask.dtype not in (torch.bool, torch.float32, q.dtype) or (
        mask.dtype == torch.float32 and q.dtype == torch.float64
    ):
        return f"attn_mask of {mask.dtype} with query of {q.dtype}"
    if mask.device != q.device:
        return "devices that differ"
    scores = (*q.shape[:-1], k.shape[-2])
    if not 2 <= mask.dim() <= len(scores) or any(
        mine != theirs and mine != 1
        for mine, theirs in zip(reversed(mask.shape), reversed(scores))
    ):
        return "attn_mask that does not broadcast to the scores"
    return None


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    q, k, v = _autocast(query, key, value)
    if not q.dtype == k.dtype == v.dtype:
        raise NotImplementedError("dtypes that differ")  # float64 under autocast
    shape = q.shape
    if len(shape) != 4:
        q, k, v = _four_dims(q), _four_dims(k), _four_dims(v)
        if mask is not None and mask.dim() > 4:
            mask = _four_dims(mask.expand(*shape[:-3], *mask.shape[-3:]))
    bias = None
    if mask is not None and mask.requires_grad:
        mask, bias = None, mask
    options = Options(
        scale=1 / math.sqrt(shape[-1]) if scale is None else scale,
        is_causal=is_causal,
        dropout_p=dropout_p,
    )
    seed = _draw_seed(q) if dropout_p > 0 else None
    out, _ = _run(Inputs(q, k, v, bias), Extras(mask, seed), options)
    return out if len(shape) == 4 else out.view(*shape[:-1], v.shape[-1])


def _four_dims(x: Tensor) -> Tensor:
    if x.dim() > 4:
        return x.flatten(0, -4)
    return x[(None,) * (4 - x.dim())]


# ---- All features --------------------------------------------------------------------


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    causal_align: str = "top_left",
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    kv_lens: Tensor | None = None,
    layout: str = "bhnd",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask + bias) v in memory O(n), with its derivatives.

    Args:
        q: [batch, heads, n_q, dim]; with layout "bnhd" [batch, n_q, heads, dim]; with
            cu_seqlens [total_q, heads, dim].
        k, v: the same with kv_heads, of which heads is a multiple; v may have another
            dim. Floating point of one dtype; dims up to 256.
        mask: broadcasts to [batch, heads, n_q, n_k]. bool: True takes part; floating
            point: added to the scores, without a gradient.
        bias: broadcasts likewise, added to the scores, with a gradient of its own
            shape.
        is_causal: a query sees the keys up to its diagonal.
        causal_align: "top_left": the diagonal of query i is key i; "bottom_right": key
            i + n_k - n_q, so that the last query sees all.
        window: (left, right), how far from its diagonal a query sees; None on a side:
            any distance.
        scale: of the scores; None: 1 / sqrt(dim).
        softcap: scores become softcap * tanh(score / softcap), before mask and bias.
        alibi_slopes: [heads] or [batch, heads]; slope * |diagonal - key| is subtracted.
        sinks: [heads], a score of each head that takes part without a value.
        dropout_p: in [0, 1).
        seed: of the dropout, an int or an int64 tensor of one element on the device;
            None: from torch's generator.
        cu_seqlens_q, cu_seqlens_k: [batch + 1], int32 or int64: item b has the rows
            cu_seqlens[b] .. cu_seqlens[b + 1] - 1.
        max_seqlen_q, max_seqlen_k: the longest item; None: found by a look at
            cu_seqlens.
        kv_lens: [batch], int32 or int64: keys past it are not seen.
        return_lse: also returns the logarithm of each row's sum of exp(score).

    Returns:
        out like q but with v's last dim, and with return_lse lse [batch, heads, n_q] or
        [heads, total_q], float32 (float64 for float64). Rows without an allowed key
        are 0, with an lse of -infinity, and have no gradient.

    Differentiable, twice at least, in q, k, v, bias, alibi_slopes and sinks, also
    through lse. float64, float32, float16 and bfloat16; q, k and v follow autocast.
    Where the kernel cannot run (another device, function transforms), plain torch
    operations do the same, counted in trainfast.stats() with the reason.

    Raises:
        ValueError, TypeError: arguments that do not go together.

    The algorithm: Dao, arXiv:2307.08691.
    """
    options = _options(
        q, causal_align, window, scale, softcap, dropout_p, layout, cu_seqlens_q
    )
    options = options._replace(
        is_causal=bool(is_causal),
        max_seqlen_q=max_seqlen_q or 0,
        max_seqlen_k=max_seqlen_k or 0,
    )
    if mask is not None and mask.requires_grad:
        raise ValueError("mask must not require a gradient (bias may), got one")
    q, k, v = _autocast(q, k, v)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    inputs = Inputs(q, k, v, bias, _to(alibi_slopes, wide), _to(sinks, wide))
    extras = Extras(
        mask,
        _seed(seed, q) if dropout_p > 0 else None,
        _int64(cu_seqlens_q),
        _int64(cu_seqlens_k),
        _int64(kv_lens),
    )
    out, lse = _attend(inputs, extras, options)
    return (out, lse) if return_lse else out


def _attend(inputs: Inputs, extras: Extras, options: Options) -> tuple[Tensor, Tensor]:
    """The kernel, or where it cannot run plain operations."""
    refusal = _refusal((*inputs, *extras))
    if refusal is None:
        try:
            return _run(inputs, extras, options)
        except NotImplementedError as error:
            refusal = str(error)
    count_once(refusal)
    return attention_math.attention(inputs, extras, options)


def _options(
    q: Tensor,
    causal_align: str,
    window: tuple[int | None, int | None] | None,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
    layout: str,
    cu_seqlens: Tensor | None,
) -> Options:
    if causal_align not in ("top_left", "bottom_right"):
        raise ValueError(
            f"causal_align must be 'top_left' or 'bottom_right', got {causal_align!r}"
        )
    if layout not in ("bhnd", "bnhd"):
        raise ValueError(f"layout must be 'bhnd' or 'bnhd', got {layout!r}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be None or above 0, got {softcap}")
    left, right = (None, None) if window is None else window
    for side in (left, right):
        if side is not None and side < 0:
            raise ValueError(f"window must be None or not negative, got {window}")
    return Options(
        scale=1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else float(scale),
        bottom_right=causal_align == "bottom_right",
        window_left=-1 if left is None else left,
        window_right=-1 if right is None else right,
        softcap=softcap or 0.0,
        dropout_p=float(dropout_p),
        bnhd=layout == "bnhd" and cu_seqlens is None,
    )


def _to(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return x if x is None else x.to(dtype).contiguous()


def _int64(x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    return (x.to(torch.int64) if x.dtype == torch.int32 else x).contiguous()


def _seed(seed: int | Tensor | None, q: Tensor) -> Tensor:
    if seed is None:
        return _draw_seed(q)
    if isinstance(seed, Tensor):
        return seed
    return torch.full((), seed, dtype=torch.int64, device=q.device)
