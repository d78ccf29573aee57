"""A rule, the case that it judges, and the finding that it makes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from trainfast.diagnosis.facts import Gpu, Machine
from trainfast.diagnosis.scripts import Script
from trainfast.diagnosis.settings import Settings


@dataclass(frozen=True)
class Case:
    """All facts: the machine, the configuration, and scripts that were read."""

    machine: Machine
    settings: Settings = field(default_factory=Settings)
    scripts: tuple[Script, ...] = ()

    @property
    def gpu(self) -> Gpu | None:
        """The GPU for training: the first, or none if the configuration wants none."""
        device = self.settings.find("device")
        other = device is not None and str(device.value).startswith(("cpu", "mps"))
        return None if other or not self.machine.gpus else self.machine.gpus[0]

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables: of the process, the configuration, the scripts."""
        merged = self.machine.variables | self.settings.variables()
        for script in self.scripts:
            merged |= script.variables
        return merged

    def older_than(self, major: int, minor: int = 0) -> Gpu | None:
        """The first GPU if its compute capability is lower."""
        gpu = self.gpu
        if gpu and gpu.capability and gpu.capability < (major, minor):
            return gpu
        return None


class Rule(NamedTuple):
    """What can be wrong.

    Attributes:
        id: its name.
        check: a pure function that returns the evidence, or None if all is well.
        cure: what to do about it.
        rows: rows of the guides (docs/guides) that it comes from; "" if from none.
        source: what establishes the rule: documentation, source, or an issue.
    """

    id: str
    check: Callable[[Case], str | None]
    cure: str
    rows: str
    source: str


class Finding(NamedTuple):
    """A rule that applies, with its evidence."""

    id: str
    evidence: str
    cure: str
    rows: str
    source: str


def findings(rules: Iterable[Rule], case: Case) -> list[Finding]:
    """What the rules find, in their order."""
    found = []
    for rule in rules:
        evidence = rule.check(case)
        if evidence:
            found.append(Finding(rule.id, evidence, rule.cure, rule.rows, rule.source))
    return found
