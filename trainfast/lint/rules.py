"""Faults that cost a run: each rule yields (node, mended line) where it finds one.

A rule stays silent where the script may well be right; what is only slow is in hints.
"""

import ast
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from trainfast.lint.loops import (
    BACKWARD,
    Loop,
    Script,
    assigned,
    inside,
    keyword,
    last,
    method,
    names,
    receiver,
)

Found = Iterator[tuple[ast.AST, str]]
_SAVES = re.compile(r"(^|_)(save|checkpoint)", re.IGNORECASE)
_VALIDATES = re.compile(
    r"^(validate|validation|evaluate|eval_epoch|test)", re.IGNORECASE
)
_DETACHES = ("item", "detach", "tolist", "cpu", "numpy")
_CLIPS = ("clip_grad_norm_", "clip_grad_value_")
_ZEROES = re.compile(
    r"zero_grad|\.grad\s*=\s*None|grad(\.data)?\.zero_|grad(\.data)?\.fill_|"
    r"deepspeed|Accumulator|autograd\.grad\(|dist_autograd"
)


class Rule(NamedTuple):
    """A fault.

    Attributes:
        id: its name, for `# trainfast: ignore=ID`.
        why: what it does to the training, one sentence.
        check: finds it in a script.
    """

    id: str
    why: str
    check: Callable[[Script], Found]


def outside_epoch_loop(script: Script) -> Found:
    """A statement behind the epoch loop that uses the loop's variable."""
    for loop in script.epoch_loops:
        if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name):
            continue
        within = [_is_save_or_validation(n) for n in script.reach(*loop.body)]
        for statement in _after(script, loop):
            if loop.target.id in assigned(statement):
                break  # another loop's variable from here on
            kinds = {_is_save_or_validation(n) for n in inside(statement)} - {""}
            if loop.target.id in names(statement) and kinds - set(within):
                indent = " " * (loop.body[0].col_offset)
                yield statement, indent + _first_line(script, statement).strip()


def _is_save_or_validation(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    name = last(node.func)
    if _SAVES.search(name):
        return "save"
    return "validation" if _VALIDATES.match(name) else ""


def loss_kept(script: Script) -> Found:
    """A list or a sum of losses that keeps the graph of every step."""
    for loop in script.step_loops:
        losses = _losses(script, loop)
        trained_on = _trained_on(script, loop, losses)
        for node in inside(loop):
            if script.scope(node) is not script.scope(loop):
                continue
            values, target = _kept(node)
            if last(target) in trained_on:
                continue
            for kept in values:
                if kept.id in losses and not _is_detached(script, node, kept.id):
                    yield node, script.line_with(kept, f"{kept.id}.item()")


def _losses(script: Script, loop: Loop) -> set[str]:
    """Names whose backward pass runs in the loop."""
    found = set()
    for node in inside(loop):
        if method(node) not in BACKWARD:
            continue
        assert isinstance(node, ast.Call)
        held = [receiver(node), *node.args]
        for value in held:
            if isinstance(value, ast.Call) and method(value) == "scale":
                held.extend(value.args)
            if isinstance(value, ast.Name):
                found.add(value.id)
    return found


def _trained_on(script: Script, loop: Loop, losses: set[str]) -> set[str]:
    """Names that go into a loss: lists of losses that are summed, for example."""
    found = set(losses)
    for node in ast.walk(script.scope(loop)):
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(last(target) in losses for target in targets):
                found |= names(node.value)
        if method(node) in BACKWARD:
            found |= names(node)
    return found


def _kept(node: ast.AST) -> tuple[list[ast.Name], ast.AST]:
    """(losses, what keeps them) of xs.append(loss) and x += loss."""
    if method(node) == "append" and isinstance(node, ast.Call) and len(node.args) == 1:
        target = receiver(node)
        assert target is not None
        return _bare_names(node.args[0]), target
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return _bare_names(node.value), node.target
    return [], node


def _bare_names(value: ast.AST) -> list[ast.Name]:
    """The name, alone or multiplied, or those in a tuple, list or dict."""
    if isinstance(value, ast.Name):
        return [value]
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
        return _bare_names(value.left)
    items: list[ast.expr] = []
    if isinstance(value, ast.Tuple | ast.List):
        items = value.elts
    elif isinstance(value, ast.Dict):
        items = value.values
    return [name for item in items for name in _bare_names(item)]


def _is_detached(script: Script, node: ast.AST, name: str) -> bool:
    """Whether the name is a number by then, or no graph is made here."""
    for outer in script.around(node):
        if isinstance(outer, ast.With) and "no_grad" in script.text(outer.items[0]):
            return True
        if isinstance(outer, Loop):
            for other in inside(outer):
                if isinstance(other, ast.Assign) and name in map(last, other.targets):
                    value = other.value
                    if method(value) in _DETACHES or last(
                        getattr(value, "func", value)
                    ) in ("float", "reduce_mean", "reduce_tensor"):
                        return True
    return False


def no_zero_grad(script: Script) -> Found:
    """Steps in a script that never clears gradients."""
    if _ZEROES.search(script.source):
        return
    for loop in script.step_loops:
        for node in inside(loop):
            if script.is_step(node):
                optimizer = _optimizer_of(script, node)
                yield node, f"{script.text(node)}; {optimizer}.zero_grad()"
                break


def _optimizer_of(script: Script, step: ast.AST) -> str:
    assert isinstance(step, ast.Call) and isinstance(step.func, ast.Attribute)
    given = next((a for a in step.args if script.is_optimizer(a)), step.func.value)
    return script.text(given)


def scaler_order(script: Script) -> Found:
    """Scaled gradients that are stepped with or clipped as they are."""
    for loop in script.step_loops:
        nodes = list(script.reach(*loop.body))
        scaled = [
            receiver(inner)
            for n in nodes
            if method(n) == "backward" and method(inner := receiver(n)) == "scale"
        ]
        if not scaled or scaled[0] is None:
            continue
        scaler = script.text(scaled[0])
        calls = [method(n) for n in ast.walk(script.tree)]
        by_scaler = [n for n in nodes if method(n) == "step" and _is(n, scaled[0])]
        steps = [n for n in nodes if script.is_step(n)]
        if not by_scaler and steps:
            optimizer = _optimizer_of(script, steps[0])
            yield steps[0], f"{scaler}.step({optimizer})"
        elif by_scaler and "update" not in calls:
            yield by_scaler[0], f"{script.text(by_scaler[0])}; {scaler}.update()"
        clips = [n for n in nodes if last(getattr(n, "func", n)) in _CLIPS]
        if clips and "unscale_" not in calls and steps:
            optimizer = _optimizer_of(script, steps[0])
            yield clips[0], f"{scaler}.unscale_({optimizer}); {script.text(clips[0])}"


def _is(call: ast.AST, of: ast.AST) -> bool:
    """Whether it is a method of this variable."""
    held = receiver(call)
    return held is not None and last(held) == last(of)


def accumulation_leftover(script: Script) -> Found:
    """`if (i + 1) % n == 0: optimizer.step()`, and nothing for the last batches."""
    for loop in script.step_loops:
        if not isinstance(loop, ast.For) or _is_endless(loop):
            continue
        for node in inside(loop):
            if not isinstance(node, ast.If) or not _is_every_nth(node.test):
                continue
            steps = [n for s in node.body for n in inside(s) if script.is_step(n)]
            if not steps or node.orelse:
                continue
            if any(method(n) in BACKWARD for s in node.body for n in inside(s)):
                continue
            if any(script.is_step(n) for s in _after(script, loop) for n in inside(s)):
                continue
            size = f"len({_iterated(script, loop)})"
            test = script.text(node.test)
            counter = next(iter(sorted(names(node.test) & assigned(loop))), "i")
            yield node, f"if {test} or {counter} + 1 == {size}:"


def _is_every_nth(test: ast.AST) -> bool:
    """(i + 1) % n == 0, and nothing else."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1):
        return False
    remainder = isinstance(test.left, ast.BinOp) and isinstance(test.left.op, ast.Mod)
    zero = test.comparators[0]
    return (
        remainder
        and isinstance(test.ops[0], ast.Eq)
        and isinstance(zero, ast.Constant)
        and zero.value == 0
    )


def _is_endless(loop: ast.For) -> bool:
    called = last(getattr(loop.iter, "func", loop.iter))
    return called in ("range", "count", "trange", "cycle")


def _iterated(script: Script, loop: ast.For) -> str:
    """The loader of `for ... in enumerate(tqdm(loader))`."""
    value: ast.AST = loop.iter
    while isinstance(value, ast.Call) and value.args:
        value = value.args[0]
    return script.text(value)


def eval_never_undone(script: Script) -> Found:
    """model.eval() in the epoch loop, and train() not in it."""
    for loop in script.epoch_loops:
        if any(n in script.epoch_loops for n in script.reach(*loop.body)):
            continue  # the innermost one tells
        nodes = list(script.reach(*loop.body))
        if any(method(n) == "train" for n in nodes if not _has_arguments(n, 1)):
            continue
        trained = {
            last(node.func)
            for step_loop in script.step_loops
            for node in inside(step_loop)
            if isinstance(node, ast.Call)
        }
        own_modes = {
            last(held)
            for node in nodes
            if (held := receiver(node)) is not None
            and method(node).startswith("train_")
        }  # model.train_head() may be in another file, and call train() of a part
        for node in nodes:
            if method(node) != "eval" or _has_arguments(node, 0):
                continue
            model = receiver(node)
            assert model is not None
            if last(model) in trained - own_modes:
                yield node, f"{script.text(model)}.train()  # before the next epoch"
                break


def _has_arguments(node: ast.AST, most: int) -> bool:
    return isinstance(node, ast.Call) and len(node.args) + len(node.keywords) > most


def loader_in_epoch_loop(script: Script) -> Found:
    """A DataLoader that is the same in every epoch, made anew in each."""
    for loop in script.epoch_loops:
        changing = assigned(loop)
        for node in inside(loop):
            if not isinstance(node, ast.Call) or last(node.func) != "DataLoader":
                continue
            if names(node) & changing or any(
                isinstance(n, ast.Call) for a in node.args for n in ast.walk(a)
            ):
                continue
            if any(isinstance(outer, ast.If) for outer in _between(script, node, loop)):
                continue
            head = _first_line(script, loop).strip()
            statement = _first_line(script, _statement(script, node)).strip()
            yield node, f"{statement}  # before: {head}"


def prefetch_without_workers(script: Script) -> Found:
    """Arguments that torch refuses with num_workers=0."""
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Call) or last(node.func) != "DataLoader":
            continue
        if any(k.arg is None for k in node.keywords) or len(node.args) > 5:
            continue
        workers = keyword(node, "num_workers")
        none = workers is None or (
            isinstance(workers, ast.Constant) and workers.value == 0
        )
        if not none:
            continue
        for name in ("prefetch_factor", "persistent_workers"):
            value = keyword(node, name)
            if isinstance(value, ast.Constant) and value.value:
                yield node, f"num_workers=2, {name}={script.text(value)}"
                break


def _after(script: Script, loop: ast.AST) -> list[ast.stmt]:
    """The statements behind it in its block."""
    parent = script.parents[loop]
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and loop in block:
            return list(block[block.index(loop) + 1 :])
    return []


def _between(script: Script, node: ast.AST, outer: ast.AST) -> Iterator[ast.AST]:
    for one in script.around(node):
        if one is outer:
            return
        yield one


def _statement(script: Script, node: ast.AST) -> ast.AST:
    while not isinstance(node, ast.stmt):
        node = script.parents[node]
    return node


def _first_line(script: Script, node: ast.AST) -> str:
    return script.lines[getattr(node, "lineno", 1) - 1]


RULES = [
    Rule(
        "outside-epoch-loop",
        "runs once, after the last epoch: a crash before that loses everything",
        outside_epoch_loop,
    ),
    Rule(
        "loss-kept",
        "the loss keeps the graph of its step, so memory grows with every step",
        loss_kept,
    ),
    Rule(
        "no-zero-grad",
        "gradients of all steps add up: nothing sets them to zero",
        no_zero_grad,
    ),
    Rule(
        "scaler-order",
        "gradients are used while multiplied by the scale, or the scale never adapts",
        scaler_order,
    ),
    Rule(
        "accumulation-leftover",
        "no step with the last batches of an epoch where they do not fill a group",
        accumulation_leftover,
    ),
    Rule(
        "eval-never-undone",
        "from the second epoch on dropout is off and BatchNorm does not learn",
        eval_never_undone,
    ),
    Rule(
        "loader-in-epoch-loop",
        "workers start anew in every epoch",
        loader_in_epoch_loop,
    ),
    Rule(
        "prefetch-without-workers",
        "torch raises a ValueError: these arguments need num_workers above 0",
        prefetch_without_workers,
    ),
]
