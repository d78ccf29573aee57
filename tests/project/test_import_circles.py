"""No package of trainfast imports, directly or by others, a package that imports it.

Imports inside of functions count, and so do modules that are named by a string. Imports
for type checkers do not count. The modules of a package that has packages of its own
are nodes by themselves, since they lie on several levels.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def modules_of(root):
    """{module: file} of the package trainfast."""
    found = {}
    files = [*(root / "trainfast").rglob("*.py"), root / "trainfast" / "_core.pyi"]
    for file in filter(Path.exists, files):
        parts = file.relative_to(root).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = file
    return found


def is_for_type_checkers(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def statements(tree):
    """All nodes but those that only a type checker looks at."""
    for node in ast.iter_child_nodes(tree):
        if not is_for_type_checkers(node):
            yield node
            yield from statements(node)


def imported(tree, modules):
    """The modules that a module names in imports and strings."""
    for node in statements(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in inner]
        elif isinstance(node, ast.Constant) and "." in str(node.value):
            names = [node.value]
        yield from (name for name in names if name in modules)


def import_graph(root):
    """{part: its imports}; a part is a package of modules, or a module."""
    modules = modules_of(root)
    packages = {m for m, file in modules.items() if file.name == "__init__.py"}
    outer = {package.rpartition(".")[0] for package in packages}

    def part_of(module):
        package = module if module in packages else module.rpartition(".")[0]
        return module if package in outer else package

    graph = {part_of(module): set() for module in modules}
    for module, file in modules.items():
        for name in imported(ast.parse(file.read_text()), modules):
            if part_of(name) != part_of(module):
                graph[part_of(module)].add(part_of(name))
    return graph


def reachable(graph, start):
    found, todo = set(), [start]
    while todo:
        new = graph[todo.pop()] - found
        found |= new
        todo += new
    return found


def circles(root):
    """The sets of parts that import each other."""
    graph = import_graph(root)
    below = {part: reachable(graph, part) for part in graph}
    return {
        frozenset(other for other in below[part] if part in below[other])
        for part in graph
        if part in below[part]
    }


def test_packages_import_in_one_direction():
    assert len(import_graph(ROOT)) > 10
    assert circles(ROOT) == set()


PLANTS = {
    "at the top": "from trainfast.upper import name\n",
    "in a function": "def f():\n    import trainfast.upper.inner as inner\n",
    "by a string": "import_module('trainfast.upper.inner').name\n",
    "by two steps": "import trainfast.between\n",
}


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_circle_is_found(plant, tmp_path):
    files = {
        "__init__": "",
        "between": "from trainfast.upper import inner\n",
        "upper/__init__": "",
        "upper/inner": "import trainfast.lower\n",
        "lower/__init__": "",
        "lower/below": PLANTS[plant],
    }
    for name, text in files.items():
        file = tmp_path / "trainfast" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    circle = {"trainfast.upper", "trainfast.lower"}
    circle |= {"trainfast.between"} if plant == "by two steps" else set()
    assert circles(tmp_path) == {frozenset(circle)}
    (tmp_path / "trainfast/lower/below.py").write_text(
        "if TYPE_CHECKING:\n    import trainfast.upper\n"
    )
    assert circles(tmp_path) == set()
