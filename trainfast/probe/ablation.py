"""The report of `optimize`: what each setting gains alone, and together."""

import math
from dataclasses import dataclass
from typing import Any

from trainfast.presets.values import Value
from trainfast.probe.candidates import Candidate
from trainfast.probe.gains import Gain, Result
from trainfast.probe.report import NOISY, facts_of, notes_of
from trainfast.report import Report, Table


@dataclass
class Line:
    """A setting that was tried.

    Attributes:
        candidate: what it is.
        alone: its gain over the unchanged script; of settings that were not measured
            anew, in the process that chose among them.
        together: the gain of this setting with all kept ones before it, in processes
            that had no part in the choice; None: not kept.
        verdict: why it was not kept.
    """

    candidate: Candidate
    alone: Gain | None
    together: Gain | None
    verdict: str


class Ablation(Report):
    """What each setting gains on a script.

    Attributes:
        lines: the kept settings in the order in which they were added, then the others.
        gain: of all kept settings together; None where nothing was kept.
        not_tried: why a setting could not be tried, by its name.
        curves: losses by run: "seed 0" to "seed 2", and "settings".
        notes: what to know before believing the rest.
        facts: of the training loop.
        seconds: how long it took.
    """

    def __init__(
        self,
        script: str,
        lines: list[Line],
        results: list[Result],
        not_tried: dict[str, str],
        curves: dict[str, list[float]],
        notes: list[str],
        seconds: float,
    ) -> None:
        self.script = script
        self.lines = lines
        self.kept = [line for line in lines if line.together is not None]
        self.gain = self.kept[-1].together if self.kept else None
        self.facts = facts_of(results)
        self.not_tried = not_tried
        self.curves = curves
        self.notes = [
            *notes_of(results, self.facts, bool(self.kept)),
            *self._interactions(),
            *notes,
        ]
        self.seconds = seconds

    def _outcome(self) -> str:
        if self.gain:
            return f"{self.gain.gain:.2f}x"
        if self.facts["spread"] > NOISY:
            return "no verdict, as steps without a change vary too much"
        return "nothing gains"

    def _interactions(self) -> list[str]:
        if len(self.kept) < 2 or self.gain is None:
            return []
        product = math.prod(line.alone.gain for line in self.kept if line.alone)
        return [
            f"together {self.gain.gain:.2f}x; the product of the single gains is "
            f"{product:.2f}x"
        ]

    def values(self) -> list[Value]:
        """The settings that were kept, for a configuration, each with its gain."""
        patches = [line for line in self.kept if line.candidate.patch]
        names = [str(line.candidate.patch) for line in patches]
        reason = "; ".join(f"{line.candidate.patch} {_of(line)}" for line in patches)
        found = [
            Value("patch", names, reason, measured=True)
            if patches
            else Value("patch", False, "no kernel of trainfast helps", measured=True)
        ]
        for line in self.kept:
            for key, value in line.candidate.settings:
                reason = f"{line.candidate.name} {_of(line)}"
                found.append(Value(key, value, reason, measured=True))
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "script": self.script,
            "gain": _numbers(self.gain),
            "settings": [
                {
                    "name": line.candidate.name,
                    "owner": line.candidate.owner,
                    "kept": line.together is not None,
                    "alone": _numbers(line.alone),
                    "together": _numbers(line.together),
                    "verdict": line.verdict,
                    "changes_training": line.candidate.changes,
                }
                for line in self.lines
            ],
            "config": {value.key: value.value for value in self.values()},
            "not_tried": self.not_tried,
            "curves": self.curves,
            "facts": self.facts,
            "notes": self.notes,
            "seconds": round(self.seconds, 1),
        }

    def tables(self) -> list[Table]:
        rows = [
            (
                line.candidate.name,
                line.candidate.owner,
                *_cells(line.alone),
                *_cells(line.together),
                line.verdict or "kept",
            )
            for line in self.lines
        ]
        columns = ("setting", "from", "alone", "95 % interval", "together")
        tables = [
            Table(
                f"What settings give {self.script}: {self._outcome()}",
                (*columns, "95 % interval", "verdict"),
                rows,
                "none applies to this script",
            )
        ]
        if self.not_tried:
            rows = list(self.not_tried.items())  # type: ignore[arg-type]
            tables.append(Table("Failed", ("setting", "error"), rows))
        if self.notes:
            tables.append(Table("Notes", ("",), [(note,) for note in self.notes]))
        return tables

    def plot(self, path: str) -> None:
        """Draws the losses of the runs over each other. Needs matplotlib.

        Args:
            path: the picture's, such as losses.png.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        for name, losses in self.curves.items():
            style = "--" if name == "settings" else "-"  # lies upon that of seed 0
            axes.plot(range(1, len(losses) + 1), losses, style, label=name)
        axes.set(xlabel="optimizer step", ylabel="loss", title=self.script)
        axes.legend()
        figure.savefig(path, dpi=120)


def _of(line: Line) -> str:
    assert line.alone is not None
    return f"{line.alone.gain:.2f}x ({line.alone.low:.2f} to {line.alone.high:.2f})"


def _numbers(gain: Gain | None) -> dict[str, float] | None:
    if gain is None:
        return None
    return {name: round(value, 3) for name, value in vars(gain).items()}


def _cells(gain: Gain | None) -> tuple[str, str]:
    if gain is None:
        return "", ""
    return f"{gain.gain:.2f}x", f"{gain.low:.2f} to {gain.high:.2f}"
