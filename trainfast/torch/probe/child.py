"""The probe's child process: runs a script under hooks until its plan is done.

    python -m trainfast.torch.probe.child

The job is a JSON object in the environment (see `trainfast.probe.run`). The script runs
as __main__, and again if it ends before the plan does. The result is written to the
descriptor that the job names; then the process ends at once, so that no `finally`, no
bare `except` and no atexit handler of the script gets a say.
"""

import ast
import builtins
import gc
import json
import os
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch.utils.flop_counter import FlopCounterMode

from trainfast.notebook import is_notebook, read_script
from trainfast.probe.headline import headline
from trainfast.torch.probe import forward, hooks, loaders, training
from trainfast.torch.probe.loop import Loop, Switch, clock
from trainfast.torch.probe.patches import Patched
from trainfast.torch.probe.ranks import RankSchedule
from trainfast.torch.probe.result import measured
from trainfast.torch.probe.saves import NoSaves
from trainfast.torch.probe.schedule import Schedule
from trainfast.torch.probe.settings import settings
from trainfast.torch.probe.statements import NAME, SkipStatement, Statements
from trainfast.torch.probe.together import Together

_MOST_RUNS = 50  # of a script that ends after a few steps


def switches(names: list[str] | None) -> list[Switch]:
    """The switches of these names, "one + another" for both at once; None: the cheap
    ones."""
    every: list[Switch] = [
        loaders.CachedBatches() if names is None else loaders.CachedBatches(0.0),
        loaders.KeptLoader(),
        training.NoOptimizerStep(),
        training.FusedOptimizer(),
        training.TrainfastOptimizer(),
        training.NeededGradients(),
        training.TrimmedPadding(),
        training.NoAttentionWeights(),
        NoSaves(),
        forward.ChannelsLast(),
        *settings(),
        forward.Float32(),
        training.DoubledBatch(),
        forward.Autocast(torch.bfloat16),
        forward.Autocast(torch.float16),
        forward.Compiled(),
        *map(Patched, ("attention", "clip")),
        *(loaders.Workers(workers) for workers in (0, 1, 2, 4, 8)),
        loaders.GraphCache(),
    ]
    if names is None:
        return [switch for switch in every if not switch.by_name]
    known = {switch.name: switch for switch in every}
    found = []
    for name in names:
        parts = [known[part] for part in name.split(" + ")]
        found.append(parts[0] if len(parts) == 1 else Together(parts))
    return found


def _padded(tree: ast.Module) -> Iterator[int]:
    """The lines of padding="max_length", an argument of tokenizers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "padding":
            value = node.value
            if isinstance(value, ast.Constant) and value.value == "max_length":
                yield value.lineno


class _NoModules:
    """In place of FlopCounterMode's tracker of modules: under its hooks a script that
    calls torch.autograd.grad() fails."""

    parents = ("Global",)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class Child:
    """One child process and its script."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.script: str = job["script"]
        self.loop = Loop(self.script)
        self.loop.scratch = job["scratch"]
        self.began = clock()
        self.runs: list[tuple[int, int, bool]] = []  # first step, last step, whole
        self.flops: int | None = None  # of one optimizer step
        self.counter: FlopCounterMode | None = None
        self.tree = ast.parse(read_script(self.script), self.script)
        self.loop.lines["padding"].update(_padded(self.tree))
        self.statements: Statements | None = None
        if job.get("stack"):
            self.statements = Statements(self.loop, job["stack"], set(job["work"]))
            self.statements.instrument(self.tree)
        self.code = compile(self.tree, self.script, "exec")
        kind = RankSchedule if job.get("ranks") else Schedule
        self.schedule = kind(
            self.loop,
            switches(job.get("switches")),
            job["rounds"],
            job["seconds"],
            job["seed"],
            self.warmed_up,
            self.finish,
        )

    def run(self) -> None:
        hooks.install(self.loop, self.step_ended)
        for number in range(_MOST_RUNS):
            first = self.loop.steps
            self.begin_run(first)
            error = self.run_once()
            self.loop.evaluation_ends()
            if error is None:
                self.runs.append((first, self.loop.steps, True))
                self.schedule.run_ended()
                if self.loop.steps == first:
                    self.finish("ended without an optimizer step", self.loop.backwards)
                if self.job.get("ranks"):
                    break  # the process group was the script's
            else:
                if not self.schedule.failed_under(headline(error)):
                    again = number > 0 and self.schedule.blocks
                    self.finish(None if again else error, cut=True)
                self.runs.append((first, self.loop.steps, False))
        self.finish()

    def step_ended(self) -> None:
        """Counts the second step's operations, if the job asks, then hands over."""
        if self.job.get("flops") and self.loop.steps == 1:
            self.counter = FlopCounterMode(display=False)
            self.counter.mod_tracker = _NoModules()  # type: ignore[assignment]
            self.counter.__enter__()
            return
        if self.counter is not None:
            self.flops = self.counter.get_total_flops()
            self._stop_counting()
        self.schedule.step_ended()

    def _stop_counting(self) -> None:
        if self.counter is not None:
            self.counter.__exit__(None, None, None)
            self.counter = None

    def begin_run(self, first: int) -> None:
        self._stop_counting()  # the script raised in its second step
        if first:
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            self.loop.reset()
            if self.statements is not None:
                self.statements.reset()
            gc.collect()
        self.loop.restarts.clear()  # no period spans two runs
        self.schedule.run_began()
        hooks.find_model(self.loop)

    def run_once(self) -> str | None:
        """Runs the script to its end; returns its traceback if it raised."""
        main = types.ModuleType("__main__")
        main.__dict__.update(__builtins__=builtins, **{NAME: self.statements})
        if not is_notebook(self.script):
            main.__file__ = self.script
        sys.modules["__main__"], sys.argv = main, [self.script, *self.job["arguments"]]
        try:
            exec(self.code, main.__dict__)
        except SystemExit as end:
            if end.code not in (None, 0):
                return f"SystemExit: {end.code}"
        except BaseException as error:
            return self.traceback_of(error)
        return None

    def traceback_of(self, error: BaseException) -> str:
        """The traceback from the script on, as Python would have shown it."""
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename != self.script:
            trace = trace.tb_next
        return "".join(traceback.format_exception(error.with_traceback(trace)))

    def warmed_up(self) -> None:
        """Before the plan is made: statements that cost something can be skipped."""
        hooks.hook_loggers(self.loop)
        statements = self.statements
        if statements is not None:
            elapsed = max(1e-9, clock() - (self.schedule.first_end or 0.0))
            costly = statements.costly(lambda n: statements.seconds[n] / elapsed)
            skips = [SkipStatement(number) for number in costly]
            self.schedule.offered = [*self.schedule.offered, *skips]
            steps = self.loop.steps
            statements.leave_out_short_runs(self.schedule.step_seconds, steps)

    def finish(
        self, error: str | None = None, backwards: int = 0, cut: bool = False
    ) -> None:
        """Writes the result and ends the process."""
        if not self.runs or self.runs[-1][1] != self.loop.steps:
            first = self.runs[-1][1] if self.runs else 0
            self.runs.append((first, self.loop.steps, False))
        result = {
            **measured(self.loop, self.schedule, self.runs),
            "error": error,
            "backwards": backwards,
            "flops": self.flops,
            "seconds": clock() - self.began,
            "ended": clock(),
        }
        if self.statements is not None:
            result["statements"] = [
                {
                    "number": number,
                    "line": line,
                    "text": text,
                    "kind": self.statements.kind(number),
                    "own": self.statements.own(number),
                    "backward": self.statements.backward(number),
                }
                for number, line, _, text in self.statements.found
            ]
        write(self.job, result)


def begin() -> dict[str, Any]:
    """The job; the script's folder takes the place of ours on the path."""
    job: dict[str, Any] = json.loads(os.environ.pop("TRAINFAST_PROBE_JOB"))
    sys.path[0] = os.path.dirname(job["script"])
    return job


def write(job: dict[str, Any], result: dict[str, Any]) -> NoReturn:
    """Writes the result where the job wants it, and ends the process."""
    os.pwrite(job["result"], json.dumps(result).encode(), 0)
    os._exit(1 if result["error"] else 0)


def main() -> None:
    Child(begin()).run()


if __name__ == "__main__":
    main()
