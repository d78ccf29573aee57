"""Attention's kernels against its formula in float64, forward and backward."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import trainfast
from trainfast.tools._attention_formula import Item, Sum, largest_error, term_of
from trainfast.tools._selftest_arrays import EPS, Array

ATTENTION_DTYPES: list[tuple[str, ...]] = [(name,) for name in EPS]
SEED = 0x0123456789ABCDEF


@dataclass(frozen=True)
class Case:
    """One call: sizes, how its items lie in memory, options, and the shapes of what is
    drawn at random (a mask is bool)."""

    queries: tuple[int, ...]  # of each batch item; all alike but where "packed"
    keys: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 2
    dim: int = 16
    dim_v: int = 16
    layout: str = "bhsd"  # or "bshd", or "packed": with cu_seqlens
    options: dict[str, Any] = field(default_factory=dict)
    drawn: dict[str, tuple[int, ...]] = field(default_factory=dict)


CAUSAL = {"is_causal": True, "causal_align": "lower_right"}
CASES = [
    Case((33, 33), (49, 49), dim=64, dim_v=64),
    Case((257,), (257,), 2, 1, 40, 72, options={"is_causal": True}),
    Case((1,), (1000,), 4, 1, 128, 1, options=CAUSAL),
    Case((17, 17), (70, 70), drawn={"mask": (2, 1, 17, 70)}),  # rows without a key
    Case((65,), (130,), dim=1, options={"softcap": 2.0}, drawn={"bias": (2, 1, 130)}),
    Case(
        (50, 50),
        (50, 50),
        options={"window_size": (9, 4)},
        drawn={"alibi_slopes": (2, 2), "sinks": (2,)},
    ),
    Case((40, 40), (90, 90), options={"dropout_p": 0.2, "seed": SEED}),
    Case((9, 9, 9), (80, 80, 80), layout="bshd", options={"kv_lens": (80, 33, 0)}),
    Case((5, 0, 64), (9, 3, 71), layout="packed", options=CAUSAL),
]


def check_attention(dtypes: tuple[str, ...], arrays: Array) -> tuple[float, float]:
    """The largest error of output and logarithm of sums, and what is allowed: some
    roundings of the arithmetic, and one of the dtype that stores the result."""
    return _largest_error(_forward_error, dtypes[0], arrays), _allowed(dtypes[0])


def check_attention_backward(
    dtypes: tuple[str, ...], arrays: Array
) -> tuple[float, float]:
    """The same for all gradients, of the forward kernel's own output."""
    return _largest_error(_backward_error, dtypes[0], arrays), _allowed(dtypes[0])


def _allowed(dtype: str) -> float:
    arithmetic = EPS["float64" if dtype == "float64" else "float32"]
    return 8 * arithmetic + (EPS[dtype] if EPS[dtype] > arithmetic else 0.0)


Error = Callable[["Problem"], float]


def _largest_error(error: Error, dtype: str, arrays: Array) -> float:
    problems = [Problem(case, dtype, arrays, i) for i, case in enumerate(CASES)]
    return float(np.max([error(problem) for problem in problems]))


def _forward_error(problem: "Problem") -> float:
    out, lse = problem.forward()
    want = [problem.reference(b) for b in range(len(problem.case.queries))]
    errors = [
        problem.rows_error(out, (item.out for item in want)),
        problem.lse_error(lse, (item.lse for item in want)),
    ]
    return float(np.max(errors))


def _backward_error(problem: "Problem") -> float:
    q, k, v = problem.qkv
    out, lse = problem.forward()
    got = trainfast.numpy.attention_backward(
        problem.put_rows(problem.dout),
        q,
        k,
        v,
        out,
        lse,
        dlse=problem.put_lse(problem.dlse),
        wanted=["q", "k", "v", *problem.extra],
        **problem.options,
    )
    want = [
        problem.reference(b).backward(problem.dout[b], problem.dlse[b])
        for b in range(len(problem.case.queries))
    ]
    errors = [
        problem.rows_error(array, (item[name] for item in want))
        for name, array in zip(("q", "k", "v"), got[:3])
    ]
    for name in problem.extra:
        array = problem.arrays.get(getattr(got, f"d{name}"))
        total = problem.add_up(name, [item[name] for item in want])
        errors.append(largest_error(array, total))
    return float(np.max(errors))


# ---- Inputs --------------------------------------------------------------------------


class Problem:
    """A case's arrays: lists of [heads, rows, dim] per item in float64, rounded to the
    dtype, for the reference, and the same as the call takes them."""

    def __init__(self, case: Case, dtype: str, arrays: Array, seed: int) -> None:
        self.case, self.dtype, self.arrays = case, dtype, arrays
        self.wide = "float64" if dtype == "float64" else "float32"
        self.rng = np.random.default_rng(seed)
        self.q = self._draw(case.queries, case.heads, case.dim)
        self.k = self._draw(case.keys, case.kv_heads, case.dim)
        self.v = self._draw(case.keys, case.kv_heads, case.dim_v)
        self.dout = self._draw(case.queries, case.heads, case.dim_v)
        self.dlse = [
            self._round(self.rng.standard_normal((case.heads, n)), self.wide)
            for n in case.queries
        ]
        self.qkv = [self.put_rows(x) for x in (self.q, self.k, self.v)]
        self.drawn = {name: self._option(name, n) for name, n in case.drawn.items()}
        # What has a gradient apart from q, k and v.
        self.extra = [name for name in case.drawn if name != "mask"]
        self.options = self._options()

    def _draw(self, rows: Iterable[int], heads: int, dim: int) -> list[np.ndarray]:
        return [
            self._round(self.rng.standard_normal((heads, n, dim)), self.dtype)
            for n in rows
        ]

    def _round(self, values: np.ndarray, dtype: str) -> np.ndarray:
        return self.arrays.get(self.arrays.put(values, dtype))

    def _option(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name == "mask":
            mask = self.rng.random(shape) < 0.5
            mask[..., 3, :] = False
            return mask
        values = self.rng.standard_normal(shape)
        return self._round(values, self.dtype if name == "bias" else self.wide)

    def _options(self) -> dict[str, Any]:
        put, case = self.arrays.put, self.case
        dtypes = {"mask": "bool", "bias": self.dtype}
        options = dict(case.options)
        for name, values in self.drawn.items():
            options[name] = put(values, dtypes.get(name, self.wide))
        if "kv_lens" in options:
            options["kv_lens"] = put(np.array(options["kv_lens"]), "int64")
        if case.layout == "bshd":
            options["layout"] = "bshd"
        if case.layout == "packed":
            for name, rows in (("q", case.queries), ("k", case.keys)):
                ends = np.cumsum((0, *rows))
                options[f"cu_seqlens_{name}"] = put(ends, "int64")
        return options

    def forward(self) -> tuple[Array, Array]:
        q, k, v = self.qkv
        return trainfast.numpy.attention(q, k, v, return_lse=True, **self.options)

    def reference(self, b: int) -> Item:
        return Item(self.q[b], self.k[b], self.v[b], b, self.case.options, self.drawn)

    # Between lists of items and the arrays of the call

    def pack(self, items: Iterable[np.ndarray]) -> np.ndarray:
        if self.case.layout == "bhsd":
            return np.stack(list(items))
        rows = [item.swapaxes(0, 1) for item in items]
        return np.stack(rows) if self.case.layout == "bshd" else np.concatenate(rows)

    def pack_lse(self, items: Iterable[np.ndarray]) -> np.ndarray:
        if self.case.layout == "packed":
            return np.concatenate(list(items), 1)
        return np.stack(list(items))

    def put_rows(self, items: list[np.ndarray]) -> Array:
        return self.arrays.put(self.pack(items), self.dtype, items is not self.q)

    def put_lse(self, items: list[np.ndarray]) -> Array:
        return self.arrays.put(self.pack_lse(items), self.wide)

    def rows_error(self, got: Array, want: Iterable[Sum]) -> float:
        return self._packed_error(got, list(want), self.pack)

    def lse_error(self, got: Array, want: Iterable[Sum]) -> float:
        return self._packed_error(got, list(want), self.pack_lse)

    def _packed_error(
        self,
        got: Array,
        want: list[Sum],
        pack: Callable[[Iterable[np.ndarray]], np.ndarray],
    ) -> float:
        parts = (pack(x.value for x in want), pack(x.size for x in want))
        return largest_error(self.arrays.get(got), Sum(*parts))

    def add_up(self, name: str, items: list[Sum]) -> Sum:
        """An option's gradient: each item's, summed over what it was broadcast over."""
        shape = self.drawn[name].shape
        total = Sum(np.zeros(shape), np.zeros(shape))
        for b, item in enumerate(items):
            for target, part in zip(total, item):
                if name == "bias":
                    target = term_of(target, b)
                    one = [d for d in range(3) if target.shape[d] == 1]
                    part = part.sum(tuple(one), keepdims=True)
                elif target.ndim == 2:
                    target = target[b]
                target += part
        return total
