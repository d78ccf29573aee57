"""What the source of a script names; the script is read and does not run."""

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from trainfast.notebook import read_script


@dataclass(frozen=True)
class Script:
    """The parts of one script that rules look at.

    Attributes:
        path: the file.
        names: dotted names that the source uses, as "torch.cuda.amp.autocast", and the
            first line of each; a call without arguments is also there with "()".
        assigned: those that it assigns to.
        variables: environment variables that it sets to constants.
    """

    path: str
    names: dict[str, int] = field(default_factory=dict)
    assigned: dict[str, int] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


def read(path: str | os.PathLike[str]) -> Script:
    """Reads a Python source file, or a notebook.

    Args:
        path: the file.

    Raises:
        OSError: the file cannot be read.
        SyntaxError: the file is not Python.
        ValueError: the file is not text, or no notebook.
    """
    tree = ast.parse(read_script(path), os.fspath(path))
    script = Script(os.fspath(path))
    imported = dict(_imports(tree))
    for alias, (name, line) in imported.items():
        if alias != name:
            script.names.setdefault(name, line)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = _dotted(node, imported)
            table = script.assigned if isinstance(node.ctx, ast.Store) else script.names
            table.setdefault(name, node.lineno)
        if isinstance(node, ast.Call) and not node.args and not node.keywords:
            script.names.setdefault(f"{_dotted(node.func, imported)}()", node.lineno)
        if isinstance(node, ast.Assign | ast.Call):
            script.variables.update(_variables(node, imported))
    return script


Imported = dict[str, tuple[str, int]]


def _imports(tree: ast.Module) -> Iterator[tuple[str, tuple[str, int]]]:
    """(name in the script, (dotted name, line)) of each import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                yield alias.asname or name, (name, node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield alias.asname or alias.name, (name, node.lineno)


def _dotted(node: ast.expr, imported: Imported) -> str:
    """The full name of `a.b.c`; "" for what is no name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    head, _ = imported.get(node.id, (node.id, 0))
    return ".".join([head, *reversed(parts)])


def _variables(
    node: ast.Assign | ast.Call, imported: Imported
) -> Iterator[tuple[str, str]]:
    """Of `os.environ["NAME"] = "value"`, and of `os.environ.setdefault`."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    if isinstance(node, ast.Assign):
        items = [t for t in node.targets if isinstance(t, ast.Subscript)]
        items = [t for t in items if _dotted(t.value, imported) == "os.environ"]
        pairs += [(item.slice, node.value) for item in items]
    elif _dotted(node.func, imported) == "os.environ.setdefault":
        pairs += zip(node.args[:1], node.args[1:])
    for name, value in pairs:
        if isinstance(name, ast.Constant) and isinstance(value, ast.Constant):
            yield str(name.value), str(value.value)
