"""The report of a probe."""

from typing import Any

from trainfast.notebook import LINES, cell_name, is_cell, is_notebook, place_name
from trainfast.probe.findings import (
    LEAST,
    Finding,
    Row,
    findings,
    idle_gpus,
    label,
    rows,
    slow_rank,
)
from trainfast.probe.gains import Process, Result, noise
from trainfast.report import Report, Table
from trainfast.roof import roof

NOISY = 1.3  # base blocks that vary by more than this allow no verdict
_SMALL = 1.005  # statements with smaller gains and losses share a line
_MANY_FAULTS = 0.1  # of a step, that page faults take
_COMPUTE_BOUND = 0.5  # of the matrix-product rate: what is left is arithmetic


class Diagnosis(Report):
    """What a probe found.

    Attributes:
        findings: causes worth at least 1.15 times, best first.
        rows: all that was tried.
        facts: of the loop: step_seconds, device, optimizer, workers, ..., and spread,
            the 90 % over the 10 % quantile of blocks without a change.
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
                    "name": r.label,
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
                place_name(f.file, f.line) if f.file and f.line else "",
                f.fix + (" (changes the training)" if f.changes_training else ""),
            )
            for f in self.findings
        ]
        statements = [r for r in self.rows if r.name.startswith("statement ")]
        small = [
            r for r in statements if r.gain.low > 1 / _SMALL and r.gain.high < _SMALL
        ]
        if len(small) < 2:
            small = []
        tried = [
            (r.label, f"{r.gain.gain:.2f}x", f"{r.gain.low:.2f} to {r.gain.high:.2f}")
            for r in self.rows
            if r not in small
        ]
        if small:
            tried.append((f"without one of {len(small)} other statements", "1.00x", ""))
        tables = [
            Table(
                f"What {_name(self.script)} loses",
                ("cause", "mending it", "95 % interval", "place", "how"),
                lines,
                self._without_findings(),
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

    def _without_findings(self) -> str:
        if not self.rows:
            return "no verdict, as nothing could be compared"
        if self.facts["spread"] > NOISY:
            return "no verdict, as steps without a change vary too much"
        return f"no cure that was tried surely gives {LEAST} times the speed"


def _name(script: str) -> str:
    return f"the loop in {cell_name(script)}" if is_cell(script) else script


def conclude(
    script: str, results: list[Result], not_tried: dict[str, str], seconds: float
) -> Diagnosis:
    """The report on what was measured of a script, in one process or more."""
    for result in results:
        failed = result["failed"]
        not_tried |= {label(name, results): why for name, why in failed.items()}
    tried = rows(results)
    found = [
        *findings(tried, results, script),
        *slow_rank(results, script),
        *idle_gpus(results, script),
    ]
    found.sort(key=lambda finding: -finding.gain)
    facts = facts_of(results)
    notes = notes_of(results, facts, bool(found))
    if not is_cell(script):
        notes += _page_faults(facts)
    if found and is_notebook(script):
        notes.append(LINES)
    return Diagnosis(script, found, tried, facts, not_tried, notes, seconds)


def facts_of(results: list[Result]) -> dict[str, Any]:
    names = ["step_seconds", "device", "dtype", "optimizer", "tensors", "parameters"]
    names += ["workers", "batch_size", "dataset", "threads", "fault_seconds"]
    facts = {name: results[0][name] for name in names if name in results[0]}
    facts["spread"] = round(noise([Process.of(result) for result in results]), 3)
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


def _unseen(results: list[Result]) -> list[str]:
    """Says up to where a script was watched, if neither event came until there."""
    runs = [run for result in results for run in result["runs"]]
    seen = {kind for result in results for kind, _, step in result["events"] if step}
    if any(whole for _, _, whole in runs) or seen & {"evaluation", "save"}:
        return []
    most = max(last - first for first, last, _ in runs)
    return [
        f"the first {most} steps were watched, with no evaluation or checkpoint among "
        "them: what a later one costs is not known; make them come earlier to see it"
    ]


def _page_faults(facts: dict[str, Any]) -> list[str]:
    """Says what memory costs that each step gives back to the system.

    The share is a bound: threads get pages at the same time.
    """
    faults = facts.get("fault_seconds", 0.0)
    if faults <= _MANY_FAULTS * facts.get("step_seconds", 0.0):
        return []
    share = min(1.0, faults / facts["step_seconds"])
    return [
        f"up to {share:.0%} of a step go into memory that the step before has given "
        "back to the system: start the script with `trainfast run`, which keeps it"
    ]


def notes_of(results: list[Result], facts: dict[str, Any], found: bool) -> list[str]:
    notes = []
    if not any(result["blocks"] for result in results):
        notes.append(
            f"the script ended after {results[0]['steps']} steps, before anything "
            "could be compared: let it train longer"
        )
    if facts["spread"] > NOISY:
        notes.append(
            f"steps without a change vary by {100 * (facts['spread'] - 1):.0f} %: "
            "another program may be using the machine, or steps differ in work, as "
            "episodes do; gains are less certain than their intervals say"
        )
    notes += _unseen(results)
    if "mfu" in facts and not found:
        flops, roof_rate = facts["flops"] / 1e9, facts["roof_tflops"]
        reached = (
            f"a step does {flops:.3g} GFLOP, at {facts['mfu']:.0%} of the matrix-"
            f"product rate that was measured here ({roof_rate:.3g} TFLOP/s)"
        )
        if facts["mfu"] >= _COMPUTE_BOUND and facts["spread"] <= NOISY:
            reached += (
                ": it is compute-bound, and only less arithmetic helps, as a smaller "
                "model, half precision on a GPU, or a faster device"
            )
        notes.append(reached)
    return notes
