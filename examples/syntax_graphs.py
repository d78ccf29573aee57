"""What graph_syntax_trees.py learns from: the functions of Python's standard library as
graphs, and whether a function returns a value, with what says so taken out."""

import ast
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

VERSION = 1  # of what build() makes; a cache filled by another one is made again
LEFT_OUT = {"site-packages", "dist-packages"}
MIN_NODES, MAX_NODES = 12, 1000  # of the tree before anything is left out
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.ClassDef)
KINDS = {
    name: number
    for number, name in enumerate(
        name
        for name, value in sorted(vars(ast).items())
        if isinstance(value, type) and issubclass(value, ast.AST)
    )
}
N_WORDS = 1024  # names are numbered by a hash; 0: a node without one
STEPS = 16  # of the random walks
CHILD, NEXT_TOKEN, SAME_NAME = RELATIONS = range(3)


@dataclass(frozen=True)
class Function:
    """A function's lines, indented as in its file, without decorators."""

    module: str
    line: int
    source: str


def functions(limit: int | None = None) -> list[Function]:
    """The library's functions in the order of its files, equal ones once."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, Function] = {}
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).with_suffix("")
        if LEFT_OUT.isdisjoint(name.parts):
            for function in _functions_in(path, ".".join(name.parts)):
                found.setdefault(function.source, function)
        if limit is not None and len(found) >= limit:
            break
    if len(found) < 100:
        raise SystemExit(f"{folder} must hold Python's source, got {len(found)} defs")
    return list(found.values())[:limit]


def _functions_in(path: Path, module: str) -> Iterator[Function]:
    try:
        text = path.read_text("utf-8")
        tree = _parse(text)
    except (SyntaxError, UnicodeError, ValueError):  # some files are there to be wrong
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, FUNCTIONS):
            continue
        if MIN_NODES <= sum(1 for _ in ast.walk(node)) <= MAX_NODES:
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if source.lstrip().startswith(("def ", "async ")):  # alone on its lines
                yield Function(module, node.lineno, source)


def _parse(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old escapes in strings
        return ast.parse(source)


def build(function: Function) -> dict[str, np.ndarray]:
    """The graph of a function.

    x: int64 (nodes, 2), the number of the syntax's kind and of the name; walks: float32
    (nodes, STEPS), see walks(); edge_index: int64 (2, edges); edge_attr: int64
    (edges,), which relation; y: float32 (1,), 1 where it returns a value. A `return
    value` looks like `value` as a statement, a bare `return` like `pass`; decorators,
    annotation of the result and the function's own name are left out, and inner
    functions and classes are empty.
    """
    indented = function.source[:1].isspace()
    module = _parse("if True:\n" * indented + function.source)
    graph = _Graph()
    graph.walk(module.body[0].body[0] if indented else module.body[0])
    graph.join_tokens()
    edges = np.array(graph.edges, np.int64)
    edge_index = np.ascontiguousarray(edges[:, :2].T)
    return {
        "x": np.array(graph.nodes, np.int64),
        "walks": walks(edge_index, len(graph.nodes)),
        "edge_index": edge_index,
        "edge_attr": np.ascontiguousarray(edges[:, 2]),
        "y": np.array([graph.returns], np.float32),
    }


class _Graph:
    """What is known of a graph while its tree is walked."""

    def __init__(self) -> None:
        self.nodes: list[tuple[int, int]] = []  # kind, name
        self.edges: list[tuple[int, int, int]] = []  # from, to, relation
        self.tokens: list[tuple[int, int, int]] = []  # line, column, node
        self.last_with: dict[str, int] = {}
        self.returns = False

    def walk(self, root: ast.AST) -> None:
        """Adds all nodes, parents before children, with the edges between them."""
        stack = [(child, 0) for child in [*reversed(root.body), root.args]]
        self.nodes.append((KINDS["FunctionDef"], 0))
        while stack:
            node, parent = stack.pop()
            kind, children = self.seen_as(node)
            place = len(self.nodes)
            name = _name(node)
            number = 1 + zlib.crc32(name.encode()) % (N_WORDS - 1) if name else 0
            self.nodes.append((KINDS[kind], number))
            self.edges.append((parent, place, CHILD))
            if not children and hasattr(node, "lineno"):
                self.tokens.append((node.lineno, node.col_offset, place))
            if name and isinstance(node, ast.Name | ast.arg):
                if name in self.last_with:
                    self.edges.append((self.last_with[name], place, SAME_NAME))
                self.last_with[name] = place
            stack += [(child, place) for child in reversed(children)]

    def seen_as(self, node: ast.AST) -> tuple[str, list[ast.AST]]:
        """The kind and the children that the graph shows of a node."""
        if isinstance(node, SCOPES):
            return type(node).__name__, []
        children = [
            child
            for child in ast.iter_child_nodes(node)
            if not isinstance(child, ast.expr_context)
        ]
        if not isinstance(node, ast.Return):
            return type(node).__name__, children
        if node.value is None or _is_none(node.value):
            return "Pass", []
        self.returns = True
        return "Expr", children

    def join_tokens(self) -> None:
        """Adds the edges from each leaf of the tree to the next one in the text."""
        self.tokens.sort()
        for (*_, here), (*_, after) in pairwise(self.tokens):
            self.edges.append((here, after, NEXT_TOKEN))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def walks(edge_index: np.ndarray, n_nodes: int) -> np.ndarray:
    """How often a random walk of 1, 2, ... steps ends where it began.

    float32 (n_nodes, STEPS), for edges walked both ways: the random-walk encoding of a
    node's place (Dwivedi et al. 2022, "Graph neural networks with learnable structural
    and positional representations"). It is most of the work of building a graph.
    """
    here, there = np.concatenate([edge_index, edge_index[::-1]], axis=1)
    order = np.argsort(here, kind="stable")
    there = there[order]
    degree = np.bincount(here, minlength=n_nodes)
    first = np.concatenate([[0], degree.cumsum()[:-1]])
    chance = np.eye(n_nodes)  # of a walk from the row's node to be at the column's
    returned = np.empty((n_nodes, STEPS), np.float32)
    for step in range(STEPS):
        chance = np.add.reduceat(chance[there], first) / degree[:, None]
        returned[:, step] = chance.diagonal()
    return returned


def _name(node: ast.AST) -> str:
    """What a node is called; of a constant, its type."""
    if isinstance(node, ast.Constant):
        return type(node.value).__name__
    for field in ("id", "attr", "arg", "name"):
        name = getattr(node, field, None)
        if isinstance(name, str):
            return name
    return ""
