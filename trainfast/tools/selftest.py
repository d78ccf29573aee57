"""Compares each kernel with its float64 reference, on every backend usable here."""

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

import trainfast
from trainfast.report import Report, Table

Array = Any

# Around the edges of vectors and tiles; every second array is misaligned.
SIZES = (0, 1, 7, 8, 9, 15, 16, 17, 255, 256, 257, 5000)
EPS = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        action="append",
        type=_backend_name,
        metavar="NAME",
        help="only this one (may be repeated)",
    )


def _backend_name(name: str) -> str:
    known = [str(backend["name"]) for backend in trainfast.backends()]
    if name not in known:
        rule = f"must be one of {', '.join(known)}, got {name!r}"
        raise argparse.ArgumentTypeError(rule)
    return name


def run(args: argparse.Namespace) -> int:
    report = selftest(args.backend)
    print(report.to_json() if args.json else report)
    return 0 if report.ok else 1


class Row(NamedTuple):
    """One comparison. `error` is the largest one, in the unit of `allowed`: relative to
    the sum of an element's magnitudes before and after. `ok` is None if it was skipped,
    for the reason in `note`."""

    kernel: str
    backend: str
    dtype: str
    error: float | None
    allowed: float | None
    ok: bool | None
    note: str | None = None


class SelftestReport(Report):
    """The comparisons in `rows`; `ok` if none failed and at least one was made."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        made = [row.ok for row in rows if row.ok is not None]
        self.ok = bool(made) and all(made)

    def tables(self) -> list[Table]:
        columns = ("kernel", "backend", "dtype", "max error", "allowed", "ok", "note")
        state = {True: "ok", False: "FAILED", None: "skipped"}
        rows = [(*row[:5], state[row.ok], row.note) for row in self.rows]
        return [Table("selftest", columns, rows)]

    def __str__(self) -> str:
        failed = sum(row.ok is False for row in self.rows)
        end = "all fine" if self.ok else f"{failed} of {len(self.rows)} FAILED"
        return f"{super().__str__()}\n{end}"

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "rows": [row._asdict() for row in self.rows]}


def selftest(backends: list[str] | None = None) -> SelftestReport:
    """Runs each kernel on the backends named, by default on every usable one.

    A backend that is named but cannot run here counts as failed. Whatever backend was
    in use before is in use again afterwards.
    """
    listed = trainfast.backends()
    names = backends or [str(b["name"]) for b in listed if b["usable"]]
    rows: list[Row] = []
    try:
        for name in names:
            rows += _check_backend(name)
    finally:
        trainfast.use_backend(_forced(listed))
    return SelftestReport(rows)


def _forced(listed: list[dict[str, Any]]) -> str | None:
    """Which name `use_backend` needs to bring back the state that this list shows."""
    cuda = next(b for b in listed if b["name"] == "cuda")
    cpus = [b for b in listed if b["name"] != "cuda"]
    best = next(b for b in cpus if b["usable"])
    if best["in_use"] and cuda["usable"] == cuda["in_use"]:
        return None
    return next(b["name"] for b in cpus if b["in_use"])


def _check_backend(backend: str) -> list[Row]:
    try:
        trainfast.use_backend(backend)
    except ValueError as error:
        return [Row("all", backend, "all", None, None, False, str(error))]
    arrays: NumpyArrays | TorchArrays = NumpyArrays()
    if backend == "cuda":
        try:
            arrays = TorchArrays()
        except ImportError as error:
            return [Row("all", backend, "all", None, None, None, str(error))]
    rows = []
    for kernel, (layouts, check) in KERNELS.items():
        for dtypes in layouts:
            rows.append(_check_one(kernel, backend, dtypes, check, arrays))
    return rows


def _check_one(
    kernel: str, backend: str, dtypes: tuple[str, ...], check: "Check", arrays: Array
) -> Row:
    label = "/".join(dict.fromkeys(dtypes))
    missing = [dtype for dtype in dtypes if not arrays.has(dtype)]
    if missing:
        note = f"{missing[0]} needs ml_dtypes"
        return Row(kernel, backend, label, None, None, None, note)
    try:
        error, allowed = check(dtypes, arrays)
    except Exception as problem:
        note = f"{type(problem).__name__}: {problem}"
        return Row(kernel, backend, label, None, None, False, note)
    if not np.isfinite(error):
        note = f"an error is {error}"
        return Row(kernel, backend, label, None, allowed, False, note)
    return Row(kernel, backend, label, error, allowed, error <= allowed)


# ---- Arrays --------------------------------------------------------------------------


class NumpyArrays:
    """Arrays on the CPU, as NumPy's; bfloat16 comes from ml_dtypes."""

    def has(self, dtype: str) -> bool:
        try:
            self._dtype(dtype)
        except ImportError:
            return False
        return True

    def put(self, values: np.ndarray, dtype: str, misaligned: bool = False) -> Array:
        """A copy, rounded; misaligned by one element."""
        start = int(misaligned)
        array = np.zeros(values.size + start, self._dtype(dtype))[start:]
        array[...] = values
        return array

    def get(self, array: Array) -> np.ndarray:
        return array.astype(np.float64)

    @staticmethod
    def _dtype(name: str) -> np.dtype:
        if name == "bfloat16":
            return np.dtype(import_module("ml_dtypes").bfloat16)
        return np.dtype(name)


class TorchArrays:
    """Arrays on the current CUDA device, as torch's (on the CPU for a test)."""

    def __init__(self, device: str = "cuda") -> None:
        try:
            self.torch = import_module("torch")
        except ImportError as error:
            raise ImportError("arrays on the GPU need torch") from error
        self.device = device
        if device == "cuda" and not self.torch.cuda.is_available():
            raise ImportError("arrays on the GPU need a torch with CUDA")

    def has(self, dtype: str) -> bool:
        return hasattr(self.torch, dtype)

    def put(self, values: np.ndarray, dtype: str, misaligned: bool = False) -> Array:
        start = int(misaligned)
        kind = getattr(self.torch, dtype)
        array = self.torch.zeros(values.size + start, dtype=kind, device=self.device)[
            start:
        ]
        array.copy_(self.torch.from_numpy(np.ascontiguousarray(values)))
        return array

    def get(self, array: Array) -> np.ndarray:
        return array.double().cpu().numpy()


# ---- AdamW ---------------------------------------------------------------------------

ADAMW_DTYPES: list[tuple[str, ...]] = [  # of parameter, gradient and state
    ("float32", "float32", "float32"),
    ("float64", "float64", "float64"),
    ("float16", "float16", "float16"),
    ("bfloat16", "bfloat16", "bfloat16"),
    ("bfloat16", "bfloat16", "float32"),
    ("float32", "bfloat16", "float32"),
]
ADAMW_OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.0, "step": 1},
    {"amsgrad": True},
    {"maximize": True},
    {"decoupled_weight_decay": False},
    {"grad_scale": 1024.0},
    {"found_inf": 1.0},
]


def check_adamw(dtypes: tuple[str, ...], arrays: Array) -> tuple[float, float]:
    """The largest error over all sizes and options, and the one that is allowed: a few
    roundings of the arithmetic, and half a unit of the dtype that stores the result."""
    arithmetic = "float64" if "float64" in dtypes else "float32"
    errors = [
        _adamw_error(dtypes, arrays, seed, **options)
        for seed, options in enumerate(ADAMW_OPTIONS)
    ]
    store = max(EPS[dtypes[0]], EPS[dtypes[2]])
    rounding = store / 2 if store > EPS[arithmetic] else 0.0
    return float(np.max(errors)), 4 * EPS[arithmetic] + rounding


def _adamw_error(
    dtypes: tuple[str, ...],
    arrays: Array,
    seed: int,
    *,
    step: int = 7,
    amsgrad: bool = False,
    grad_scale: float = 1.0,
    found_inf: float | None = None,
    **options: Any,
) -> float:
    """One step over all sizes at once; compares p, g, m, v and v's maximum."""
    lists = _adamw_inputs(dtypes, arrays, np.random.default_rng(seed), grad_scale)
    before = [np.concatenate([arrays.get(array) for array in some]) for some in lists]
    scalars: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8}
    scalars |= {"weight_decay": 0.1, **options}
    device: dict[str, Array] = {}
    if grad_scale != 1.0:
        device["grad_scale"] = arrays.put(np.array([grad_scale]), "float32")
    if found_inf is not None:
        device["found_inf"] = arrays.put(np.array([found_inf]), "float32")
    params, grads, exp_avgs, exp_avg_sqs, maxima = lists
    trainfast.adamw_step(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs=maxima if amsgrad else None,
        step=step,
        write_back_grads=True,
        **scalars,
        **device,
    )

    after = [np.concatenate([arrays.get(array) for array in some]) for some in lists]
    want = before
    if found_inf is None:
        want = adamw_reference(before, step, amsgrad, grad_scale, **scalars)
    errors = [
        np.abs(got - right) / (np.abs(old) + np.abs(right))
        for got, right, old in zip(after, want, before, strict=True)
    ]
    return float(np.max(errors))


def _adamw_inputs(
    dtypes: tuple[str, ...], arrays: Array, rng: np.random.Generator, grad_scale: float
) -> list[list[Array]]:
    """Lists of p, g, m, v and v's maximum, each with one array of every size."""

    def variances(n: int) -> np.ndarray:
        return rng.uniform(0.5, 2.0, n)  # clear of float16's subnormals

    def gradients(n: int) -> np.ndarray:
        return rng.standard_normal(n) * grad_scale

    param, grad, state = dtypes
    makers: list[tuple[str, Callable[[int], np.ndarray]]] = [
        (param, rng.standard_normal),
        (grad, gradients),
        (state, rng.standard_normal),
        (state, variances),
        (state, variances),
    ]
    return [
        [arrays.put(make(n), dtype, i % 2 == 1) for i, n in enumerate(SIZES)]
        for dtype, make in makers
    ]


def adamw_reference(
    arrays: list[np.ndarray],
    step: int,
    amsgrad: bool,
    grad_scale: float,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    decoupled_weight_decay: bool = True,
) -> list[np.ndarray]:
    """The step in float64, straight from the formula in `trainfast.adamw_step`."""
    p, g, m, v, v_max = arrays
    unscaled = g / grad_scale
    g = -unscaled if maximize else unscaled
    if decoupled_weight_decay:
        p = p * (1 - lr * weight_decay)
    else:
        g = g + weight_decay * p
    m = m + (1 - betas[0]) * (g - m)
    v = betas[1] * v + (1 - betas[1]) * g**2
    v_max = np.maximum(v_max, v) if amsgrad else v_max
    corrected = np.sqrt((v_max if amsgrad else v) / (1 - betas[1] ** step))
    p = p - lr / (1 - betas[0] ** step) * m / (corrected + eps)
    return [p, unscaled, m, v, v_max]


Check = Callable[[tuple[str, ...], Array], tuple[float, float]]
KERNELS: dict[str, tuple[list[tuple[str, ...]], Check]] = {
    "adamw": (ADAMW_DTYPES, check_adamw),
}
