"""The report of `check`, which runs nothing."""

import os
import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import trainfast
from trainfast.diagnosis import facts, scripts, settings
from trainfast.diagnosis.checklist import State, states
from trainfast.diagnosis.rules import RULES
from trainfast.diagnosis.rules.machine import MINIMUM, RECOMMENDED, below, resources
from trainfast.diagnosis.rules.rule import Case, Finding, findings
from trainfast.report import Report, Table


class CheckReport(Report):
    """What is wrong with a machine and a configuration.

    Attributes:
        findings: what the rules found, each with evidence and cure.
        machine: the facts about the machine.
        checklist: the guides' steps and their states, if they were asked for.
    """

    def __init__(self, case: Case, checklist: bool = False) -> None:
        self.machine = case.machine
        self.findings: list[Finding] = findings(RULES, case)
        self.checklist: list[State] = states(case, self.findings) if checklist else []

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "findings": [finding._asdict() for finding in self.findings],
            "machine": asdict(self.machine),
            "profiles": _records(self._profiles()),
            "works": _records(self._works()),
        }
        if self.checklist:
            found["checklist"] = [state._asdict() for state in self.checklist]
        return found

    def tables(self) -> list[Table]:
        columns = ("finding", "evidence", "cure", "guide row")
        rows: list[tuple[Any, ...]] = [f[:4] for f in self.findings]
        found = Table("Findings", columns, rows, f"none of {len(RULES)} rules applies")
        return [found, *self._rest()]

    def text(self, width: int | None = None) -> str:
        """Findings as paragraphs: a table of sentences is too wide for a terminal."""
        if not self.findings:
            parts = [self.tables()[0].text(width)]
        else:
            parts = ["Findings", *map(_paragraph, self.findings)]
        rest = [table.text(width) for table in self._rest()]
        return "\n\n".join([*parts, *rest])

    def _rest(self) -> list[Table]:
        tables = [self._machine(), self._profiles(), self._works()]
        if self.checklist:
            columns = ("when", "step", "state", "how", "guide row")
            tables.append(Table("Checklist", columns, list(self.checklist)))
        return tables

    def _machine(self) -> Table:
        machine = self.machine
        cores = f"{machine.usable_cores} usable of {machine.cores}"
        cuda = (
            f" for CUDA {machine.torch_cuda}" if machine.torch_cuda else ", CPU build"
        )
        rows: list[tuple[Any, ...]] = [
            ("trainfast", trainfast.__version__),
            ("torch", f"{machine.torch}{cuda}" if machine.torch else "not installed"),
            ("python", machine.python),
            ("system", machine.system),
            ("processor", f"{machine.processor}, {cores} cores"),
        ]
        rows += [
            ("GPU", f"{gpu}, {gpu.memory} MiB, driver {gpu.driver or 'unknown'}")
            for gpu in machine.gpus
        ] or [("GPU", "none (nvidia-smi lists none)")]
        rows += machine.variables.items()
        return Table("Machine", ("what", "value"), rows)

    def _profiles(self) -> Table:
        rows = []
        for name, have in resources(Case(self.machine)).items():
            least, good = MINIMUM[name], RECOMMENDED[name]
            verdict = "recommended"
            if have is None:
                verdict = "not known" if name != "GPU memory" else "no GPU"
            elif below(have, least, name):
                verdict = "below minimum"
            elif below(have, good, name):
                verdict = "minimum"
            shown = None if have is None else round(have, 1)
            rows.append((name, shown, least, good, verdict))
        columns = ("resource", "here", "minimum", "recommended", "verdict")
        return Table("Against the guide's profiles (GB, cores)", columns, rows)

    def _works(self) -> Table:
        """What runs here, by the GPU's compute capability and the backends."""
        rows = []
        for backend in self.machine.backends:
            if backend["usable"] or backend["name"] == "cuda":
                name = f"trainfast's {backend['name']} kernels"
                rows.append((name, backend["usable"], backend["reason"] or ""))
        bare = Case(self.machine)
        gpu = bare.gpu
        for what, lowest, otherwise in _CAPABILITIES if gpu else ():
            known = gpu is not None and gpu.capability is not None
            can = known and not bare.older_than(*lowest)
            note = "" if can else otherwise if known else "capability not known"
            rows.append((what, can, note))
        return Table("What works here", ("what", "works", "otherwise"), rows)


# What needs which compute capability, and what happens without it.
_CAPABILITIES = (
    ("float16 on tensor cores", (7, 0), "float16 saves memory and gains little speed"),
    ("torch.compile", (7, 0), "Triton refuses this GPU"),
    ("trainfast's attention", (7, 5), "torch's kernels run"),
    ("torch's flash attention", (8, 0), "torch takes another kernel; see patch()"),
    ("TF32", (8, 0), "the setting has no effect"),
    ("bfloat16", (8, 0), "emulated: slow, although is_bf16_supported() is true"),
)


def check(
    config: str | os.PathLike[str] | dict[str, Any] | None = None,
    *,
    sources: Iterable[str | os.PathLike[str]] = (),
    checklist: bool = False,
    machine: facts.Machine | None = None,
) -> CheckReport:
    """Compares this machine, and a configuration, with what slows training.

    Nothing is run. In a notebook the state of its own process is looked at, too.
    `python -m trainfast diagnose --probe train.py` runs a script and measures.

    Args:
        config: a YAML file, or what it would hold.
        sources: scripts to read for deprecated and mixed calls; they do not run.
        checklist: also give the guides' checklists and decision trees.
        machine: facts of another machine in place of this one's.

    Raises:
        ImportError: `config` is a file and PyYAML is not installed.
        OSError: a file cannot be read.
        ValueError: `config` is not a table of settings, or a source is not text.
        SyntaxError: a source is not Python.
    """
    if config is None or isinstance(config, dict):
        chosen = settings.Settings(config or {})
    else:
        chosen = settings.of_file(config)
    read = tuple(scripts.read(path) for path in sources)
    described = machine or facts.gather(chosen.folder)
    return CheckReport(Case(described, chosen, read), checklist)


def _records(table: Table) -> list[dict[str, Any]]:
    return [dict(zip(table.columns, row)) for row in table.rows]


def _paragraph(finding: Finding) -> str:
    rows = finding.rows.split()
    guide = f"guide row{'s' * (len(rows) > 1)} {', '.join(rows)}; " if rows else ""
    lines = (
        f"{finding.id}: {finding.evidence}",
        f"  cure: {finding.cure}",
        f"  source: {guide}{finding.source}",
    )
    return "\n".join(textwrap.fill(x, 88, subsequent_indent="    ") for x in lines)
