"""Starts child processes that run a script under switches, and collects their times."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from trainfast.launch.environment import KEEP_MEMORY
from trainfast.probe import sandbox

SECONDS = 12.0  # of a child's blocks
_LONGEST = 300.0  # seconds for a whole child
# Loggers that would send something over a network, switched off by their own variables.
_QUIET = {
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "MLFLOW_TRACKING_URI": "file:///tmp/mlruns",
    "HF_HUB_OFFLINE": "1",
    "TQDM_MININTERVAL": "1",
    "MPLBACKEND": "Agg",
}


class ProbeError(RuntimeError):
    """The script could not be probed; the message says why."""


# The two sandboxes, the better one first.
NAMESPACES = (sys.executable, sandbox.__file__)
SYSTEM_CALLS = (sys.executable, "-m", "trainfast.probe.redirect.supervisor")


@cache
def has(kind: Sequence[str]) -> bool:
    """Whether a kind of sandbox works on this machine."""
    with tempfile.TemporaryDirectory() as stage:
        command = [*kind, stage, "/bin/true"]
        return subprocess.run(command, capture_output=True).returncode == 0


def best_sandbox() -> Sequence[str] | None:
    """The command that runs another one without harm; None: there is none here."""
    return next(filter(has, (NAMESPACES, SYSTEM_CALLS)), None)


def _before_command(stage: str) -> list[str]:
    """What stands before a command so that it changes nothing.

    Raises:
        ProbeError: there is no sandbox here, and the user has not asked for none.
    """
    asked = os.environ.get("TRAINFAST_SANDBOX", "auto")
    if asked not in ("auto", "none"):
        raise ProbeError(f"TRAINFAST_SANDBOX must be auto or none, got {asked!r}")
    if asked == "none":
        return []
    kind = best_sandbox()
    if kind is None:
        raise ProbeError(
            "no sandbox here, so the script was not run: it needs user namespaces, or "
            "Linux 5.9 on x86-64 with seccomp. With TRAINFAST_SANDBOX=none in the "
            "environment it runs without one, several times, and what it writes and "
            "deletes is not undone"
        )
    return [*kind, stage]


def child(
    script: str,
    arguments: Sequence[str] = (),
    *,
    switches: list[str] | None = None,
    stack: list[int] | None = None,
    work: Sequence[int] = (),
    flops: bool = False,
    ranks: int | None = None,
    keep_memory: bool = False,
    rounds: int = 9,
    seconds: float | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Runs one child to the end of its plan and returns its result.

    Args:
        script: path of the script.
        arguments: the script's own.
        switches: names of switches to try; None: the cheap ones.
        stack, work: lines that lead to the optimizer's step, and lines of the step
            itself; with them the statements around the step are timed.
        flops: also count the operations of a step.
        ranks: processes of distributed training; None: the script starts none.
        keep_memory: glibc keeps freed memory, as under `trainfast run`. Otherwise the
            script has its own page faults, and a switch gains what it saves of them.
        rounds: blocks of each switch.
        seconds: how long blocks may take, SECONDS unless given; three rounds are run in
            any case.
        seed: of the order of the blocks.

    Raises:
        ProbeError: the script failed, or has no training loop that torch shows.
    """
    job = {
        "switches": switches,
        "stack": stack,
        "work": list(work),
        "flops": flops,
        "ranks": ranks,
        "rounds": rounds,
        "seconds": SECONDS if seconds is None else seconds,
        "seed": seed,
    }
    module = "ranks" if ranks else "child"
    environment = KEEP_MEMORY if keep_memory else {}
    return _result(
        f"trainfast.torch.probe.{module}", script, arguments, job, environment
    )


def curve(
    script: str,
    arguments: Sequence[str] = (),
    *,
    steps: int,
    switches: Sequence[str] = (),
    patches: Sequence[str] = (),
    offset: int = 0,
) -> list[float]:
    """The losses of a script's first optimizer steps, as the script computes them.

    Args:
        script: path of the script.
        arguments: the script's own.
        steps: how many; fewer if the script ends before.
        switches: in force from the second step on.
        patches: capabilities for `trainfast.patch`, before the script starts.
        offset: added to each seed that the script sets.

    Raises:
        ProbeError: the script failed.
    """
    job = {
        "steps": steps,
        "switches": list(switches),
        "patches": list(patches),
        "offset": offset,
    }
    found = _result("trainfast.torch.probe.curve", script, arguments, job)
    losses: list[float] = found["losses"]
    return losses


def estimated(
    script: str, arguments: Sequence[str], job: dict[str, Any]
) -> dict[str, Any]:
    """What the memory of a script's training steps comes to.

    Raises:
        ProbeError: the script failed.
    """
    return _result("trainfast.torch.memory.script", script, arguments, job)


def _result(
    module: str,
    script: str,
    arguments: Sequence[str],
    job: dict[str, Any],
    environment: Mapping[str, str] = {},
) -> dict[str, Any]:
    """Runs a module of the probe in a sandbox, if the user has not asked for none;
    returns what it wrote. The user's variables come before those of `environment`."""
    job |= {"script": os.path.abspath(script), "arguments": list(arguments)}
    with tempfile.TemporaryFile() as result, tempfile.TemporaryDirectory() as stage:
        job["result"] = result.fileno()
        before = _before_command(stage)
        job["scratch"] = None if before else stage  # a sandbox has a folder of its own
        command = [*before, sys.executable, "-m", module]
        variables = {
            **environment,
            **os.environ,
            **_QUIET,
            "TRAINFAST_PROBE_JOB": json.dumps(job),
        }
        errors = _run(command, variables, result.fileno())
        result.seek(0)
        data = result.read()
    if not data:
        last = (errors.strip().splitlines() or ["it ended without a word"])[-1]
        raise ProbeError(f"{script} ended the process: {last}")
    found: dict[str, Any] = json.loads(data)
    if found["error"]:
        raise ProbeError(f"{script}: {found['error'].strip()}")
    return found


def _run(command: list[str], environment: dict[str, str], result: int) -> str:
    """Runs a command to its end, or kills it; returns what it wrote to stderr.

    Raises:
        ProbeError: the command took too long.
    """
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        _empty_terminal() as terminal,
    ):
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=terminal,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[result],
            start_new_session=True,
        )
        try:
            process.wait(_LONGEST)
        except subprocess.TimeoutExpired:
            raise ProbeError(
                f"the script was ended after {_LONGEST:.0f} s, before enough of its "
                "steps had run: give it less data, smaller steps or fewer evaluations"
            ) from None
        finally:
            with suppress(ProcessLookupError):  # without a sandbox some may be left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        return errors.read()


@contextmanager
def _empty_terminal() -> Iterator[int]:
    """A pseudo-terminal for a script that asks for its size; input ends at once."""
    try:
        ours, scripts = os.openpty()
    except OSError:  # a container without /dev/pts
        yield subprocess.DEVNULL
        return
    try:
        termios.tcsetwinsize(scripts, (24, 80))
        os.write(ours, b"\x04" * 1000)  # ends that many reads; the last one would wait
        yield scripts
    finally:
        os.close(scripts)
        os.close(ours)
