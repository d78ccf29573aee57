"""The variables of functions that are running, and where a script defines a name."""

import ast
import linecache
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from trainfast.graph_cache.digest import is_own_file
from trainfast.notebook import is_cell

_ADDING = {"add", "append", "appendleft", "extend", "insert", "setdefault", "update"}
_OPTIMIZED = 1  # flag of a function's code, whose f_locals is a copy
_PACKAGE = os.path.join(Path(__file__).parents[2], "")


def is_script(path: str) -> bool:
    """Whether a file is the user's: of no library, and no part of Python."""
    if is_cell(path):
        return True
    if not path or path.startswith("<"):
        return False
    path = os.path.abspath(path)
    return not path.startswith(_PACKAGE) and is_own_file("", path)


def frames() -> Iterator[FrameType]:
    """Of all functions that are running, except trainfast's."""
    for innermost in list(sys._current_frames().values()):
        frame: FrameType | None = innermost
        while frame is not None:
            if not frame.f_code.co_filename.startswith(_PACKAGE):
                yield frame
            frame = frame.f_back


def local_variables(frame: FrameType) -> list[tuple[str, Any]]:
    """Names and values. A function's are read from a copy, which Python would keep."""
    variables = frame.f_locals
    found = list(variables.items())
    if frame.f_code.co_flags & _OPTIMIZED and sys.version_info < (3, 13):
        variables.clear()
    return found


def local_values() -> list[Any]:
    return [value for frame in frames() for _, value in local_variables(frame)]


def definition(code: CodeType, name: str) -> int:
    """The line where a function, or a script's top level, first assigns the name."""
    tree = _parse(code.co_filename)
    if tree is None:
        return code.co_firstlineno
    scope: ast.AST = tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # With decorators, the code begins at the first of them.
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == code.co_firstlineno and node.name == code.co_name:
                scope = node
    return _assignment(scope, name) or _assignment(tree, name) or code.co_firstlineno


def top_definition(path: str, name: str) -> int | None:
    """The line where a file first assigns a variable or attribute of this name."""
    tree = _parse(path)
    return None if tree is None else _assignment(tree, name)


def variable_definition(path: str, name: str) -> tuple[str, int]:
    """File and line where a script first assigns a variable, line 0 if it does not; of
    a notebook the newest cell that does."""
    if is_cell(path):
        for cell in reversed(list(filter(is_cell, linecache.cache))):
            line = top_definition(cell, name)
            if line:
                return cell, line
    return path, top_definition(path, name) or 0


def additions(path: str, name: str) -> list[tuple[str, int]]:
    """The lines where a file, or a cell, adds to the container of this name."""
    paths = filter(is_cell, list(linecache.cache)) if is_cell(path) else [path]
    return [(each, line) for each in paths for line in _additions(each, name)]


def _additions(path: str, name: str) -> list[int]:
    tree = _parse(path)
    lines = set()
    for node in ast.walk(tree) if tree else ():
        grown: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            grown = [node.func.value] if node.func.attr in _ADDING else []
        elif isinstance(node, ast.Assign):
            grown = [t.value for t in node.targets if isinstance(t, ast.Subscript)]
        elif isinstance(node, ast.AugAssign):
            grown = [node.target]
        for each in grown:
            while isinstance(each, ast.Subscript):
                each = each.value
            if name in (getattr(each, "id", None), getattr(each, "attr", None)):
                lines.add(each.lineno)
    return sorted(lines)


def file_of(module: str) -> str:
    """A module's file, "" if it has none."""
    return getattr(sys.modules.get(module), "__file__", None) or ""


def _assignment(scope: ast.AST, name: str) -> int | None:
    lines = []
    for node in ast.walk(scope):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.NamedExpr):
            targets = [node.target]
        elif isinstance(node, ast.With):
            targets = [w.optional_vars for w in node.items if w.optional_vars]
        elif isinstance(node, ast.arg) and node.arg == name:
            lines.append(node.lineno)
        for target in targets:
            for part in ast.walk(target):
                if isinstance(getattr(part, "ctx", None), ast.Store) and name in (
                    getattr(part, "id", None),
                    getattr(part, "attr", None),
                ):
                    lines.append(part.lineno)  # type: ignore[attr-defined]
    return min(lines, default=None)


@lru_cache(maxsize=32)
def _parse(path: str) -> ast.Module | None:
    source = "".join(linecache.getlines(path))
    try:
        return ast.parse(source) if source else None
    except SyntaxError:
        return None
