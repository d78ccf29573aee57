"""What attention is, in float64 NumPy: the contract of csrc/tfast.h, a line a formula.

Arrays come as the core takes them: [B, H, N, D], [B, N, H, D] with bnhd, [total, H, D]
with cu_seqlens. One batch item after another, each with all its scores in memory.
"""

from typing import NamedTuple

import numpy as np

MASK32 = np.uint64(0xFFFFFFFF)


# ---- Dropout -------------------------------------------------------------------------


def philox(counter, key):
    """Philox4x32-10 (Salmon et al., SC 2011): four words for each counter of four.

    Words are uint64 arrays of values below 2^32, which broadcast.
    """
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (b >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            b & MASK32,
            (a >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            a & MASK32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3))


def dropout_threshold(p):
    """How many of 65536 equally likely numbers drop an element."""
    return int(np.floor(p * 65536 + 0.5))


def dropout_factors(p, seed, head_number, n_q, n_k):
    """[n_q, n_k] of 0 for what is dropped and 1 / (1 - p) for what stays."""
    i, j = np.arange(n_q)[:, None], np.arange(n_k)[None, :]
    key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    row, column = i // 16 * 8 + i % 8, j // 16 * 4 + j % 8 // 2
    words = philox((row, column, head_number & 0xFFFFFFFF, 0), key)
    chosen = np.take_along_axis(words, (i // 8 % 2 * 2 + j // 8 % 2)[None], 0)[0]
    number = np.where(j % 2 == 1, chosen >> np.uint64(16), chosen & np.uint64(0xFFFF))
    threshold = dropout_threshold(p)
    return np.where(number < threshold, 0.0, 65536 / (65536 - threshold))


# ---- One batch item ------------------------------------------------------------------


class Options(NamedTuple):
    """All that an item's formulas depend on, for all items."""

    scale: float
    mask: object = None
    bias: object = None
    alibi_slopes: object = None
    sinks: object = None
    is_causal: bool = False
    bottom_right: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int = 0
    cu_seqlens_q: object = None
    cu_seqlens_k: object = None
    max_seqlen_q: int = 0  # sizes of the scores that mask and bias broadcast to:
    max_seqlen_k: int = 0  # nothing here needs them
    kv_lens: object = None
    bnhd: bool = False
    score_dtype: object = np.float64  # what sums of scores and terms are rounded to


def _rows(array, b, cu_seqlens, bnhd):
    """A view of one item's rows, [heads, n, dim]."""
    if cu_seqlens is not None:
        return array[int(cu_seqlens[b]) : int(cu_seqlens[b + 1])].swapaxes(0, 1)
    return array[b].swapaxes(0, 1) if bnhd else array[b]


def _lse_rows(array, b, cu_seqlens):
    """A view of one item's rows, [heads, n]."""
    if cu_seqlens is not None:
        return array[:, int(cu_seqlens[b]) : int(cu_seqlens[b + 1])]
    return array[b]


def _term(array, b, n_q, n_k):
    """A view of what a mask or bias, or its gradient, has for one item."""
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    return array[b if array.shape[0] > 1 else 0][:, :n_q, :n_k]


def _slopes(array, b):
    return array[b] if array.ndim == 2 and array.shape[0] > 1 else array.reshape(-1)


def _weighted(weights, allowed, values):
    """sum_j weights_ij values_j over the allowed j: a NaN elsewhere does not count."""
    if np.isfinite(values).all():
        return np.where(allowed, weights, 0) @ values
    products = weights[..., None] * values[..., None, :, :]
    return np.where(allowed[..., None], products, 0).sum(-2)


class _Item:
    """The forward pass of one item; arrays are [heads, n_q, n_k] or [heads, n_q]."""

    def __init__(self, q, k, v, b, o):
        self.q, self.o, self.b = q, o, b
        self.heads, n_q, _ = q.shape
        self.group = max(self.heads // max(k.shape[0], 1), 1)
        self.k, self.v = (np.repeat(x, self.group, 0) for x in (k, v))
        n_k = k.shape[1]
        length = n_k if o.kv_lens is None else int(o.kv_lens[b])
        shift = length - n_q if o.bottom_right else 0
        i, j = np.arange(n_q)[:, None], np.arange(n_k)[None, :]
        self.distance = i + shift - j
        allowed = np.broadcast_to(j < length, (self.heads, n_q, n_k)).copy()
        if o.is_causal:
            allowed &= self.distance >= 0
        if o.window_left >= 0:
            allowed &= self.distance <= o.window_left
        if o.window_right >= 0:
            allowed &= -self.distance <= o.window_right
        self._score(allowed, n_q, n_k)
        self._normalise()
        self.keep = np.ones_like(self.p)
        if o.dropout_p > 0:
            for h in range(self.heads):
                self.keep[h] = dropout_factors(
                    o.dropout_p,
                    int(np.reshape(o.seed, ())),
                    b * self.heads + h,
                    n_q,
                    n_k,
                )
        self.out = _weighted(self.p * self.keep, self.allowed, self.v)

    def _score(self, allowed, n_q, n_k):
        o, b = self.o, self.b
        s = o.scale * self.q @ self.k.swapaxes(1, 2)
        self.tanh = np.tanh(s / o.softcap) if o.softcap else None
        s = o.softcap * self.tanh if o.softcap else s
        for term in (o.mask, o.bias):
            if term is not None and term.dtype == bool:
                allowed &= _term(term, b, n_q, n_k)
            elif term is not None:
                values = _term(term, b, n_q, n_k).astype(np.float64)
                allowed &= values != -np.inf  # also where the score is NaN
                s = (s + values).astype(o.score_dtype).astype(np.float64)
        if o.alibi_slopes is not None:
            slopes = _slopes(o.alibi_slopes, b).astype(np.float64)
            s = s - slopes[:, None, None] * abs(self.distance)
        self.allowed = allowed & (s != -np.inf)
        self.s = np.where(self.allowed, s, -np.inf)

    def _normalise(self):
        sinks = -np.inf if self.o.sinks is None else self.o.sinks.astype(np.float64)
        sinks = np.broadcast_to(sinks, (self.heads,))[:, None]
        self.empty = ~self.allowed.any(-1)
        top = np.maximum(self.s.max(-1, initial=-np.inf), sinks)
        top = np.where(np.isneginf(top), 0, top)
        e = np.exp(self.s - top[..., None])
        total = e.sum(-1) + np.exp(sinks - top)
        safe = np.where(self.empty, 1, total)
        self.p = np.where(self.empty[..., None], 0, e / safe[..., None])
        self.p_sink = np.where(self.empty, 0, np.exp(sinks - top) / safe)
        self.lse = np.where(self.empty, -np.inf, top + np.log(safe))

    def backward(self, dout, dlse):
        """The gradients of q, k, v and the scores (before mask, bias and ALiBi)."""
        dlse = np.zeros_like(self.lse) if dlse is None else dlse
        dp = self.keep * (dout @ self.v.swapaxes(1, 2))
        delta = (dout * self.out).sum(-1) - np.where(self.empty, 0, dlse)
        ds = np.where(self.allowed, self.p * (dp - delta[..., None]), 0)
        self.dsinks = -(self.p_sink * delta).sum(-1)
        capped = ds * (1 - self.tanh**2) if self.o.softcap else ds
        capped = self.o.scale * np.where(self.allowed, capped, 0)
        allowed_t = self.allowed.swapaxes(1, 2)
        dv = _weighted((self.p * self.keep).swapaxes(1, 2), allowed_t, dout)
        dk = _weighted(capped.swapaxes(1, 2), allowed_t, self.q)
        dq = _weighted(capped, self.allowed, self.k)
        return dq, self._add_group(dk), self._add_group(dv), ds

    def _add_group(self, x):
        return x.reshape(len(x) // self.group, self.group, *x.shape[1:]).sum(1)


# ---- The calls -----------------------------------------------------------------------


def _items(q, k, v, o):
    """(batch item, _Item) for each; arrays become float64."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    batch = q.shape[0] if o.cu_seqlens_q is None else len(o.cu_seqlens_q) - 1
    for b in range(batch):
        yield (
            b,
            _Item(
                _rows(q, b, o.cu_seqlens_q, o.bnhd),
                _rows(k, b, o.cu_seqlens_k, o.bnhd),
                _rows(v, b, o.cu_seqlens_k, o.bnhd),
                b,
                o,
            ),
        )


def _lse_shape(q, o):
    if o.cu_seqlens_q is not None:
        return (q.shape[1], q.shape[0])
    return (q.shape[0], q.shape[2], q.shape[1]) if o.bnhd else q.shape[:3]


def attention(q, k, v, **options):
    """(out, lse) in float64; keywords as in Options."""
    o = Options(**options)
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    lse = np.full(_lse_shape(q, o), -np.inf)
    with np.errstate(all="ignore"):
        for b, item in _items(q, k, v, o):
            _rows(out, b, o.cu_seqlens_q, o.bnhd)[...] = item.out
            _lse_rows(lse, b, o.cu_seqlens_q)[...] = item.lse
    return out, lse


class Gradients(NamedTuple):
    """Of everything that has one; None where there was no such input."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None
    dalibi: np.ndarray | None
    dsinks: np.ndarray | None


def _add_reduced(target, ds):
    """target += ds, summed over the dimensions in which target has size 1."""
    axes = tuple(d for d in range(3) if target.shape[d] == 1)
    target += ds.sum(axes, keepdims=True)


def attention_backward(dout, q, k, v, *, dlse=None, **options):
    """All gradients in float64; keywords as in Options."""
    o = Options(**options)
    dout = np.asarray(dout).astype(np.float64)
    dlse = None if dlse is None else np.asarray(dlse).astype(np.float64)
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    dbias, dalibi, dsinks = (
        None if x is None else np.zeros(x.shape)
        for x in (o.bias, o.alibi_slopes, o.sinks)
    )
    with np.errstate(all="ignore"):
        for b, item in _items(q, k, v, o):
            above = None if dlse is None else _lse_rows(dlse, b, o.cu_seqlens_q)
            rows = _rows(dout, b, o.cu_seqlens_q, o.bnhd)
            one_dq, one_dk, one_dv, ds = item.backward(rows, above)
            _rows(dq, b, o.cu_seqlens_q, o.bnhd)[...] = one_dq
            _rows(dk, b, o.cu_seqlens_k, o.bnhd)[...] = one_dk
            _rows(dv, b, o.cu_seqlens_k, o.bnhd)[...] = one_dv
            if dbias is not None:
                _add_reduced(_term(dbias, b, *ds.shape[1:]), ds)
            if dalibi is not None:
                dalibi_b = _slopes(dalibi, b)
                dalibi_b -= (ds * abs(item.distance)).sum((1, 2))
            if dsinks is not None:
                dsinks += item.dsinks
    return Gradients(dq, dk, dv, dbias, dalibi, dsinks)
