"""One process of `trainfast bench`: measures every case once and reports on stdout."""

import json
import os
import statistics
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

from trainfast import _core
from trainfast.bench.cases import CASES, Made, Setup, Unavailable, make
from trainfast.bench.load import OtherLoad
from trainfast.bench.turns import Budget, cpu_clock, cuda_clock, measure
from trainfast.roof import roof

_ROUNDS = 15  # that a process reports of each contender, at most
_ROOF_SECONDS = 0.2  # for each rate


def main() -> None:
    """Writes a JSON object a line: a roof for each device, then its cases."""
    job = json.loads(sys.argv[1])
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not mix with the lines
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for found in results(**job):
        print(json.dumps(found), file=lines, flush=True)


def _end_with_parent() -> None:
    """The parent keeps stdin open for as long as it lives, however it ends."""
    sys.stdin.read()
    os._exit(1)


def results(
    names: list[str], devices: list[str], seconds: float
) -> Iterator[dict[str, Any]]:
    for device in devices:
        yield {"device": device, "roof": _roof(device, min(seconds, _ROOF_SECONDS))}
        for name in names:
            if device in CASES[name]:
                yield {"device": device, "name": name} | _case(name, device, seconds)
    yield {"threads": _core.num_threads()}


def _roof(device: str, seconds: float) -> dict[str, float]:
    """TFLOP/s by dtype and GB/s of memory; nothing where they cannot be measured."""
    try:
        found = roof(device, seconds)
    except RuntimeError:
        return {}
    return {**found.matmul, "copy": found.copy, "update": found.update}


def _case(name: str, device: str, seconds: float) -> dict[str, Any]:
    clock = cuda_clock if device == "cuda" else cpu_clock
    with ExitStack() as stack:
        try:
            made = make(name, Setup(device, stack))
            budget = Budget(seconds, warmup=1, min_rounds=3)
            with OtherLoad() as others:
                times, _ = measure(made.contenders, budget, clock)
        except Unavailable as error:
            return {"missing": str(error)}
        except Exception as error:  # one case must not take the others with it
            return {"failed": f"{type(error).__name__}: {error}"[:300]}
    return _reported(made, times) | {"others": others.share or 0.0}


def _reported(made: Made, times: dict[str, list[float]]) -> dict[str, Any]:
    case = made.case
    return {
        "title": case.title,
        "dtype": case.dtype,
        "nbytes": case.nbytes,
        "flops": case.flops,
        "roles": {contender.name: contender.role for contender in made.contenders},
        "times": {who: condensed(rounds) for who, rounds in times.items()},
        "skipped": dict(made.skipped),
    }


def condensed(rounds: list[float]) -> list[float]:
    """Seconds of a call: the medians of up to 15 runs of consecutive rounds."""
    count = min(len(rounds), _ROUNDS)
    bounds = [i * len(rounds) // count for i in range(count + 1)]
    return [statistics.median(rounds[a:b]) / 1e9 for a, b in pairwise(bounds)]


if __name__ == "__main__":
    main()
