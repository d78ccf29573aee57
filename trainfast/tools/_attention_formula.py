"""Attention's formula in float64, straight, one batch item at a time."""

import math
from typing import Any, NamedTuple

import numpy as np


class Sum(NamedTuple):
    """Numbers, and the magnitudes of all that was added up to each: a unit in which the
    roundings on the way to it can be told from mistakes."""

    value: np.ndarray
    size: np.ndarray

    def plus(self, value: np.ndarray) -> "Sum":
        return Sum(self.value + value, self.size + np.abs(value))

    def minus(self, other: "Sum") -> "Sum":
        return Sum(self.value - other.value, self.size + other.size)

    def times(self, other: "Sum") -> "Sum":
        return Sum(self.value * other.value, self.size * other.size)

    def scaled(self, factor: float | np.ndarray) -> "Sum":
        return Sum(self.value * factor, self.size * np.abs(factor))

    def matmul(self, values: np.ndarray) -> "Sum":
        return Sum(_matmul(self.value, values), _matmul(self.size, np.abs(values)))

    def total(self, axis: int | tuple[int, ...], keepdims: bool = False) -> "Sum":
        return Sum(
            self.value.sum(axis, keepdims=keepdims),
            self.size.sum(axis, keepdims=keepdims),
        )

    def transposed(self) -> "Sum":
        return Sum(self.value.swapaxes(1, 2), self.size.swapaxes(1, 2))


def _known(values: np.ndarray) -> Sum:
    return Sum(values, np.abs(values))


def _matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b, without the threads that it would start beside those of the kernels."""
    return np.einsum("hij,hjk->hik", a, b)


def largest_error(got: np.ndarray, want: Sum) -> float:
    """The largest error in the unit of want.size; infinite where that is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.abs(got - want.value) / want.size
    errors = np.where(got == want.value, 0.0, errors)  # also -infinity
    return float(np.max(errors, initial=0.0))


def term_of(array: np.ndarray, b: int) -> np.ndarray:
    """A view of what a mask or bias has for one item, [heads, queries, keys] or 1."""
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    return array[b if len(array) > 1 else 0]


class Item:
    """Batch item b: q, k and v are [heads, rows, dim], scores [heads, queries, keys].

    `options` are those of `trainfast.numpy.attention`; `drawn` has those that are
    arrays and may have a gradient, for all items.
    """

    def __init__(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        b: int,
        options: dict[str, Any],
        drawn: dict[str, np.ndarray],
    ) -> None:
        self.heads, self.n_q, dim = q.shape
        self.kv_heads, self.n_k, _ = k.shape
        self.q, self.b, self.options, self.drawn = q, b, options, drawn
        self.k, self.v = (np.repeat(x, self.heads // self.kv_heads, 0) for x in (k, v))
        self.scale = 1 / math.sqrt(dim)
        self.distance, self.allowed = self._allowed_keys()
        s = self._scores()
        s = Sum(
            np.where(self.allowed, s.value, -np.inf), np.where(self.allowed, s.size, 0)
        )
        self._softmax(s)
        self.keep = self._kept()
        self.out = self.p.scaled(self.keep).matmul(self.v)

    def _allowed_keys(self) -> tuple[np.ndarray, np.ndarray]:
        options = self.options
        i, j = np.arange(self.n_q)[:, None], np.arange(self.n_k)[None, :]
        length = options["kv_lens"][self.b] if "kv_lens" in options else self.n_k
        bottom_right = options.get("causal_align") == "lower_right"
        distance = i + (length - self.n_q if bottom_right else 0) - j
        allowed = np.broadcast_to(j < length, (self.heads, self.n_q, self.n_k))
        if options.get("is_causal"):
            allowed = allowed & (distance >= 0)
        if "window_size" in options:
            left, right = options["window_size"]
            allowed = allowed & (distance <= left) & (-distance <= right)
        if "mask" in self.drawn:
            allowed = allowed & term_of(self.drawn["mask"], self.b)
        return distance, allowed

    def _scores(self) -> Sum:
        s = _known(self.q).matmul(self.k.swapaxes(1, 2)).scaled(self.scale)
        softcap, drawn = self.options.get("softcap"), self.drawn
        self.slope = np.ones_like(s.value)  # of softcap
        if softcap:
            tanh = np.tanh(s.value / softcap)
            s, self.slope = s._replace(value=softcap * tanh), 1 - tanh**2
        if "bias" in drawn:
            s = s.plus(term_of(drawn["bias"], self.b))
        if "alibi_slopes" in drawn:
            slopes = drawn["alibi_slopes"][self.b][:, None, None]
            s = s.plus(-slopes * np.abs(self.distance))
        return s

    def _softmax(self, s: Sum) -> None:
        sinks = self.drawn.get("sinks", np.full(self.heads, -np.inf))[:, None]
        empty = ~self.allowed.any(-1)
        top = np.maximum(s.value.max(-1, initial=-np.inf), sinks)
        top = np.where(empty, 0.0, top)
        e = np.exp(s.value - top[..., None])
        total = np.where(empty, 1.0, e.sum(-1) + np.exp(sinks - top))
        # exp() makes of a score's error a relative one.
        worst = 1 + s.size.max(-1, initial=0.0)
        p = e / total[..., None]
        self.p = Sum(p, p * worst[..., None])
        p_sink = np.where(empty, 0.0, np.exp(sinks - top) / total)
        self.p_sink = Sum(p_sink, p_sink * worst)
        lse = top + np.log(total)
        self.lse = Sum(np.where(empty, -np.inf, lse), np.abs(lse) + worst)

    def _kept(self) -> float | np.ndarray:
        options = self.options
        if "dropout_p" not in options:
            return 1.0
        threshold = math.floor(options["dropout_p"] * 65536 + 0.5)
        first = self.b * self.heads
        numbers = [
            dropout_numbers(options["seed"], first + head, self.n_q, self.n_k)
            for head in range(self.heads)
        ]
        return np.where(np.stack(numbers) < threshold, 0, 65536 / (65536 - threshold))

    def backward(self, dout: np.ndarray, dlse: np.ndarray) -> dict[str, Sum]:
        """The gradients by name; of the bias before it is summed up."""
        dp = _known(dout).matmul(self.v.swapaxes(1, 2)).scaled(self.keep)
        delta = self.out.times(_known(dout)).total(-1)
        delta = delta.minus(_known(np.where(np.isneginf(self.lse.value), 0, dlse)))
        ds = self.p.times(dp.minus(Sum(delta.value[..., None], delta.size[..., None])))
        inner = ds.scaled(self.slope).scaled(self.scale)
        return {
            "q": inner.matmul(self.k),
            "k": self._add_group(inner.transposed().matmul(self.q)),
            "v": self._add_group(self.p.scaled(self.keep).transposed().matmul(dout)),
            "bias": ds,
            "alibi_slopes": ds.scaled(-np.abs(self.distance)).total((1, 2)),
            "sinks": self.p_sink.times(delta).scaled(-1.0).total(1),
        }

    def _add_group(self, x: Sum) -> Sum:
        """The heads that share a key head."""
        group = self.heads // self.kv_heads
        shape = (self.kv_heads, group, *x.value.shape[1:])
        return Sum(x.value.reshape(shape), x.size.reshape(shape)).total(1)


# ---- Dropout -------------------------------------------------------------------------


def dropout_numbers(seed: int, head: int, n_q: int, n_k: int) -> np.ndarray:
    """[queries, keys] of numbers below 65536, by which elements are dropped: 16 bits
    each of Philox4x32-10 (Salmon et al., SC 2011), as csrc/tfast.h says."""
    i, j = np.arange(n_q)[:, None], np.arange(n_k)[None, :]
    counter = (
        i // 16 * 8 + i % 8,
        j // 16 * 4 + j % 8 // 2,
        np.array(head),
        np.array(0),
    )
    words = np.stack(np.broadcast_arrays(*_philox(counter, seed)))
    which = np.broadcast_to(i // 8 % 2 * 2 + j // 8 % 2, (1, n_q, n_k))
    word = np.take_along_axis(words, which, 0)[0]
    return np.where(j % 2, word >> np.uint64(16), word & np.uint64(0xFFFF))


def _philox(counter: tuple[np.ndarray, ...], seed: int) -> tuple[np.ndarray, ...]:
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = (word.astype(np.uint64) for word in counter)
    keys = seed & 0xFFFFFFFF, seed >> 32
    for turn in range(10):
        k0, k1 = (
            np.uint64((key + turn * step) & 0xFFFFFFFF)
            for key, step in zip(keys, (0x9E3779B9, 0xBB67AE85))
        )
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ k0, b & low, (a >> half) ^ c3 ^ k1, a & low
    return c0, c1, c2, c3
