"""What makes a loop wait: right, but slow. `trainfast diagnose` measures how slow."""

import ast
import re
from collections.abc import Iterator

from trainfast.lint.loops import Loop, Script, inside, last, method, receiver
from trainfast.lint.rules import Found, Rule

_WAITS = ("item", "cpu", "numpy", "tolist")
_DEVICE = re.compile(r"cuda|gpu|device|accelerat|fabric|\.to\(", re.IGNORECASE)


def waits_for_gpu(script: Script) -> Found:
    """.item(), .cpu(), ... in every step."""
    for node in _in_every_step(script):
        if method(node) in _WAITS and not getattr(node, "args", None):
            assert isinstance(node, ast.Call)
            value = receiver(node)
            assert value is not None
            kept = script.text(value).removesuffix(".detach()")
            line = script.line_with(node, f"{kept}.detach()")
            yield node, f"{line}  # and .{method(node)}() every 50 steps"


def prints_in_every_step(script: Script) -> Found:
    for node in _in_every_step(script):
        if isinstance(node, ast.Call) and last(node.func) == "print" and node.args:
            yield node, f"if step % 50 == 0: {script.text(node)}"


def copy_that_waits(script: Script) -> Found:
    """x.to(device) or x.cuda() of pinned batches without non_blocking."""
    if "pin_memory=True" not in script.source.replace(" ", ""):
        return
    for loop in script.step_loops:
        batch = {
            n.id
            for n in ast.walk(getattr(loop, "target", ast.Pass()))
            if isinstance(n, ast.Name)
        }
        for node in inside(loop):
            if method(node) not in ("to", "cuda") or "non_blocking" in script.text(
                node
            ):
                continue
            assert isinstance(node, ast.Call)
            value = receiver(node)
            assert value is not None
            if last(value) in batch:
                call = script.text(node)
                more = ", " if not call.endswith("()") else ""
                waitless = f"{call[:-1]}{more}non_blocking=True)"
                yield node, script.line_with(node, waitless)


def zipped_loader(script: Script) -> Found:
    """zip(range(n), loader), which fetches one batch more than it uses; in a loop that
    steps, or of what is called a loader."""
    for loop in ast.walk(script.tree):
        value = getattr(loop, "iter", None)
        if not (isinstance(value, ast.Call) and last(value.func) == "zip"):
            continue
        if len(value.args) != 2:
            continue
        first, source = value.args
        if not (isinstance(first, ast.Call) and last(first.func) == "range"):
            continue
        loader = script.text(source)
        is_of_data = loop in script.step_loops or "loader" in loader.lower()
        if is_of_data and len(first.args) == 1:
            some = f"itertools.islice({loader}, {script.text(first.args[0])})"
            yield value, script.line_with(value, f"enumerate({some})")


def _in_every_step(script: Script) -> Iterator[ast.AST]:
    """Nodes of step loops that are under no condition within the loop.

    None in a script that names no device: on the CPU there is nothing to wait for.
    """
    if not _DEVICE.search(script.source):
        return
    for loop in script.step_loops:
        for node in inside(loop):
            for outer in script.around(node):
                if outer is loop:
                    yield node
                    break
                if isinstance(outer, ast.If | Loop):
                    break


HINTS = [
    Rule("waits-for-gpu", "waits until the GPU has finished this step", waits_for_gpu),
    Rule(
        "prints",
        "waits for the terminal, and for the GPU where a tensor is printed",
        prints_in_every_step,
    ),
    Rule("copy-waits", "pinned memory is there, but the copy waits", copy_that_waits),
    Rule("zipped-loader", "fetches a batch that nobody uses", zipped_loader),
]
