"""Compares each kernel with its float64 reference, on every backend usable here."""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import trainfast
from trainfast.report import Report, Table
from trainfast.tools._selftest_adamw import ADAMW_DTYPES, check_adamw
from trainfast.tools._selftest_amp import (
    AMP_DTYPES,
    check_amp_grads,
    check_amp_update,
)
from trainfast.tools._selftest_arrays import Array, NumpyArrays, TorchArrays
from trainfast.tools._selftest_attention import (
    ATTENTION_DTYPES,
    check_attention,
    check_attention_backward,
)
from trainfast.tools._selftest_neighbours import NEIGHBOUR_DTYPES, check_neighbours
from trainfast.tools._selftest_trajectory import TRAJECTORY_DTYPES, check_trajectory


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
    print(report.for_terminal(args.json))
    return 0 if report.ok else 1


class Row(NamedTuple):
    """One comparison. `error` is the largest one, in the unit of `allowed`: relative to
    the result (AMP, trajectory), to the sum of an element's magnitudes before and after
    (AdamW), to that of the magnitudes of all that was added up (attention), or to the
    distance (neighbours, where wrong edges are counted, too). `ok` is None if it
    was skipped, for the reason in `note`."""

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

    def text(self, width: int | None = None) -> str:
        failed = sum(row.ok is False for row in self.rows)
        end = "all fine" if self.ok else f"{failed} of {len(self.rows)} FAILED"
        return f"{super().text(width)}\n{end}"

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "rows": [row._asdict() for row in self.rows]}


def selftest(backends: list[str] | None = None) -> SelftestReport:
    """Compares each kernel with a float64 reference on small inputs.

    The backend that was in use before is in use again afterwards.

    Args:
        backends: names of backends to run; None: every usable one. A backend that is
            named but cannot run here counts as failed.

    Returns:
        A report with one row for each kernel and backend; `ok` says whether all passed.
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


# A kernel's dtypes, and what gives the error for one of them and what is allowed.
Check = Callable[[tuple[str, ...], Array], tuple[float, float]]
KERNELS: dict[str, tuple[list[tuple[str, ...]], Check]] = {
    "adamw": (ADAMW_DTYPES, check_adamw),
    "amp_grads": (AMP_DTYPES, check_amp_grads),
    "amp_update": ([("float32",)], check_amp_update),
    "attention": (ATTENTION_DTYPES, check_attention),
    "attention_backward": (ATTENTION_DTYPES, check_attention_backward),
    "neighbours": (NEIGHBOUR_DTYPES, check_neighbours),
    "trajectory": (TRAJECTORY_DTYPES, check_trajectory),
}
