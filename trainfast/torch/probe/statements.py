"""The statements around the step of a training loop, each with a stopwatch."""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from trainfast.torch.private import next_node
from trainfast.torch.probe.loop import EVENTS, Loop, Switch, clock

NAME = "__probe_statements__"  # in the script's globals
_LEAST_SHARE = 0.08  # of a statement that is worth skipping
_LEAST_COUNTED = 0.01  # of a step, for the runs of a statement in it
_LEAST_OWN = 0.8  # share of a statement that blocks must see to measure its skip
_LOGS = 0.05  # a statement that spends this share on writing logs is there for them
# A statement's share of the backward pass is at most so many times its own time.
_MOST_BACKWARD = 2.0
_MOST = 4  # statements that are skipped, the most expensive ones
_YOUNG = 20  # first runs of a statement, in which a change of parameters is looked for

# Of these only what is inside is timed: their own cost is next to none.
_TRANSPARENT = (ast.If, ast.With, ast.AsyncWith, ast.Try)
# A call that logs, by the names that people give such functions and objects.
_LOGGING = re.compile(
    r"(?:\w+\.)*(?:\w+_)?(?:log|logs|logger|logging|print|plot|plt|report|writer|wandb|"
    r"histogram|track|tracker|savefig|display|summary|progress|pbar)"
    r"(?:_\w+)?(?:\.\w+)?\("
)
_Block = (
    ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith | ast.If | ast.Try
)


class Statements:
    """Times each statement of the loops around the optimizer's step but the step's own.

    The script's tree is changed: `if begin(i): statement`, then `end(i)`. Statements
    that hold a line of the step itself are entered, not timed.

    Attributes:
        found: number, first line, last line and text of each statement.
        least: seconds by number; shorter runs are not counted.
        seconds: by number, in total; a call of the probe's own events included.
        inside: seconds of events inside, by number and event.
        updates: numbers of statements that change parameters.
        nodes: by number, how many nodes of backward graphs it has made.
    """

    def __init__(self, loop: Loop, stack: list[int], work: set[int]) -> None:
        self.loop = loop
        self.stack = stack
        self.work = work
        self.found: list[tuple[int, int, int, str]] = []
        self.seconds: defaultdict[int, float] = defaultdict(float)
        self.inside: defaultdict[tuple[int, str], float] = defaultdict(float)
        self.least: list[float] = []
        self.young: list[int] = []  # runs that are left of the first ones, by number
        self.runs: list[int] = []  # that were counted, by number
        # Of the statement that runs: its number, start, and what was there before it.
        self.open, self.start = -1, 0.0
        self.node, self.version = 0, -1
        self.events: tuple[float, dict[str, float]] = (-1.0, {})
        self.updates: set[int] = set()
        self.nodes: defaultdict[int, int] = defaultdict(int)
        self.since: tuple[int, float] | None = None  # all nodes, backward seconds
        self.reset()

    def reset(self) -> None:
        """Forgets the objects of a run of the script that has ended."""
        self.model: Any = None  # whose first parameter is `param`
        self.param: Any = None

    # ---- The tree --------------------------------------------------------------------

    def instrument(self, tree: ast.Module) -> None:
        for body in self._bodies(tree):
            self._instrument(body)
        ast.fix_missing_locations(tree)

    def _bodies(self, tree: ast.Module) -> list[list[ast.stmt]]:
        """The outermost loops around the step, and the functions called inside."""
        found: list[list[ast.stmt]] = []
        inside_a_loop = False
        for line in reversed(self.stack):  # outermost frame first
            around = [n for n in ast.walk(tree) if _holds(n, line)]
            functions = [n for n in around if isinstance(n, ast.FunctionDef)]
            inner = max(functions, key=lambda n: n.lineno, default=None)
            loops = [
                node
                for node in around
                if isinstance(node, ast.For | ast.While)
                and (inner is None or node.lineno > inner.lineno)
            ]
            if inside_a_loop and inner is not None:
                found.append(inner.body)
            elif loops:
                found.append(min(loops, key=lambda n: n.lineno).body)
            inside_a_loop = inside_a_loop or bool(loops)
        unique: list[list[ast.stmt]] = []
        for body in found:
            if not any(body is known for known in unique):
                unique.append(body)
        return unique

    def _instrument(self, body: list[ast.stmt]) -> None:
        changed: list[ast.stmt] = []
        for statement in body:
            holds_the_step = any(
                _holds(statement, line) for line in (*self.work, *self.stack)
            )
            if holds_the_step or isinstance(statement, _TRANSPARENT):
                for inner in _inner_bodies(statement):
                    self._instrument(inner)
                changed.append(statement)
            elif self._is_trivial(statement):
                changed.append(statement)
            else:
                changed += self._timed(statement)
        body[:] = changed

    def _is_trivial(self, statement: ast.stmt) -> bool:
        jumps = (ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom)
        names = (ast.Pass, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom)
        if isinstance(statement, names) or "zero_grad" in ast.unparse(statement):
            return True
        if isinstance(statement, ast.Expr) and isinstance(
            statement.value, ast.Constant
        ):
            return True  # a docstring
        return any(isinstance(node, jumps) for node in ast.walk(statement))

    def _timed(self, statement: ast.stmt) -> list[ast.stmt]:
        number = len(self.found)
        text = ast.unparse(statement).splitlines()[0][:70]
        last = statement.end_lineno or statement.lineno
        self.found.append((number, statement.lineno, last, text))
        self.least.append(0.0)
        self.young.append(_YOUNG)
        self.runs.append(0)
        guard = ast.If(_call("begin", number), [statement], [])
        after = ast.Expr(_call("end", number))
        return [ast.copy_location(new, statement) for new in (guard, after)]

    # ---- The stopwatch ---------------------------------------------------------------

    # These two run at each statement of each step, with cold caches: every line counts.

    def begin(self, number: int) -> bool:
        loop = self.loop
        if loop.switch.skipped == number:
            self.open = -1
            return False
        if loop.event_total != self.events[0] or loop.evaluating_since is not None:
            self.events = loop.event_total, loop.event_seconds()
        self.version = -1
        if self.young[number]:
            self.young[number] -= 1
            self.version = self._version()
        self.open = number
        self.node = next_node()
        self.start = clock()
        return True

    def end(self, number: int) -> None:
        took = clock() - self.start
        if took >= self.least[number] and self.open == number and self.loop.steps > 0:
            self._count(number, took)

    def _count(self, number: int, took: float) -> None:
        """Adds a run of a statement, the one that is open."""
        loop, self.open = self.loop, -1
        if self.since is None:
            self.since = self.node, loop.seconds["backward"]
        self.runs[number] += 1
        self.nodes[number] += next_node() - self.node
        self.seconds[number] += took
        loop.events.append((f"statement {number}", took, loop.steps))
        if loop.event_total != self.events[0] or loop.evaluating_since is not None:
            before, after = self.events[1], loop.event_seconds()
            for name in EVENTS:
                self.inside[number, name] += after[name] - before[name]
        if self.version != -1 and self.version != self._version():
            self.updates.add(number)

    def leave_out_short_runs(self, step_seconds: float, steps: int) -> None:
        """Runs too short to gain from do not count from now on.

        Args:
            step_seconds: of a step.
            steps: since runs are counted. A statement can run often in a step.
        """
        for number, runs in enumerate(self.runs):
            share = _LEAST_COUNTED * min(1.0, steps / max(1, runs))
            self.least[number] = share * step_seconds

    def _version(self) -> int:
        """Counts in-place changes of a parameter of the model."""
        model = self.loop.model
        if model is not self.model:  # finding a parameter takes a while
            self.model = model
            self.param = None if model is None else next(model.parameters(), None)
        return -1 if self.param is None else self.param._version

    def backward(self, number: int) -> float:
        """Seconds of its share of the backward passes over seconds of the statement:
        estimated from its share of the nodes that this thread made."""
        if self.since is None or not self.seconds[number]:
            return 0.0
        nodes, seconds = self.since
        part = self.nodes[number] / max(1, next_node() - nodes)
        passes = part * (self.loop.seconds["backward"] - seconds)
        return min(_MOST_BACKWARD, passes / self.seconds[number])

    def own(self, number: int) -> float:
        """The share of a statement's time without the events inside of it."""
        inside = sum(s for (n, _), s in self.inside.items() if n == number)
        return 1 - min(1.0, inside / max(1e-9, self.seconds[number]))

    def kind(self, number: int) -> str:
        """What a statement is for: an event, the update of parameters, or neither."""
        total = max(1e-9, self.seconds[number])
        share = {name: self.inside[number, name] / total for name in EVENTS}
        largest = max(share, key=lambda name: share[name])
        if share[largest] > 0.5:
            return largest
        if share["logging"] > _LOGS or _LOGGING.match(self.found[number][3]):
            return "logging"
        return "optimizer" if number in self.updates else "statement"

    def costly(self, share: Callable[[int], float]) -> list[int]:
        """The most expensive statements that a skip could gain from.

        A statement that holds an event is left to the stopwatch: blocks do not see it.
        """
        numbers = [n for n, *_ in self.found if not self._is_an_event(n)]
        order = sorted(numbers, key=share, reverse=True)
        return [n for n in order[:_MOST] if share(n) >= _LEAST_SHARE]

    def _is_an_event(self, number: int) -> bool:
        return self.own(number) < _LEAST_OWN


class SkipStatement(Switch):
    """Leaves one statement out."""

    def __init__(self, number: int) -> None:
        self.skipped = number
        self.name = f"statement {number}"


def _holds(node: Any, line: int) -> bool:
    last = getattr(node, "end_lineno", None)
    return last is not None and node.lineno <= line <= last


def _inner_bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    if isinstance(statement, _Block):
        for name in ("body", "orelse", "finalbody"):
            yield from filter(None, [getattr(statement, name, None)])
        for handler in getattr(statement, "handlers", []):
            yield handler.body


def _call(method: str, number: int) -> ast.expr:
    owner = ast.Name(NAME, ast.Load())
    return ast.Call(
        ast.Attribute(owner, method, ast.Load()), [ast.Constant(number)], []
    )
