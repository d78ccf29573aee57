"""What `trainfast bench` prints: rates, rows, and the comparison with an older run."""

import math
import statistics
from typing import Any, NamedTuple

from trainfast.bench.cases import TRAINING
from trainfast.bench.data_sheets import peaks
from trainfast.bench.intervals import beside, changed, faster, verdict
from trainfast.bench.results import Results, Timing
from trainfast.probe.gains import Gain
from trainfast.report import Report, Table

_BUSY = 0.05  # share of the cores
_OTHER_RATE = 1.1  # of two copy rates: on one occasion the machine was busier
_UNITS = {"copy": "GB/s", "update": "GB/s"}
_JUDGED = ("gain", "95 % interval", "verdict")


class Row(NamedTuple):
    """One of ours beside one rival; `gain` is how many times as fast ours is.

    of_roof: the share of the measured rate that bounds it (for training steps this is
    the MFU). of_data_sheet: the share of the rate that the GPU's maker publishes.
    """

    case: str
    device: str
    contender: str
    seconds: float
    rival: str
    rival_seconds: float
    gain: Gain
    verdict: str
    of_roof: float | None
    of_data_sheet: float | None


class Change(NamedTuple):
    """One of ours now and in the base; `gain` is how many times as fast it is now, and
    `rivals` how many times as fast its rivals are, which tells of the machine."""

    case: str
    device: str
    contender: str
    base_seconds: float
    seconds: float
    gain: Gain
    verdict: str
    rivals: float | None


class BenchReport(Report):
    """What was measured in `results`, and with a base what changed since.

    Attributes:
        rows: each contender of ours beside each of its rivals.
        changes: each contender of ours now and in the base.
        ok: no case failed, and nothing is slower than in the base.
    """

    def __init__(self, results: Results, base: Results | None = None) -> None:
        self.results = results
        self.base = base
        self.rows = [r for timing in results.timings for r in _rows(results, timing)]
        self.changes = _changes(results, base) if base else []
        slower = any(change.verdict == "SLOWER" for change in self.changes)
        self.ok = not (results.failed or slower)

    def to_dict(self) -> dict[str, Any]:
        rows, changes = (
            [row._asdict() | {"gain": _ends(row.gain)} for row in rows]
            for rows in (self.rows, self.changes)
        )
        return {
            "ok": self.ok,
            "results": self.results.to_dict(),
            "rows": rows,
            "changes": changes,
            "notes": self.notes(),
        }

    def tables(self) -> list[Table]:
        found = []
        for device, rates in self.results.roofs.items():
            gpu = _gpu(self.results, device)
            sheet = peaks(gpu)
            cells = [
                (name, rate, _UNITS.get(name, "TFLOP/s"), sheet.get(name))
                for name, rate in rates.items()
            ]
            title = f"Roof of {device}: {gpu or self.results.machine['cpu']}"
            columns = ("rate", "measured", "unit", "data sheet")
            found += [_table(title, columns, cells)]
            found += [self._kernels(device), self._training(device)]
        found = [table for table in found if table.rows]
        return found + ([self._comparison()] if self.base else [])

    def _kernels(self, device: str) -> Table:
        columns = (
            "case",
            "ms",
            "rival",
            "its ms",
            *_JUDGED,
            "of roof",
            "of data sheet",
        )
        cells = [
            (
                *(row.case, _ms(row.seconds), row.rival, _ms(row.rival_seconds)),
                *(*_judged(row), _percent(row.of_roof), _percent(row.of_data_sheet)),
            )
            for row in self.rows
            if row.device == device and not row.case.startswith(TRAINING)
        ]
        title = (
            f"trainfast and its rivals on {device}, {self.results.processes} processes"
        )
        return _table(title, columns, cells)

    def _training(self, device: str) -> Table:
        cells: list[tuple[Any, ...]] = []
        for timing in self.results.timings:
            if timing.device != device or not timing.name.startswith(TRAINING):
                continue
            rows = [row for row in self.rows if (row.case, row.device) == timing.key]
            judged = {row.contender: _judged(row) for row in rows}
            for who in timing.times:
                seconds = timing.seconds(who)
                shares = map(_percent, _shares(self.results, timing, seconds))
                gains = judged.get(who, (None, None, None))
                cells.append((timing.name, who, 1 / seconds, *gains, *shares))
        columns = ("case", "with", "it/s", *_JUDGED, "MFU", "MFU by data sheet")
        return _table(f"Training steps on {device}", columns, cells)

    def _comparison(self) -> Table:
        columns = ("case", "with", "base ms", "ms", *_JUDGED, "rivals")
        cells = [
            (
                *(f"{c.case} ({c.device})", c.contender),
                *(_ms(c.base_seconds), _ms(c.seconds), *_judged(c)),
                None if c.rivals is None else f"{c.rivals:.2f}x",
            )
            for c in self.changes
        ]
        return _table("Changes since the base", columns, cells)

    def notes(self) -> list[str]:
        """What a reader must know to judge the numbers."""
        results = self.results
        notes = [
            f"{row.case} on {row.device}: {row.rival} is faster"
            for row in self.rows
            if row.verdict == "SLOWER"
        ]
        notes += [f"{what} did not run: {why}" for what, why in results.missing.items()]
        notes += [f"{what} FAILED: {why}" for what, why in results.failed.items()]
        for timing in results.timings:
            for who, why in timing.skipped.items():
                notes.append(f"{timing.name}: {who} did not run: {why}")
        if results.left_out:
            whole = results.processes * len(results.timings)
            notes.append(
                f"{results.left_out} of {whole} measurements are left out: other "
                "programs used more than 10% of the cores meanwhile"
            )
        if results.processes == 1:
            notes.append("one process has no interval: use --processes 2 or more")
        if (results.others_share or 0) > _BUSY:
            notes.append(
                f"other programs used {results.others_share:.0%} of the cores: measure "
                "on an idle machine, or with more --processes"
            )
        return notes + (_differences(results, self.base) if self.base else [])

    def text(self, width: int | None = None) -> str:
        notes = [f"* {note}" for note in self.notes()]
        return "\n".join([super().text(width), *([""] if notes else []), *notes])


# ---- Rows ----------------------------------------------------------------------------


def _rows(results: Results, timing: Timing) -> list[Row]:
    rows = []
    for who in timing.contenders("ours"):
        seconds = timing.seconds(who)
        shares = _shares(results, timing, seconds)
        for rival in timing.contenders("rival"):
            gain = faster(timing.times[rival], timing.times[who])
            times = (who, seconds, rival, timing.seconds(rival))
            rows.append(Row(*timing.key, *times, gain, verdict(gain), *shares))
    return rows


def _shares(
    results: Results, timing: Timing, seconds: float
) -> tuple[float | None, float | None]:
    """The shares of the measured rate, and of the data sheet's."""
    measured = results.roofs.get(timing.device, {})
    if timing.flops:
        reached, rate = timing.flops / seconds / 1e12, measured.get(timing.dtype)
        sheet = peaks(_gpu(results, timing.device)).get(timing.dtype)
        return reached / rate if rate else None, reached / sheet if sheet else None
    reached = timing.nbytes / seconds / 1e9
    rate = max(measured.get(name, 0.0) for name in _UNITS)
    return reached / rate if reached and rate else None, None


def _changes(results: Results, base: Results) -> list[Change]:
    before = {timing.key: timing for timing in base.timings}
    changes = []
    for timing in (t for t in results.timings if t.key in before):
        old = before[timing.key]
        both = [who for who in timing.times if who in old.times]
        gains = {who: changed(old.times[who], timing.times[who]) for who in both}
        rivals = [who for who in both if timing.roles[who] == "rival"]
        control = None
        if rivals:
            control = statistics.geometric_mean(gains[who].gain for who in rivals)
        for who in (who for who in both if timing.roles[who] == "ours"):
            times, gain = (old.seconds(who), timing.seconds(who)), gains[who]
            says = verdict(gain)
            if rivals and says in ("FASTER", "SLOWER"):
                sides = (beside(each.times, who, rivals) for each in (old, timing))
                if verdict(changed(*sides)) != says:  # the rivals changed as much
                    says = "UNDECIDED"
            changes.append(Change(*timing.key, who, *times, gain, says, control))
    return changes


def _differences(results: Results, base: Results) -> list[str]:
    """Why the base may be another machine's, or from a busier time."""

    def facts(of: Results) -> dict[str, Any]:
        return {**of.machine, **of.versions, "threads": of.threads}

    old, new = facts(base), facts(results)
    differ = [
        f"{name} {old.get(name)} there, {new[name]} here"
        for name in new
        if old.get(name) != new[name] and name != "trainfast"
    ]
    notes = []
    if differ:
        notes.append(f"the base is of another machine or setup: {'; '.join(differ)}")
    for device, rates in results.roofs.items():
        then, now = base.roofs.get(device, {}).get("copy"), rates.get("copy")
        if then and now and max(then / now, now / then) > _OTHER_RATE:
            notes.append(
                f"{device} copied {then:.3g} GB/s then and {now:.3g} now: the machine "
                "was not equally busy, so changes may be its own"
            )
    return notes


# ---- Cells ---------------------------------------------------------------------------


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Table:
    """Without the columns that are empty in all rows."""
    kept = [i for i in range(len(columns)) if any(row[i] is not None for row in rows)]
    cells = [tuple(row[i] for i in kept) for row in rows]
    return Table(title, tuple(columns[i] for i in kept), cells, "nothing in common")


def _judged(row: Row | Change) -> tuple[str, str | None, str]:
    gain = row.gain
    ends = None if math.isinf(gain.high) else f"{gain.low:.2f} to {gain.high:.2f}"
    return f"{gain.gain:.2f}x", ends, row.verdict


def _ends(gain: Gain) -> dict[str, float | None]:
    """For JSON, which has no infinity."""
    known = not math.isinf(gain.high)
    low, high = (gain.low, gain.high) if known else (None, None)
    return {"gain": gain.gain, "low": low, "high": high}


def _ms(seconds: float) -> float:
    return seconds * 1e3


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.0%}"


def _gpu(results: Results, device: str) -> str | None:
    gpu: str | None = results.machine["gpu"] if device == "cuda" else None
    return gpu
