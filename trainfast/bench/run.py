"""Starts the processes of `trainfast bench` and collects what they measured."""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainfast import _core
from trainfast.bench.load import OtherLoad
from trainfast.bench.results import Results, Timing
from trainfast.machine import cpu_model, gpus, read, versions

Found = dict[str, Any]  # a line of a child
_DISTURBED = 0.1  # share of the cores that others use while a case is measured
_FEWEST = 3  # processes that must remain


class BenchError(RuntimeError):
    """A process ended early; the message says how."""


def bench(
    names: Sequence[str],
    devices: Sequence[str],
    seconds: float,
    processes: int,
    within: float = math.inf,
    progress: Callable[[str], None] = lambda stage: None,
) -> Results:
    """Measures cases in independent processes, one after the other.

    Args:
        names: of cases, out of `cases.CASES`.
        devices: "cpu", "cuda".
        seconds: for each case in each process.
        processes: how many, at most.
        within: starts no process that would probably end after so many seconds, once
            there are two.
        progress: is told what has been measured.

    Raises:
        BenchError: a process crashed.
    """
    job = {"names": list(names), "devices": list(devices), "seconds": seconds}
    runs: list[list[Found]] = []
    with OtherLoad() as others:
        start = time.monotonic()
        for number in range(processes):
            spent = time.monotonic() - start
            if number >= 2 and spent * (1 + 1 / number) > within:
                break
            runs.append([])
            for found in _child(job):
                runs[-1].append(found)
                done = found.get("name", "rates")
                progress(f"process {number + 1} of {processes}: {done} done")
    threads = runs[0][-1]["threads"]
    facts = (_machine(devices), versions(), threads, len(runs), seconds)
    return Results(*facts, others.share, _roofs(runs), *_merge(runs))


def _child(job: dict[str, Any]) -> Iterator[Found]:
    command = [sys.executable, "-m", "trainfast.bench.child", json.dumps(job)]
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # the child ends when this is closed
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdout and process.stdin
        try:
            last: Found = {}
            for line in process.stdout:
                last = json.loads(line)
                yield last
            if process.wait() or "threads" not in last:
                errors.seek(0)
                words = (errors.read().strip().splitlines() or ["no message"])[-1]
                after = last.get("name", "the roof")
                raise BenchError(
                    f"a process ended with status {process.returncode} after {after}: "
                    f"{words}"
                )
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


def _machine(devices: Sequence[str]) -> dict[str, Any]:
    names = [gpu["name"] for gpu in gpus()] if "cuda" in devices else []
    return {
        "cpu": cpu_model(read("/proc/cpuinfo"))[0],
        "cores": len(os.sched_getaffinity(0)),
        "backend": next(
            name for name, _, used in _core.backends() if used and name != "cuda"
        ),
        "gpu": names[0] if names else None,
    }


def _roofs(runs: list[list[Found]]) -> dict[str, dict[str, float]]:
    """The most that any process reached: other programs can only lower a rate."""
    found: dict[str, dict[str, list[float]]] = {}
    for line in (line for run in runs for line in run if "roof" in line):
        rates = found.setdefault(line["device"], {})
        for name, rate in line["roof"].items():
            rates.setdefault(name, []).append(rate)
    return {
        device: {name: max(each) for name, each in rates.items()}
        for device, rates in found.items()
    }


def _merge(
    runs: list[list[Found]],
) -> tuple[list[Timing], dict[str, str], dict[str, str], int]:
    """The cases that every process measured, and why the others are not among them."""
    grouped: dict[tuple[str, str], list[Found]] = {}
    for line in (line for run in runs for line in run if "name" in line):
        grouped.setdefault((line["name"], line["device"]), []).append(line)
    timings: list[Timing] = []
    missing: dict[str, str] = {}
    failed: dict[str, str] = {}
    left_out = 0
    for (name, device), lines in grouped.items():
        reasons = {"missing": missing, "failed": failed}
        why = next((line for line in lines if reasons.keys() & line.keys()), None)
        if why is not None:
            kind = "failed" if "failed" in why else "missing"
            reasons[kind][f"{name} on {device}"] = why[kind]
            continue
        # Contenders take turns, so all must have as many rounds.
        kept = undisturbed([line.pop("others") for line in lines])
        left_out += len(lines) - len(kept)
        lines = [lines[i] for i in kept]
        times = {
            who: [line["times"][who] for line in lines]
            for who in lines[0]["times"]
            if all(who in line["times"] for line in lines)
        }
        timings.append(Timing(**{**lines[0], "times": times}))
    return timings, missing, failed, left_out


def undisturbed(shares: Sequence[float]) -> list[int]:
    """The processes in which others used few of the cores; all where they are too few
    to compare. What is left out depends on the others' load, not on the times."""
    quiet = [i for i, share in enumerate(shares) if share < _DISTURBED]
    return quiet if len(quiet) >= _FEWEST else list(range(len(shares)))
