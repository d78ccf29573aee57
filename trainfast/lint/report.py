"""What `trainfast lint` finds, and how it prints."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainfast.lint.hints import HINTS
from trainfast.lint.loops import Script
from trainfast.lint.rules import RULES
from trainfast.notebook import LINES, is_notebook, read_script
from trainfast.report import Report, Table

_IGNORE = re.compile(r"#\s*trainfast:\s*ignore(?:\s*=\s*([\w-]+(?:\s*,\s*[\w-]+)*))?")


@dataclass
class Finding:
    """A fault.

    Attributes:
        id: the rule's.
        path: of the script.
        line: counted from 1.
        why: what it does to the training.
        code: the line as it is.
        mended: as it could be.
        hint: a matter of speed, not of what is learnt.
    """

    id: str
    path: str
    line: int
    why: str
    code: str
    mended: str
    hint: bool = False

    def __str__(self) -> str:
        return (
            f"{self.path}:{self.line}: {self.id}: {self.why}\n"
            f"    {self.code}\n"
            f"  + {self.mended}"
        )


@dataclass(repr=False)
class LintReport(Report):
    """Findings of one or more scripts, by line.

    Attributes:
        findings: what was found.
        files: how many scripts were read.
        skipped: those in folders that are no Python, and why.
    """

    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def text(self, width: int | None = None) -> str:
        scripts = f"{self.files} script{'s' * (self.files != 1)}"
        end = f"No fault found in {scripts}."
        if self.findings:
            end = f"{len(self.findings)} in {scripts}"
        notes = [f"Skipped {path}: {why}" for path, why in self.skipped]
        if any(is_notebook(finding.path) for finding in self.findings):
            notes.append(LINES)
        return "\n\n".join([*map(str, self.findings), end, *notes])

    def to_dict(self) -> dict[str, Any]:
        return {
            "files": self.files,
            "findings": [vars(f) for f in self.findings],
            "skipped": [{"path": path, "why": why} for path, why in self.skipped],
        }

    def tables(self) -> list[Table]:
        rows: list[tuple[Any, ...]] = [
            (f"{f.path}:{f.line}", f.id, f.why, f.code, f.mended) for f in self.findings
        ]
        return [Table("Faults", ("where", "rule", "why", "line", "mended"), rows)]


def lint(source: str, path: str = "<script>", *, hints: bool = False) -> list[Finding]:
    """Reads a script.

    Args:
        source: its text.
        path: its name, for the findings.
        hints: also tells what only slows the loop.

    Returns:
        The findings by line, without those that a comment
        `# trainfast: ignore=ID` on their line, or on the one before, leaves out.

    Raises:
        SyntaxError: the text is no Python.
    """
    script = Script(source, path)
    found = []
    for rule in [*RULES, *(HINTS if hints else [])]:
        seen = set()
        for node, mended in rule.check(script):
            line = getattr(node, "lineno", 1)
            if line in seen or _is_ignored(script, line, rule.id):
                continue
            seen.add(line)
            code = script.lines[line - 1].strip()
            mended = mended.splitlines()[0]
            found.append(
                Finding(rule.id, path, line, rule.why, code, mended, rule in HINTS)
            )
    return sorted(found, key=lambda finding: finding.line)


def lint_files(paths: list[Path], *, hints: bool = False) -> LintReport:
    """Reads scripts and notebooks, and all in folders.

    Raises:
        OSError: a file cannot be read.
        RecursionError, SyntaxError, ValueError: one of `paths` is no Python; such files
            in folders are skipped.
    """
    report = LintReport()
    for path in paths:
        for file in _in_folder(path) if path.is_dir() else [path]:
            try:
                report.findings += lint(read_script(file), str(file), hints=hints)
            except (RecursionError, SyntaxError, ValueError) as error:
                if file is path:
                    raise
                report.skipped.append((str(file), str(error)))
            else:
                report.files += 1
    return report


def _in_folder(path: Path) -> list[Path]:
    files = [file for ending in ("*.py", "*.ipynb") for file in path.rglob(ending)]
    return sorted(file for file in files if ".ipynb_checkpoints" not in file.parts)


def _is_ignored(script: Script, line: int, rule: str) -> bool:
    for text in script.lines[max(0, line - 2) : line]:
        found = _IGNORE.search(text)
        if found is None:
            continue
        alone = text.strip().startswith("#")
        if text is not script.lines[line - 1] and not alone:
            continue
        if found[1] is None or rule in re.split(r"\s*,\s*", found[1]):
            return True
    return False
