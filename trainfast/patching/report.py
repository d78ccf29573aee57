"""What `patch` and `unpatch` changed: one line, and in full as a table."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from trainfast.patching.places import Place, Target
from trainfast.report import Report, Table


class Change(NamedTuple):
    """One replaced name: `places` were rebound, `left` were not found as `patch` left
    them."""

    name: str
    old: str
    new: str
    places: list[str]
    left: list[str]


class Skipped(NamedTuple):
    """A name that was not replaced, and why."""

    name: str
    old: str
    reason: str


class PatchReport(Report):
    """What one call of `patch` or `unpatch` changed, in `changes`, and what `patch` had
    to leave out, in `skipped`."""

    def __init__(self, action: str) -> None:
        self.action = action
        self.changes: list[Change] = []
        self.skipped: list[Skipped] = []
        self.notes: list[str] = []  # what stays torch's on this machine, and why

    def add(
        self,
        name: str,
        target: Target,
        places: Sequence[Place | str],
        left: Iterable[Place | str] = (),
    ) -> None:
        changed, kept = ([str(place) for place in some] for some in (places, left))
        self.changes.append(Change(name, target.old, target.new, changed, kept))

    def text(self, width: int | None = None) -> str:
        """One line: what changed, and what did not."""
        names = dict.fromkeys(change.name for change in self.changes)
        n = sum(len(change.places) for change in self.changes)
        parts = [f"{self.action} {', '.join(names)} ({n} place{'s' * (n != 1)})"]
        if not n:
            parts[0] = f"{self.action} nothing"
            if names:
                parts[0] += f": {', '.join(names)} was done before"
        parts += [f"{place} left alone" for c in self.changes for place in c.left]
        parts += [f"{each.old} skipped: {each.reason}" for each in self.skipped]
        return "; ".join(parts + self.notes)

    def _repr_html_(self) -> str:
        from html import escape

        return f"<p>{escape(str(self))}</p>"

    def table(self) -> Report:
        """Every name that was replaced, and where; print it."""
        return PatchTable(self)

    def tables(self) -> list[Table]:
        columns = ("name", "old", "new", "modules touched")
        rows: list[tuple[Any, ...]] = []
        for change in self.changes:
            first, *others = change.places or ["none"]
            rows.append((change.name, change.old, change.new, first))
            rows += [("", "", "", other) for other in others]
        kept = [(c.name, place) for c in self.changes for place in c.left]
        tables = [Table(self.action, columns, rows, empty="nothing")]
        if kept:
            title = "left alone, because they have been bound to something else since"
            tables.append(Table(title, ("name", "place"), kept))
        if self.skipped:
            title = "skipped, because this version does not have them"
            tables.append(Table(title, Skipped._fields, list[Any](self.skipped)))
        return tables

    def to_dict(self) -> dict[str, Any]:
        changes = [change._asdict() for change in self.changes]
        skipped = [each._asdict() for each in self.skipped]
        return {
            "action": self.action,
            "changes": changes,
            "skipped": skipped,
            "notes": self.notes,
        }


class PatchTable(Report):
    """A report of `patch` or `unpatch` in full."""

    def __init__(self, report: PatchReport) -> None:
        self.report = report

    def tables(self) -> list[Table]:
        return self.report.tables()

    def to_dict(self) -> dict[str, Any]:
        return self.report.to_dict()
