"""Gains with intervals, from blocks of steps with and without a switch.

A gain is how many times as fast a step of the script becomes. Blocks give the ratio of
steps without events (saves, evaluations, logs); the cost of events, which happen too
rarely for blocks, is added as their mean time multiplied by how often they happen.
Intervals are bootstrapped: processes are drawn first, then rounds in each, then events.
`over_processes` forms one that is also right for few processes.
"""

import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_DRAWS = 600
_MOST_DRAWN = 64  # times of a kind of event; if there are more, means of chunks
_RARE = 0.5  # events a step, below which their distance says how often they happen
# The 97.5 % quantiles of Student's t for 1 to 10 degrees of freedom.
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
WHOLE = ("save", "evaluation")  # events that go with all of their statements
_IN_MOST_BLOCKS = 0.5  # statements a block, from which on the median block holds one

Result = dict[str, Any]  # of a child


@dataclass(frozen=True)
class Gain:
    """How many times as fast, and the bounds of the 95 % interval."""

    gain: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.gain:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass
class Process:
    """What one child measured, ready to be drawn from.

    Attributes:
        rounds: for each round, seconds a step in each block of a switch. The base has
            two blocks in a round.
        costs: by event, the seconds of each that happened (or, of very many, means of
            chunks), and how often it happens a step. Timed statements are events
            here, too.
        own: by statement, the share of its time without events inside of it.
        block_steps: steps of a block.
        rest: by event, the other seconds a step of the statements that are there for
            it, if the median block holds them: a save's copies parameters, say.
    """

    rounds: list[dict[str, list[float]]]
    costs: dict[str, tuple[list[float], float]]
    own: dict[str, float]
    block_steps: int
    rest: dict[str, float]

    @classmethod
    def of(cls, result: Result, column: int = 2) -> "Process":
        rounds: dict[int, dict[str, list[float]]] = {}
        for block in result["blocks"]:
            rounds.setdefault(block[0], {}).setdefault(block[1], []).append(
                block[column]
            )
        by_kind: dict[str, list[Any]] = {}
        for event in result["events"]:
            by_kind.setdefault(event[0], []).append(event)
        own = {
            f"statement {s['number']}": s["own"] for s in result.get("statements", ())
        }
        costs = {}
        for kind, events in by_kind.items():
            times, rate = _times(result, kind, events)
            costs[kind] = chunk_means(times), rate
        rest = dict.fromkeys(WHOLE, 0.0)
        for s in result.get("statements", ()):
            times, rate = costs.get(f"statement {s['number']}", ([], 0.0))
            in_a_block = rate * result["block_steps"]
            if s["kind"] in WHOLE and in_a_block >= _IN_MOST_BLOCKS:
                rest[s["kind"]] += statistics.fmean(times) * rate * s["own"]
        return cls(list(rounds.values()), costs, own, result["block_steps"], rest)


def _times(result: Result, kind: str, events: list[Any]) -> tuple[list[float], float]:
    """The seconds of each event of a kind, and how many happen in a step."""
    events = [e for e in events if e[2] > 0]
    times = [seconds for _, seconds, _ in events]
    if kind == "worker-start" and result.get("period"):
        return times, 1 / result["period"]  # none was seen in blocks without a loader
    steps = result["steps"] - result["steps_under"].get(kind, 0)
    whole = [(first, last) for first, last, ended in result["runs"] if ended]
    if whole:  # runs of the script to its end: how often is known
        inside = [e for e in events if any(a < e[2] <= b for a, b in whole)]
        possible = sum(b - a for a, b in whole) * steps / max(1, result["steps"])
        return times, len(inside) / max(1, possible)
    rate = len(events) / max(1, steps)
    if len(events) >= 2 and rate < _RARE:
        at = [step for _, _, step in events]
        if at[-1] > at[0] and steps == result["steps"]:
            rate = (len(at) - 1) / (at[-1] - at[0])
    return times, rate


def chunk_means(times: list[float]) -> list[float]:
    """Means of at most `_MOST_DRAWN` chunks of neighbours, nearly of one length.

    A script can run a statement 100,000 times between two steps.
    """
    n, chunks = len(times), min(len(times), _MOST_DRAWN)
    edges = [i * n // chunks for i in range(chunks + 1)] if n else []
    return [statistics.fmean(times[a:b]) for a, b in pairwise(edges)]


class Sample:
    """One draw of processes, rounds and events: a step's time, and what changes it."""

    def __init__(
        self, processes: Sequence[Process], draw: random.Random | None
    ) -> None:
        self.draw = draw
        self.processes = self._choose(processes)
        self.rounds = [r for p in self.processes for r in self._choose(p.rounds)]
        self._total: float | None = None

    def _choose(self, items: Sequence[Any]) -> Sequence[Any]:
        return choose(items, self.draw)

    def step(self) -> float:
        """Seconds of a step without events."""
        return statistics.median([t for r in self.rounds for t in r.get("base", ())])

    def ratio(self, name: str, base: str = "base") -> float | None:
        """Time with a switch over the time without it.

        The median over pairs of single blocks. A mean of the base's two blocks would be
        slower than the median block where noise is skewed, and everything would gain.
        """
        ratios = [
            with_it / without
            for r in self.rounds
            for with_it in r.get(name, ())
            for without in r.get(base, ())
        ]
        return statistics.median(ratios) if ratios else None

    def cost(self, kind: str) -> float:
        """Seconds of a kind of event, spread over the steps."""
        costs = []
        for process in self.processes:
            if kind.startswith("statement") and kind not in process.own:
                continue  # this process has no stopwatch at statements
            times, rate = process.costs.get(kind, ([], 0.0))
            times = list(self._choose(times))
            costs.append(statistics.fmean(times) * rate if times else 0.0)
        return statistics.fmean(costs) if costs else 0.0

    def total(self) -> float:
        """Seconds of a step with its share of all that a typical step does not have."""
        if self._total is None:
            kinds = {kind for process in self.processes for kind in process.costs}
            parts = [self.cost(kind) * self._outside(kind) for kind in kinds]
            self._total = self.step() + sum(parts)
        return self._total

    def _outside(self, kind: str) -> float:
        """The share of an event's time that the median block does not hold."""
        if not kind.startswith("statement"):
            return 1.0
        have = [p for p in self.processes if kind in p.own and kind in p.costs]
        if not have:
            return 0.0
        in_a_block = have[0].costs[kind][1] * have[0].block_steps
        return have[0].own[kind] if in_a_block < _IN_MOST_BLOCKS else 0.0

    def gain_of_switch(self, name: str) -> float | None:
        if name == "batch":
            return self.gain_of_doubling()
        ratio = self.ratio(name)
        if ratio is None:
            return None
        saved = self.step() * (1 - ratio)
        if not name.startswith("statement"):  # whose time is part of a step's
            saved += self.cost_with_rest(name)
        return self.total() / max(1e-9, self.total() - saved)

    def gain_of_doubling(self) -> float | None:
        """A sample's time, against that in batches of twice the size.

        The doubled batch was at hand; the loader's time for it is twice the wait. A
        script without a loader does not wait.
        """
        single, double = self.ratio("data"), self.ratio("batch")
        if double is None:
            return None
        wait = 0.0 if single is None else max(0.0, 1 - single)
        return 2 * self.total() / (self.total() + self.step() * (double + 2 * wait - 1))

    def gain_of_event(self, kind: str) -> float:
        """Without this kind of event, or statement that was timed."""
        total = self.total()
        return total / max(0.01 * total, total - self.cost_with_rest(kind))

    def cost_with_rest(self, kind: str) -> float:
        """Seconds a step that are gained without this kind of event."""
        return self.cost(kind) + self.processes[0].rest.get(kind, 0.0)


def choose(items: Sequence[Any], draw: random.Random | None) -> Sequence[Any]:
    """As many items, drawn with replacement; without `draw` the items themselves."""
    return draw.choices(items, k=len(items)) if draw and items else items


def interval(
    processes: Sequence[Process], statistic: Callable[[Sample], float | None]
) -> Gain | None:
    """The statistic of all that was measured, with its bootstrapped interval."""
    return bootstrap(lambda draw: statistic(Sample(processes, draw)))


def bootstrap(
    statistic: Callable[[random.Random | None], float | None],
) -> Gain | None:
    """A statistic with its bootstrapped 95 % interval.

    Args:
        statistic: computes it from a sample that it draws by `choose`, or without a
            generator from all that was measured. None: it has no value.
    """
    middle = statistic(None)
    if middle is None:
        return None
    draw = random.Random(1)
    drawn: Iterable[float | None] = (statistic(draw) for _ in range(_DRAWS))
    found = sorted(value for value in drawn if value is not None)
    low, high = found[int(0.025 * len(found))], found[int(0.975 * len(found)) - 1]
    return Gain(middle, min(low, middle), max(high, middle))


def over_processes(
    processes: Sequence[Process], statistic: Callable[[Sample], float | None]
) -> Gain | None:
    """The mean of a statistic over processes, with its 95 % interval by Student's t.

    Each process counts once, so the interval includes what differs between processes;
    rounds of one process cannot show that. None: fewer than two processes have a value.
    """
    found = [statistic(Sample([process], None)) for process in processes]
    logs = [math.log(value) for value in found if value is not None]
    if len(logs) < 2:
        return None
    middle = statistics.fmean(logs)
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    half = STUDENT[len(logs) - 2] * error
    return Gain(*map(math.exp, (middle, middle - half, middle + half)))


def noise(processes: Sequence[Process]) -> float:
    """By how much base rounds of one process vary: p90 over p10."""
    worst = 1.0
    for process in processes:
        bases = [r["base"] for r in process.rounds if "base" in r]
        times = sorted(map(statistics.fmean, bases))
        if len(times) >= 3:
            ends = times[int(0.1 * len(times))], times[int(0.9 * (len(times) - 1))]
            worst = max(worst, ends[1] / ends[0])
    return worst
