"""The functions of the flash-attn package, by name and signature, on these kernels:

    from trainfast.torch.flash_attn import flash_attn_func

float64 and float32 as well as half precision, on the CPU as on CUDA, and with second
derivatives, also of the logarithms that return_attn_probs gives. What the kernels lack
raises NotImplementedError.
"""

from typing import Any

from torch import Tensor

from trainfast.torch.attention.dispatch import attend
from trainfast.torch.attention.functional import attend_packed, prepare

_Result = Tensor | Any  # (out, lse, probabilities) with return_attn_probs

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """Attention of q [batch, n_q, heads, dim] to k, v [batch, n_k, kv_heads, dim].

    heads must be a multiple of kv_heads. Causal and windows are aligned to the bottom
    right: query i is at key i + n_k - n_q. window_size is (left, right), -1 for any
    distance; softcap <= 0 is off; alibi_slopes [heads] or [batch, heads]. Results are
    deterministic in any case. Returns [batch, n_q, heads, dim]; with return_attn_probs
    also the logarithm of each row's sum of exp(score), [batch, heads, n_q], and an
    empty tensor in place of the probabilities, which the package has for dropout only.

    Raises:
        NotImplementedError: return_attn_probs with dropout.
        ValueError: arguments that do not go together.
    """
    return _call(
        (q, k, v),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """flash_attn_func with kv [batch, n_k, 2, kv_heads, dim]."""
    return _call(
        (q, *kv.unbind(-3)),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """flash_attn_func with qkv [batch, n, 3, heads, dim]."""
    return _call(
        qkv,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> _Result:
    """flash_attn_func for items of different lengths, one after another.

    q [total_q, heads, dim], k and v [total_k, kv_heads, dim]; item b has the rows
    cu_seqlens[b] .. cu_seqlens[b + 1] - 1 of them (int32 or int64, [batch + 1]), at
    most max_seqlen many. Returns [total_q, heads, dim]; logarithms are [heads,
    total_q].

    Raises:
        NotImplementedError: return_attn_probs with dropout, block_table.
        ValueError: arguments that do not go together.
    """
    if block_table is not None:
        raise NotImplementedError("block_table must be None, got a tensor")
    return _call(
        (q, k, v),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        return_attn_probs,
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """flash_attn_varlen_func with kv [total_k, 2, kv_heads, dim]."""
    return _call(
        (q, *kv.unbind(-3)),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        return_attn_probs,
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """flash_attn_varlen_func with qkv [total, 3, heads, dim]."""
    return _call(
        qkv,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        return_attn_probs,
        (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen),
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> _Result:
    """Not here; its name is, for scripts that import it beside the others.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "flash_attn_with_kvcache is for inference and not here; a filled cache goes "
        "into trainfast.torch.attention as k and v with kv_lens"
    )


def _call(
    tensors: Tensor | tuple[Tensor, ...],
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    return_attn_probs: bool,
    lengths: tuple[Tensor | None, Tensor | None, int | None, int | None] = (None,) * 4,
) -> _Result:
    """`tensors` are q, k and v, or one with all three."""
    if return_attn_probs and dropout_p > 0:
        raise NotImplementedError(
            "return_attn_probs must be False with dropout, got True"
        )
    left, right = (None if side < 0 else side for side in window_size)
    q, k, v = tensors.unbind(-3) if isinstance(tensors, Tensor) else tensors
    call = prepare(
        q,
        k,
        v,
        is_causal=causal,
        causal_align="lower_right",
        window_size=(left, right),
        scale=softmax_scale,
        softcap=softcap if softcap > 0 else None,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        cu_seqlens_q=lengths[0],
        cu_seqlens_k=lengths[1],
        max_seqlen_q=lengths[2],
        max_seqlen_k=lengths[3],
        layout="bshd",
    )
    if isinstance(tensors, Tensor) and not return_attn_probs:
        return attend_packed(tensors, *call)
    out, lse = attend(*call)
    return (out, lse, out.new_empty(0)) if return_attn_probs else out
