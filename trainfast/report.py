"""What objects say about themselves.

`Report` is text for a terminal, HTML for a notebook, and JSON. `one_line` is the repr
of objects that have settings.
"""

import sys
from collections.abc import Iterable
from os import PathLike, fspath
from textwrap import wrap
from typing import Any

import numpy as np

_GAP, _LEAST_WIDTH = "  ", 24  # between columns; of a column that is wrapped
_MOST_ITEMS = 16  # of a tuple or list in a repr
_TORCHS = ("device", "dtype")  # torch's types that are shown as they are
_CELL = "padding:2px 10px;border-bottom:1px solid #8884;vertical-align:top;text-align:"


class Table:
    """Rows under a title. Numbers are right-aligned, None and "" leave a gap.

    Columns without names have no line of names. The last column is wrapped where the
    text must not be wider than a terminal.
    """

    def __init__(
        self,
        title: str,
        columns: tuple[str, ...],
        rows: list[tuple[Any, ...]],
        empty: str = "none",
    ) -> None:
        self.title = title
        self.columns = columns
        self.rows = rows
        self.empty = empty  # what stands there instead of no rows

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        if not self.rows:
            return f"{self.title}: {self.empty}"
        grid = [[_text(cell) for cell in row] for row in self.rows]
        if any(self.columns):
            grid.insert(0, list(self.columns))
        widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
        right = [self._right(i) for i in range(len(self.columns))]
        if width is not None and not right[-1]:
            left = sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
            widths[-1] = min(widths[-1], max(width - left, _LEAST_WIDTH))
        if any(self.columns):
            grid.insert(1, ["-" * each for each in widths])
        lines = [self.title]
        for row in grid:
            *start, last = row
            for part in wrap(last, widths[-1]) if len(last) > widths[-1] else [last]:
                padded = [
                    text.rjust(each) if flush else text.ljust(each)
                    for text, each, flush in zip(
                        [*start, part], widths, right, strict=True
                    )
                ]
                lines.append(_GAP.join(padded).rstrip())
                start = [""] * len(start)
        return "\n".join(lines)

    def html(self) -> str:
        from html import escape

        if not self.rows:
            return f"<p><b>{escape(self.title)}</b>: {escape(self.empty)}</p>"
        align = [
            "right" if self._right(i) else "left" for i in range(len(self.columns))
        ]

        def line(tag: str, row: tuple[Any, ...]) -> str:
            cells = zip(row, align, strict=True)
            return "".join(
                f'<{tag} style="{_CELL}{side}">{escape(_text(cell))}</{tag}>'
                for cell, side in cells
            )

        rows = "".join(f"<tr>{line('td', row)}</tr>" for row in self.rows)
        names = f"<tr>{line('th', self.columns)}</tr>" if any(self.columns) else ""
        return (
            '<table style="border-collapse:collapse">'
            f'<caption style="text-align:left"><b>{escape(self.title)}</b></caption>'
            f"{names}{rows}</table>"
        )

    def markdown(self) -> str:
        if not self.rows:
            return f"**{self.title}**: {self.empty}"

        def line(cells: Iterable[str]) -> str:
            return f"| {' | '.join(cells)} |"

        def cell(value: Any) -> str:
            return " ".join(_text(value).split()).replace("|", "\\|")

        rule = ("--:" if self._right(i) else "---" for i in range(len(self.columns)))
        rows = [line(map(cell, row)) for row in self.rows]
        return "\n".join([f"**{self.title}**\n", line(self.columns), line(rule), *rows])

    def _right(self, column: int) -> bool:
        cells = [row[column] for row in self.rows if row[column] not in (None, "")]
        return bool(cells) and all(type(cell) in (int, float) for cell in cells)


class Report:
    """Base of what `stats()`, `patch()` and the command line's verbs return.

    A report's own class offers `tables` and `to_dict`; printing it gives the tables as
    text, a notebook shows them as HTML.
    """

    def tables(self) -> list[Table]:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def to_json(self) -> str:
        import json

        return json.dumps(self.to_dict(), indent=2)

    def to_markdown(self) -> str:
        """The tables for an issue or a page on GitHub."""
        return "\n\n".join(table.markdown() for table in self.tables())

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """The tables, wrapped where they would be wider than a terminal. A report that
        prints something else overrides this."""
        return "\n\n".join(table.text(width) for table in self.tables())

    def for_terminal(self, as_json: bool) -> str:
        """What a verb of the command line prints."""
        if as_json:
            return self.to_json()
        from shutil import get_terminal_size

        wide = get_terminal_size().columns if sys.stdout.isatty() else None
        return self.text(wide)

    def __repr__(self) -> str:
        """An interactive session shows what `print` does."""
        return str(self)

    def _repr_html_(self) -> str:
        return "".join(table.html() for table in self.tables())


def one_line(owner: object, **settings: Any) -> str:
    """`Class(setting=value, ...)` without the settings that are None.

    Arrays and other objects are shown as their types: reading an array on a GPU would
    wait for it.
    """
    shown = (f"{k}={_shown(v)}" for k, v in settings.items() if v is not None)
    return f"{type(owner).__name__}({', '.join(shown)})"


def attributes(owner: object, names: str) -> dict[str, Any]:
    """The attributes by their public names, for `one_line`; those are left out that an
    object lacks whose constructor has failed.

    Args:
        owner: the object.
        names: the attributes' names, separated by spaces.
    """
    state = vars(owner)
    return {name.lstrip("_"): state[name] for name in names.split() if name in state}


def _shown(value: Any) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int | float | str | np.dtype):
        return str(value) if isinstance(value, np.dtype) else repr(value)
    if isinstance(value, PathLike):
        return repr(fspath(value))
    if isinstance(value, tuple | list) and len(value) <= _MOST_ITEMS:
        inner = ", ".join(map(_shown, value))
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if type(value).__module__ == "torch" and type(value).__name__ in _TORCHS:
        return str(value)
    return value.__name__ if isinstance(value, type) else f"<{type(value).__name__}>"


def _text(cell: Any) -> str:
    if cell is None:
        return ""
    if type(cell) is bool:
        return "yes" if cell else "no"
    if type(cell) is float:
        rounded = float(f"{cell:.4g}")
        return f"{rounded:.0f}" if 1e4 <= abs(rounded) < 1e9 else f"{rounded:.4g}"
    return str(cell)
