"""The training loops of a script: where it steps, and what is around that."""

import ast
import re
from collections.abc import Iterator
from functools import cached_property

Loop = ast.For | ast.AsyncFor | ast.While
Function = ast.FunctionDef | ast.AsyncFunctionDef
_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_OPTIMIZERS = re.compile(
    r"(Adam\w*|Adagrad|Adadelta|SGD|RMSprop|Rprop|LBFGS|NAdam|RAdam|Lion|Muon|"
    r"Adafactor|ASGD|SparseAdam|LAMB)$"
)
_OPTIMIZER = re.compile(r"(^|_)opt(s|im|ims|imizer|imizers)?(_|\d|$)", re.IGNORECASE)


class Script:
    """A parsed script.

    Attributes:
        tree: its syntax tree.
        functions: those that are defined once, by name.
    """

    def __init__(self, source: str, path: str = "<script>") -> None:
        self.source = source
        self.lines = source.split(
            "\n"
        )  # as Python counts: a form feed is no line's end
        self.tree = ast.parse(source, path)
        found: dict[str, list[Function]] = {}
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
            if isinstance(node, Function):
                found.setdefault(node.name, []).append(node)
        self.functions = {name: f[0] for name, f in found.items() if len(f) == 1}

    def text(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.source, node) or ast.unparse(node)

    def line_with(self, node: ast.expr, text: str) -> str:
        """The line on which the node starts, with `text` in the node's place."""
        line = self.lines[node.lineno - 1].encode()  # columns count bytes
        rest = line[node.end_col_offset :] if node.lineno == node.end_lineno else b""
        return (line[: node.col_offset] + text.encode() + rest).decode().strip()

    def called(self, call: ast.Call) -> Function | None:
        """The script's own function or method that is called."""
        function = call.func
        if isinstance(function, ast.Name):
            return self.functions.get(function.id)
        if isinstance(function, ast.Attribute) and dotted(function.value) == "self":
            return self.functions.get(function.attr)
        return None

    def reach(self, *roots: ast.AST) -> Iterator[ast.AST]:
        """Nodes that run within `roots`, in the script's own functions as well."""
        seen: set[ast.AST] = set()
        waiting = list(roots)
        while waiting:
            for node in inside(waiting.pop()):
                yield node
                if isinstance(node, ast.Call):
                    function = self.called(node)
                    if function is not None and function not in seen:
                        seen.add(function)
                        waiting.extend(function.body)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """What the node is in, from the inside outwards."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def scope(self, node: ast.AST) -> ast.AST:
        """The function, or the script, whose variables the node sees first."""
        around = (n for n in self.around(node) if isinstance(n, Function))
        return next(around, self.tree)

    @cached_property
    def optimizers(self) -> set[str]:
        """Names of variables and attributes that hold optimizers."""
        names = set()
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            if _OPTIMIZERS.search(dotted(node.value.func) or ""):
                names |= {last(target) for target in node.targets}
        return names - {""}

    def is_optimizer(self, node: ast.AST) -> bool:
        name = last(node)
        return name in self.optimizers or bool(_OPTIMIZER.search(name))

    def is_step(self, node: ast.AST) -> bool:
        """optimizer.step(), or scaler.step(optimizer)."""
        if method(node) != "step":
            return False
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if any(self.is_optimizer(argument) for argument in node.args):
            return True
        return self.is_optimizer(node.func.value)

    @cached_property
    def step_loops(self) -> list[Loop]:
        """The innermost loops with a backward pass and a step."""
        training = self._training
        return [
            loop
            for loop in training
            if not any(n in training for n in self.reach(*loop.body) if n is not loop)
        ]

    @cached_property
    def epoch_loops(self) -> list[Loop]:
        """Loops around a loop that steps."""
        return [loop for loop in self._training if loop not in self.step_loops]

    @cached_property
    def _training(self) -> list[Loop]:
        return [
            loop
            for loop in ast.walk(self.tree)
            if isinstance(loop, Loop) and self._trains(loop)
        ]

    def _trains(self, loop: Loop) -> bool:
        nodes = list(self.reach(*loop.body))
        backward = any(method(node) in BACKWARD for node in nodes)
        return backward and any(self.is_step(node) for node in nodes)


BACKWARD = ("backward", "manual_backward")


def inside(root: ast.AST) -> Iterator[ast.AST]:
    """The node and all in it, in the order of the source, but not in functions that
    are defined there."""
    yield root
    for child in ast.iter_child_nodes(root):
        if not isinstance(child, _OWN_SCOPE):
            yield from inside(child)


def dotted(node: ast.AST) -> str | None:
    """ "torch.optim.AdamW" of such an expression; None of others."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return None if before is None else f"{before}.{node.attr}"
    return None


def last(node: ast.AST) -> str:
    """The name of a variable or attribute; "" of other expressions."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return (dotted(node) or "").rpartition(".")[2]


def method(node: ast.AST | None) -> str:
    """ "step" of `x.step(...)`; "" of what is no call of a method."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr
    return ""


def receiver(node: ast.AST | None) -> ast.AST | None:
    """`x` of `x.step(...)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.value
    return None


def names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def assigned(root: ast.AST) -> set[str]:
    """Names that get a value within."""
    return {
        node.id
        for node in inside(root)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)
