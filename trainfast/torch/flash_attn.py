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
    """Attention of each query to the keys of its batch item.

    Args:
        q: [batch, n_q, heads, dim].
        k, v: [batch, n_k, kv_heads, dim]; heads is a multiple of kv_heads.
        dropout_p: in [0, 1).
        softmax_scale: of the scores; None: 1 / sqrt(dim).
        causal: query i sees keys up to i + n_k - n_q: aligned to the lower right.
        window_size: (left, right), how far a query sees from key i + n_k - n_q; -1: any
            distance.
        softcap: scores become softcap * tanh(score / softcap); 0 or less is off.
        alibi_slopes: [heads] or [batch, heads].
        deterministic: ignored: results are always deterministic.
        return_attn_probs: also returns lse and an empty tensor; the flash-attn package
            has probabilities there, for dropout only.

    Returns:
        out [batch, n_q, heads, dim]; with return_attn_probs (out, lse, empty): lse is
        the logarithm of each row's sum of exp(score), [batch, heads, n_q].

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
    """flash_attn_func with keys and values in one tensor.

    Args:
        q: [batch, n_q, heads, dim].
        kv: [batch, n_k, 2, kv_heads, dim].
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs: as in flash_attn_func.

    Returns:
        As flash_attn_func.
    """
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
    """flash_attn_func with queries, keys and values in one tensor.

    Args:
        qkv: [batch, n, 3, heads, dim].
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs: as in flash_attn_func.

    Returns:
        As flash_attn_func.
    """
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

    Args:
        q: [total_q, heads, dim].
        k, v: [total_k, kv_heads, dim].
        cu_seqlens_q, cu_seqlens_k: [batch + 1], int32 or int64: item b has the rows
            cu_seqlens[b] .. cu_seqlens[b + 1] - 1.
        max_seqlen_q, max_seqlen_k: the rows of the longest item.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs: as in flash_attn_func.
        block_table: must be None.

    Returns:
        out [total_q, heads, dim]; with return_attn_probs (out, lse, empty): lse is
        [heads, total_q].

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
    """flash_attn_varlen_func with keys and values in one tensor.

    Args:
        q: [total_q, heads, dim].
        kv: [total_k, 2, kv_heads, dim].
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in
            flash_attn_varlen_func.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs: as in flash_attn_func.

    Returns:
        As flash_attn_varlen_func.
    """
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
    """flash_attn_varlen_func with queries, keys and values in one tensor.

    Args:
        qkv: [total, 3, heads, dim].
        cu_seqlens: [batch + 1], int32 or int64, as cu_seqlens_q and cu_seqlens_k of
            flash_attn_varlen_func.
        max_seqlen: the rows of the longest item.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs: as in flash_attn_func.

    Returns:
        As flash_attn_varlen_func.
    """
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
    """Raises NotImplementedError; scripts can import the name beside the others.

    Args:
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens,
            cache_batch_idx, cache_leftpad, block_table, softmax_scale, causal,
            window_size, softcap, rotary_interleaved, alibi_slopes, num_splits,
            return_softmax_lse: as in the flash-attn package.

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
