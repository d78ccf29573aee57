"""torch.nn.functional.scaled_dot_product_attention on trainfast's kernel."""

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import (
    cudnn_sdp_enabled,
    flash_sdp_enabled,
    mem_efficient_sdp_enabled,
)
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import handle_torch_function, has_torch_function

from trainfast.torch.attention import fast_path
from trainfast.torch.attention.autograd import FORWARD_MODE
from trainfast.torch.attention.dispatch import (
    MAX_DIM,
    autocast,
    count_once,
    draw_seed,
    is_plain,
    refusal_of,
    run,
    torchs_are_faster,
)
from trainfast.torch.attention.math_backend import Extras, Inputs, Options
from trainfast.torch.private import constant_when_compiled, torchs_sdpa


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

    The kernels take head dims up to 256: on the CPU in float64, float32, float16 and
    bfloat16; on CUDA in float16 and bfloat16 on GPUs where torch has no flash attention
    (sm_75). Works under autocast, torch.compile and fake tensors, and may be
    differentiated twice. Everything else runs torch's own function, which raises
    torch's errors; trainfast.stats() counts it with the reason.
    """
    given = (query, key, value, attn_mask)
    if has_torch_function(given):
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return _by_override((*given, dropout_p, is_causal), options)
    plain = (query, key, value, attn_mask, is_causal, scale)
    if dropout_p == 0 and _goes_straight(*plain, enable_gqa):
        out = fast_path.attend(*plain)
        if out is not None:
            return out
    refusal = _odd_argument(query, key, value, is_causal, scale, enable_gqa)
    if refusal is None:
        refusal = refusal_of(given)
    if refusal is None and not _may_fuse():
        refusal = "sdpa_kernel(SDPBackend.MATH)"
    if refusal is None:
        refusal = shape_refusal(query, key, value, attn_mask, is_causal, enable_gqa)
    if refusal is None and not 0 <= dropout_p < 1:
        refusal = "dropout_p outside [0, 1)"
    if refusal is None:
        refusal = torchs_are_faster(query)
    if refusal is None:
        try:
            return on_kernel(query, key, value, attn_mask, dropout_p, is_causal, scale)
        except (NotImplementedError, ValueError) as error:
            refusal = str(error)
    # Forward mode: torch's fused kernels cannot, its plain operations can.
    way = sdpa_kernel(SDPBackend.MATH) if refusal == FORWARD_MODE else nullcontext()
    with way:
        out = torchs_sdpa(
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


def _by_override(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What subclasses of Tensor, or modes, do in place of torch's function.

    Subclasses such as torch.nn.attention.bias.CausalBias know it by its name in
    torch.nn.functional, which may be this one.
    """
    function: Any = scaled_dot_product_attention
    others = [type(x).__name__ for x in args[:4] if not is_plain(x)]
    if "NestedTensor" in others:
        function = torchs_sdpa  # which it looks for
        count_once("a tensor of type NestedTensor")
    elif others and functional.scaled_dot_product_attention is not function:
        function = functional.scaled_dot_product_attention
        if function is torchs_sdpa:
            count_once(f"a tensor of type {others[0]}")
    return handle_torch_function(function, args[:4], *args, **kwargs)


def _odd_argument(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> str | None:
    """The reason why torch validates an argument itself; None: the kernel may run."""
    if torch.compiler.is_compiling():
        return None  # the operator is as strict
    if q is None or k is None or v is None:
        return "None in place of a tensor"
    if type(is_causal) is not bool or type(enable_gqa) is not bool:
        return "an is_causal or enable_gqa that is not a bool"
    if isinstance(scale, Tensor):
        return "a scale that is a tensor"
    return None


def _goes_straight(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> bool:
    """Also whether torch takes what the core takes, and has no better way."""
    if not fast_path.is_open(q, k, v, mask, is_causal, scale):
        return False
    shape, k_shape = q.shape, k.shape
    return (
        0 not in shape
        and 0 not in k_shape
        and (
            shape[1] == k_shape[1]
            or (enable_gqa is True and shape[1] % k_shape[1] == 0)
        )
        and _may_fuse()
        and torchs_are_faster(q) is None
        and (mask is None or _mask_refusal(q, k, mask, is_causal) is None)
    )


@constant_when_compiled
def _may_fuse() -> bool:
    """False if the user has disabled all of torch's fused backends."""
    return flash_sdp_enabled() or mem_efficient_sdp_enabled() or cudnn_sdp_enabled()


def shape_refusal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
) -> str | None:
    """The reason why the kernel does not support the shapes, dtypes or devices."""
    shape, k_shape, v_shape = q.shape, k.shape, v.shape
    dims = len(shape)
    if dims < 2 or len(k_shape) != dims or len(v_shape) != dims:
        return "numbers of dims that differ, or below 2"
    if not 0 < shape[-1] <= MAX_DIM or not 0 < v_shape[-1] <= MAX_DIM:
        return f"a head dim of 0 or above {MAX_DIM}"
    if k_shape[-1] != shape[-1] or k_shape[:-1] != v_shape[:-1]:
        return "shapes of query, key and value that do not go together"
    if 0 in shape or 0 in k_shape:
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


def _turns(q: Tensor, dtype: torch.dtype) -> bool:
    """Whether autocast makes q one of dtype."""
    device = q.device.type
    return (
        q.dtype != torch.float64
        and _casts(device)
        and torch.get_autocast_dtype(device) == dtype
    )


def _mask_refusal(q: Tensor, k: Tensor, mask: Tensor, is_causal: bool) -> str | None:
    if is_causal:
        return "attn_mask with is_causal"
    fits = mask.dtype in (torch.bool, torch.float32, q.dtype) or _turns(q, mask.dtype)
    if not fits or (mask.dtype == torch.float32 and q.dtype == torch.float64):
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


def on_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """A call that `shape_refusal` does not refuse, on trainfast's kernel."""
    q, k, v = autocast(query, key, value)
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
    seed = draw_seed(q) if dropout_p > 0 else None
    out, _ = run(Inputs(q, k, v, bias), Extras(mask, seed), options)
    return out if len(shape) == 4 else out.view(*shape[:-1], v.shape[-1])


def _four_dims(x: Tensor) -> Tensor:
    if x.dim() > 4:
        return x.flatten(0, -4)
    return x[(None,) * (4 - x.dim())]
