"""With TRAINFAST_CHECK_LENGTHS=1 in the environment of a run, attention checks its
lengths (`cu_seqlens`, `kv_lens`) on a GPU, too.

Without it they are the caller's word there, since a look waits for the GPU: kernels
clamp them, so that nothing outside the arrays is read or written, and what comes out is
some other call's attention.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainfast import _core

CHECK_ON_DEVICE = os.environ.get("TRAINFAST_CHECK_LENGTHS", "") not in ("", "0")


def check_lengths(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    kv_lens: Any,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    bnhd: bool = False,
) -> None:
    """Raises ValueError, as on the CPU, for int64 lengths that lie anywhere; waits for
    them. q and k have these shapes."""
    q, k = (_without_heads(shape, bnhd) for shape in (q_shape, k_shape))
    lengths = map(_on_host, (cu_seqlens_q, cu_seqlens_k, kv_lens))
    names = ("cu_seqlens_q", "cu_seqlens_k", "kv_lens")
    options = {"scale": 1.0, "bnhd": bnhd, **dict(zip(names, lengths))}
    # The core checks all and, without a head, computes nothing. max_seqlen is compared
    # with the longest item before the core checks that the items lie within the rows.
    # So the first call leaves it out (0), and reports bad offsets as such.
    for longest in ((0, 0), (max_seqlen_q, max_seqlen_k)):
        options |= dict(zip(("max_seqlen_q", "max_seqlen_k"), longest))
        _core.attention(q, k, k, q, None, **options)


def _without_heads(shape: Sequence[int], bnhd: bool) -> Any:
    sizes = [*shape[:-1], 1]
    sizes[2 if bnhd else 1] = 0
    return np.empty(sizes, np.float32)


def _on_host(array: Any) -> Any:
    if array is None or isinstance(array, np.ndarray):
        return array
    if hasattr(array, "cpu"):  # torch's
        return array.cpu().numpy()
    return array.get() if hasattr(array, "get") else np.asarray(array)  # CuPy's
