"""Reads a notebook as a script, for the commands that read or run scripts; names the
cells of a notebook that runs."""

import ast
import json
import linecache
import os
import re
import sys
import tokenize
from typing import Any

# Of the k-th code cell line i is line 1000 k + i of the script.
CELL_LINES = 1000
LINES = "In a notebook, line 3004 is the fourth line of the third code cell."

_FIRST = "display = print  # which IPython defines\n"
# Of IPython's own lines: those that run Python, with what they run.
_TIMED = re.compile(r"(\s*)%time\s+(?=\S)")
_FOLDER = re.compile(r"(\s*)%cd\s+(?:-q\s+)?(.*\S)")
_OTHERS = re.compile(r"(\s*)(?:[%!?]|[\w.]+\?\??\s*$)")
_CHDIR = "__import__('os').chdir({!r})"
_TIMED_CELLS = re.compile(r"%%(?:time|capture)\b")


def is_notebook(path: str | os.PathLike[str]) -> bool:
    return os.fspath(path).endswith(".ipynb")


def read_script(path: str | os.PathLike[str]) -> str:
    """The source of a script, or of a notebook's code cells, one after the other.

    Line 3004 of a notebook is the fourth line of its third code cell; a cell of 1000
    lines moves the cells after it. `%time` and `%cd` are translated. Other magics,
    shell commands and cells in other languages become `pass` or empty lines. The lines
    are also put into `linecache`, which tracebacks read.

    Raises:
        OSError: the file cannot be read.
        SyntaxError: its encoding is unknown.
        ValueError: it is not text, or is no Python notebook of format 4.
    """
    if not is_notebook(path):
        with tokenize.open(path) as file:
            return file.read()
    text = _FIRST
    for number, cell in enumerate(_cells(path), 1):
        text += "\n" * (number * CELL_LINES - text.count("\n"))
        text += _without_magics(cell).rstrip("\n") + "\n"
    name = os.fspath(path)
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    return text


def _cells(path: str | os.PathLike[str]) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            notebook: Any = json.load(file)
        cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
        language = notebook["metadata"].get("language_info", {}).get("name", "python")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{os.fspath(path)} is no notebook of format 4"
        raise ValueError(f"{what}: {error}") from error
    if language != "python":
        raise ValueError(f"{os.fspath(path)} is a notebook in {language}, not Python")
    return sources


def _without_magics(cell: str) -> str:
    """The cell as Python, with as many lines."""
    lines = cell.split("\n")
    if _TIMED_CELLS.match(cell):
        lines[0] = ""
    elif cell.startswith("%%"):
        return ""
    try:
        ast.parse("\n".join(lines))
        return "\n".join(lines)
    except (SyntaxError, ValueError):
        pass
    goes_on = False  # a line that is left out, behind a backslash
    for i, line in enumerate(lines):
        folder, other = _FOLDER.match(line), _OTHERS.match(line)
        if goes_on:
            lines[i] = ""
        elif _TIMED.match(line):
            lines[i] = _TIMED.sub(r"\1", line)
            continue
        elif folder:
            lines[i] = folder[1] + _CHDIR.format(os.path.expanduser(folder[2]))
        elif other:
            lines[i] = f"{other[1]}pass"
        goes_on = (goes_on or other is not None) and line.endswith("\\")
    return "\n".join(lines)


# ---- A notebook that runs ------------------------------------------------------------


def is_cell(path: str) -> bool:
    """Whether it is the name that IPython gives to a notebook's cell."""
    return "ipykernel_" in path or path.startswith("<ipython")


def place_name(path: str, line: int) -> str:
    """Such as "train.py:88", or "line 3 of cell In[2]"."""
    return f"line {line} of {cell_name(path)}" if is_cell(path) else f"{path}:{line}"


def cell_name(path: str) -> str:
    """As in IPython's tracebacks, "cell In[2]"; "a cell" if IPython does not say."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    found = name_of(path) if name_of is not None else None
    return f"cell {found[1]}" if found else "a cell"
