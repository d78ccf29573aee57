"""The stages of a diagnosis: cheap switches first, then what they leave open."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from trainfast.probe import run
from trainfast.probe.findings import LEAST, Finding, Row, findings, rows
from trainfast.probe.gains import Process, Result, noise
from trainfast.report import Report, Table
from trainfast.tools.roof import roof

_LADDER = ("workers 0", "workers 1", "workers 2", "workers 4")
_NOISY = 1.3  # base blocks that vary by more than this allow no verdict
_COMPUTE_BOUND = 0.5  # of the matrix-product rate: what is left is arithmetic
_OPEN = 1.10  # a gain from which on a row needs a second process


class Diagnosis(Report):
    """What a probe found.

    Attributes:
        findings: causes worth at least 1.15 times, best first.
        rows: all that was tried.
        facts: of the loop: step_seconds, device, optimizer, workers, ...
        not_tried: why a switch was left out, by switch.
        notes: what to know before believing the findings.
        seconds: how long the probe took.
    """

    def __init__(
        self,
        script: str,
        found: list[Finding],
        tried: list[Row],
        facts: dict[str, Any],
        not_tried: dict[str, str],
        notes: list[str],
        seconds: float,
    ) -> None:
        self.script = script
        self.findings = found
        self.rows = tried
        self.facts = facts
        self.not_tried = not_tried
        self.notes = notes
        self.seconds = seconds

    def to_dict(self) -> dict[str, Any]:
        return {
            "script": self.script,
            "findings": [finding.to_dict() for finding in self.findings],
            "tried": [
                {
                    "name": r.name,
                    "gain": r.gain.gain,
                    "low": r.gain.low,
                    "high": r.gain.high,
                }
                for r in self.rows
            ],
            "facts": self.facts,
            "not_tried": self.not_tried,
            "notes": self.notes,
            "seconds": round(self.seconds, 1),
        }

    def tables(self) -> list[Table]:
        lines = [
            (
                f.id,
                f"{'gives' if f.exact else 'at most'} {f.gain:.2f}x",
                f"{f.low:.2f} to {f.high:.2f}",
                f"{f.file}:{f.line}" if f.file and f.line else "",
                f.fix + (" (changes the training)" if f.changes_training else ""),
            )
            for f in self.findings
        ]
        tried = [
            (r.label, f"{r.gain.gain:.2f}x", f"{r.gain.low:.2f} to {r.gain.high:.2f}")
            for r in self.rows
        ]
        tables = [
            Table(
                f"What {self.script} loses",
                ("cause", "mending it", "95 % interval", "place", "how"),
                lines,
                f"nothing that was tried gives {LEAST} times the speed",
            ),
            Table("What was tried", ("switch", "gain", "95 % interval"), tried),
        ]
        if self.not_tried:
            tables.append(
                Table("Not tried", ("switch", "why"), list(self.not_tried.items()))
            )
        if self.notes:
            tables.append(Table("Notes", ("",), [(note,) for note in self.notes]))
        return tables


def diagnose(
    script: str,
    arguments: Sequence[str] = (),
    *,
    deep: bool = False,
    progress: Callable[[str], None] = lambda stage: None,
) -> Diagnosis:
    """Runs a training script with one thing changed at a time, and names what it gains.

    The script runs several times in a sandbox and is not changed. It should train for
    at least some seconds.

    Args:
        script: path of the script.
        arguments: the script's own.
        deep: also try what takes minutes.
        progress: called with the name of each stage.

    Raises:
        ProbeError: the script failed, or shows no training loop.
    """
    began = time.perf_counter()
    progress("first process")
    first = run.child(script, arguments, seed=0)
    places = {"stack": first["stack"], "work": first["work"]}
    progress("second process, with a stopwatch at each statement")
    results = [first]
    results.append(run.child(script, arguments, seed=1, **places))
    not_tried: dict[str, str] = {}

    def more(
        names: list[str], stage: str, statements: bool = False, **extra: Any
    ) -> None:
        progress(stage)
        extra |= {"switches": names, "seconds": run.SECONDS / 2}
        if statements:
            extra |= places
        try:
            result = run.child(script, arguments, seed=len(results), **extra)
        except run.ProbeError as error:
            not_tried[", ".join(names)] = str(error)
        else:
            results.append(result)

    by_name = {row.name: row.gain for row in rows(results)}
    if "data" in by_name and by_name["data"].gain >= LEAST:
        more(list(_LADDER), "numbers of workers")
    if first.get("dtype") == "float64":
        more(["dtype"], "float32")
    if deep or not findings(rows(results), results, script):
        more(["data", "batch"], "a doubled batch", flops=True)
    if deep or first.get("device", "cpu") != "cpu":
        more(["bfloat16", "float16"], "half precision")
    if deep:
        more(["compile"], "torch.compile")
    again = _undecided(results)
    if again:
        plain = [n for n in again if not n.startswith("statement ")]
        more(plain, "once more, what is undecided", statements=plain != again)
    for result in results:
        not_tried |= result["failed"]
    tried = rows(results)
    found = findings(tried, results, script)
    facts = _facts(results)
    return Diagnosis(
        script,
        found,
        tried,
        facts,
        not_tried,
        _notes(results, facts, bool(found)),
        time.perf_counter() - began,
    )


def _undecided(results: list[Result]) -> list[str]:
    """Rows that matter and were measured in one process only, or not sharply."""
    open_ones = []
    processes = [Process.of(result) for result in results]
    for row in rows(results):
        measured = sum(any(row.name in r for r in p.rounds) for p in processes)
        vague = row.gain.gain >= LEAST > row.gain.low
        if measured and row.gain.gain >= _OPEN and (measured < 2 or vague):
            open_ones.append(row.name)
    return open_ones


def _facts(results: list[Result]) -> dict[str, Any]:
    names = ["step_seconds", "device", "dtype", "optimizer", "tensors", "parameters"]
    names += ["workers", "batch_size", "dataset", "threads"]
    facts = {name: results[0][name] for name in names if name in results[0]}
    counted = next((r for r in results if r.get("flops")), None)
    if counted is not None:
        facts |= _use_of_roof(counted)
    return facts


def _use_of_roof(result: Result) -> dict[str, Any]:
    """What part of the device's measured matrix-product rate a step reaches (MFU)."""
    device, dtype = result.get("device", "cpu"), result.get("dtype", "float32")
    try:
        rate = roof(device).matmul[dtype]
    except (KeyError, ValueError, RuntimeError):  # no such rate on this device
        return {}
    reached = result["flops"] / result["step_seconds"] / 1e12
    return {"flops": result["flops"], "roof_tflops": rate, "mfu": reached / rate}


def _notes(results: list[Result], facts: dict[str, Any], found: bool) -> list[str]:
    notes = []
    spread = noise([Process.of(result) for result in results])
    if spread > _NOISY:
        notes.append(
            f"steps without a change vary by {100 * (spread - 1):.0f} %: another "
            "program may be using the machine"
        )
    if "mfu" in facts and not found:
        flops, roof_rate = facts["flops"] / 1e9, facts["roof_tflops"]
        reached = (
            f"a step does {flops:.3g} GFLOP, at {facts['mfu']:.0%} of the matrix-"
            f"product rate that was measured here ({roof_rate:.3g} TFLOP/s)"
        )
        if facts["mfu"] >= _COMPUTE_BOUND:
            reached += (
                ": it is compute-bound, and only less arithmetic helps, as a smaller "
                "model, half precision on a GPU, or a faster device"
            )
        notes.append(reached)
    return notes
