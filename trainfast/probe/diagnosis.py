"""The stages of a diagnosis: cheap switches first, then what they leave open."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from trainfast.probe import run
from trainfast.probe.findings import LEAST, findings, rows
from trainfast.probe.gains import Process, Result
from trainfast.probe.report import Diagnosis, conclude

_LOADERS = ("workers 0", "workers 1", "workers 2", "workers 4", "graph cache")
# None of these changes which collectives a step enters.
RANK_SAFE = (
    *("data", "worker-restart", "no optimizer step", "fused optimizer"),
    *("trainfast optimizer", "padding", "attention", "channels-last"),
    *("anomaly", "threads", "one thread", "deterministic", "cudnn benchmark", "tf32"),
)
_OPEN = 1.10  # a gain from which on a row needs a second process
_SMALL = 0.1  # of a step: a phase that is not worth a switch
_SWITCHES_OF = {
    "data": {"data"},
    "optimizer": {"fused optimizer", "trainfast optimizer", "no optimizer step"},
}


def diagnose(
    script: str,
    arguments: Sequence[str] = (),
    *,
    deep: bool = False,
    ranks: int | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Diagnosis:
    """Runs a training script with one thing changed at a time, and names what it gains.

    The script runs several times in a sandbox and is not changed. It should train for
    at least some seconds.

    Args:
        script: path of the script.
        arguments: the script's own.
        deep: also try what takes minutes.
        ranks: start that many processes of the script, as `torchrun
            --nproc-per-node` does, and try what changes no collective.
        progress: called with the name of each stage.

    Raises:
        ProbeError: the script failed, or shows no training loop.
    """
    began = time.perf_counter()
    if ranks is not None:
        return _diagnose_ranks(script, arguments, ranks, progress)
    progress("first process")
    first = run.child(script, arguments, seed=0)
    places = {"stack": first["stack"], "work": first["work"]}
    progress("second process, with a stopwatch at each statement")
    results = [first]
    results.append(run.child(script, arguments, seed=1, **places))
    not_tried: dict[str, str] = {}
    asked = {"batch", "bfloat16", "compile"} if deep else set()

    def more(
        names: list[str], stage: str, statements: bool = False, **extra: Any
    ) -> None:
        progress(stage)
        asked.update(names)
        extra["switches"] = names
        extra.setdefault("seconds", run.SECONDS / 2)
        if statements:
            extra |= places
        try:
            result = run.child(script, arguments, seed=len(results), **extra)
        except run.ProbeError as error:
            not_tried[", ".join(names)] = str(error)
        else:
            results.append(result)

    by_name = {row.name: row.gain for row in rows(results)}
    if "data" in by_name and by_name["data"].gain >= LEAST:
        more(list(_LOADERS), "other loaders")
    if first.get("dtype") == "float64":
        more(["dtype"], "float32")
    if first.get("device", "cpu") == "cpu":
        more(["one thread"], "one thread", seconds=run.SECONDS, flops=True)
    found = findings(rows(results), results, script)
    if deep or all(finding.id == "threads" for finding in found):
        more(["data", "batch"], "a doubled batch", flops=True)
    if deep or first.get("device", "cpu") != "cpu":
        more(["bfloat16", "float16"], "half precision")
    if deep:
        more(["compile"], "torch.compile")
    again = _undecided(results)
    if again:
        plain = [n for n in again if not n.startswith("statement ")]
        more(plain, "once more, what is undecided", statements=plain != again)
    not_tried |= _left_out(results, asked)
    return conclude(script, results, not_tried, time.perf_counter() - began)


def _diagnose_ranks(
    script: str,
    arguments: Sequence[str],
    ranks: int,
    progress: Callable[[str], None],
) -> Diagnosis:
    began = time.perf_counter()
    results = []
    for number in range(2):
        progress(f"{ranks} ranks, {'second' if number else 'first'} run")
        results.append(
            run.child(
                script, arguments, ranks=ranks, switches=list(RANK_SAFE), seed=number
            )
        )
    left_out = dict.fromkeys(("statements", "batch"), "they may hold collectives")
    return conclude(script, results, left_out, time.perf_counter() - began)


def _left_out(results: list[Result], asked: set[str]) -> dict[str, str]:
    """Why switches were not tried that another script, or --deep, would have met.

    Args:
        results: of all processes.
        asked: switches that a process was started for.
    """
    tried = {block[1] for result in results for block in result["blocks"]}
    if not tried:
        return {}
    why = {}
    for phase, names in _SWITCHES_OF.items():
        share = results[0]["shares"].get(phase, 1.0)
        if share < _SMALL and not names & tried:
            why[phase] = f"it takes {share:.1%} of a step"
    deep = ("batch", "bfloat16", "compile")
    return why | {name: "only with --deep" for name in deep if name not in asked}


def _undecided(results: list[Result]) -> list[str]:
    """Rows that matter and were measured in one process only, or not sharply."""
    open_ones = []
    processes = [Process.of(result) for result in results]
    for row in rows(results):
        measured = sum(any(row.name in r for r in p.rounds) for p in processes)
        vague = row.gain.gain >= LEAST > row.gain.low
        if measured and row.gain.gain >= _OPEN and (measured < 2 or vague):
            open_ones.append(row.name)
    return open_ones
