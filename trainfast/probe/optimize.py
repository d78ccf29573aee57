"""Which settings make a script faster, alone and together: the stages of `optimize`."""

import math
import time
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from statistics import mean

from trainfast.probe import run
from trainfast.probe.ablation import Ablation, Line
from trainfast.probe.candidates import Candidate, candidates
from trainfast.probe.gains import (
    Gain,
    Process,
    Result,
    Sample,
    interval,
    over_processes,
)

STEPS = 50  # of a comparison of losses
_SEEDS = 3  # whose losses say how much chance there is in training
LEAST = 1.02  # of a gain, below which nobody would notice it
PROCESSES = 4  # that measure anew what was chosen
_LEAST_DATA = 0.05  # of the time spent waiting for data, from which on workers may help
# Losses of one seed that differ by less, of their size, are equal but for rounding.
_ROUNDING = 1e-3
_OTHERS = (
    "workers ",
    "compile",
    "bfloat16",
    "float16",
)  # tried in children of their own


class Optimizer:
    """Runs the stages and keeps what they measured.

    Args:
        script: path of the script.
        arguments: the script's own.
        allow: names of candidates that change the training and may be kept.
        progress: called with the name of each stage.
    """

    def __init__(
        self,
        script: str,
        arguments: Sequence[str],
        allow: Collection[str],
        progress: Callable[[str], None],
    ) -> None:
        self.script = script
        self.arguments = arguments
        self.allow = allow
        self.progress = progress
        self.results: list[Result] = []
        self.failed: dict[str, str] = {}
        self.anew: dict[str, Gain | None] = {}  # by fresh processes
        self.verdicts: dict[str, str] = {}
        self.notes: list[str] = []

    def run(self) -> Ablation:
        began = time.perf_counter()
        self._try_alone()
        kept, curves = self._check_losses(self._confirmed(self._eligible()))
        lines = [
            Line(candidate, self._alone(candidate.name), self.anew[together], "")
            for candidate, together in zip(kept, _prefix_names(kept), strict=True)
        ]
        lines += [
            Line(c, self._alone(c.name), None, self.verdicts[c.name])
            for c in self._others(kept)
        ]
        seconds = time.perf_counter() - began
        return Ablation(
            self.script, lines, self.results, self.failed, curves, self.notes, seconds
        )

    # ---- Measuring -------------------------------------------------------------------

    def _child(self, names: Sequence[str], stage: str, flops: bool = False) -> None:
        """Measures the switches in one process; those that fail are dropped."""
        self.progress(stage)
        seconds = run.SECONDS if len(names) > 4 else run.SECONDS / 2
        try:
            result = run.child(
                self.script,
                self.arguments,
                switches=list(names),
                seconds=seconds,
                seed=len(self.results),
                flops=flops,
                keep_memory=True,  # as the settings will be used: by `trainfast run`
            )
        except run.ProbeError as error:
            if not self.results:
                raise
            self.failed |= dict.fromkeys(names, str(error))
        else:
            self.failed |= result["failed"]
            self.results.append(result)

    def _try_alone(self) -> None:
        names = [c.name for c in candidates() if not c.name.startswith(_OTHERS)]
        self._child(names, "each setting alone", flops=True)
        first = self.results[0]
        if first["shares"].get("data", 0.0) >= _LEAST_DATA:
            workers = [c.name for c in candidates() if c.name.startswith("workers ")]
            self._child(workers, "numbers of workers")
        on_gpu = first.get("device", "cpu") != "cpu"
        for name in ("bfloat16", "float16"):
            if on_gpu or name in self.allow:
                self._child([name], name)
        self._child(["compile"], "torch.compile")

    def _alone(self, name: str) -> Gain | None:
        """What a switch gains over the unchanged script, measured anew if it was."""
        if name in self.failed:
            return None
        found = [Process.of(result) for result in self.results]
        tried = [p for p in found if any(name in r for r in p.rounds)]
        return self.anew.get(name) or interval(tried, _gain_of(name))

    # ---- Deciding --------------------------------------------------------------------

    def _eligible(self) -> list[Candidate]:
        """What seems faster alone and is allowed, best first, one of a kind."""
        gains = {c.name: self._alone(c.name) for c in candidates()}
        found: list[tuple[Gain, Candidate]] = []
        for candidate in candidates():
            gain = gains[candidate.name]
            if gain is None:
                continue
            if gain.gain < LEAST:
                self.verdicts[candidate.name] = "slower" if gain.high < 1 else "SAME"
            elif candidate.changes and candidate.name not in self.allow:
                self.verdicts[candidate.name] = (
                    f"changes the training: --allow {candidate.name}"
                )
            else:
                found.append((gain, candidate))
        found.sort(key=lambda pair: -pair[0].gain)
        best: list[Candidate] = []
        for _, candidate in found:
            rivals = [b for b in best if b.kind == candidate.kind != ""]
            if rivals:
                self.verdicts[candidate.name] = f"less than {rivals[0].name}"
            else:
                best.append(candidate)
        return best

    def _confirmed(self, chosen: list[Candidate]) -> list[Candidate]:
        """Keeps what also gains in processes that had no part in the choice.

        The best of several noisy gains is too high by chance, so the choice itself
        proves nothing. If some settings do not gain, the others are measured once more
        without them; more tries would let a useless setting pass by chance.
        """
        added = self._measure_anew(chosen)
        faster = [c for c in chosen if _is_faster(added[c.name])]
        if len(faster) < len(chosen):
            self._name_useless(chosen, faster)
            added = self._measure_anew(faster)
            sure = list(takewhile(lambda c: _is_faster(added[c.name]), faster))
            self._name_useless(faster, sure)
            return sure
        return chosen

    def _measure_anew(self, chosen: list[Candidate]) -> dict[str, Gain | None]:
        """What each setting adds to those before it, in fresh processes."""
        alone, together = [c.name for c in chosen], _prefix_names(chosen)
        names = list(dict.fromkeys([*alone, *together]))
        first = len(self.results)
        for number in range(PROCESSES if chosen else 0):
            stage = f"what was chosen anew, process {number + 1} of {PROCESSES}"
            self._child(names, stage)
        fresh = [Process.of(result) for result in self.results[first:]]
        self.anew |= {name: over_processes(fresh, _gain_of(name)) for name in names}
        return {
            name: over_processes(fresh, _gain_of(this, before))
            for name, this, before in zip(alone, together, [None, *together])
        }

    def _name_useless(self, chosen: list[Candidate], kept: list[Candidate]) -> None:
        for candidate in chosen:
            if candidate not in kept:
                others = "" if candidate is chosen[0] else " beside those above"
                self.verdicts[candidate.name] = f"measured anew: no sure gain{others}"

    def _others(self, kept: list[Candidate]) -> list[Candidate]:
        rest = [c for c in candidates() if c not in kept and self._alone(c.name)]
        return sorted(rest, key=lambda c: -self._alone(c.name).gain)  # type: ignore

    # ---- Losses ----------------------------------------------------------------------

    def _check_losses(
        self, kept: list[Candidate]
    ) -> tuple[list[Candidate], dict[str, list[float]]]:
        """Drops what moves the losses by more than another seed does."""
        checked = [c for c in kept if c.kind != "workers" and not c.changes]
        if not checked:
            return kept, {}
        curves = {}
        try:
            for seed in range(_SEEDS):
                self.progress(f"losses with seed {seed}")
                curves[f"seed {seed}"] = self._curve((), seed)
            self.progress("losses under the settings")
            curves["settings"] = self._curve(checked, 0)
        except run.ProbeError as error:
            self.notes.append(f"losses were not compared: {error}")
            return kept, {}
        seeds = [curves[f"seed {seed}"] for seed in range(_SEEDS)]
        if min(map(len, curves.values())) == 0:
            self.notes.append(
                "losses were not compared: no backward pass began at a single number"
            )
            return kept, {}
        if stays_inside(seeds, curves["settings"]):
            return kept, curves
        for candidate in checked:
            self.progress(f"losses under {candidate.name}")
            if not stays_inside(seeds, self._curve([candidate], 0)):
                self.verdicts[candidate.name] = "moves the losses more than a seed does"
                kept = [c for c in kept if c is not candidate]
        return self._confirmed(kept), curves

    def _curve(self, chosen: Sequence[Candidate], seed: int) -> list[float]:
        return run.curve(
            self.script,
            self.arguments,
            steps=STEPS,
            switches=[c.name for c in chosen if c.patch is None],
            patches=[c.patch for c in chosen if c.patch is not None],
            offset=seed,
        )


def optimize(
    script: str,
    arguments: Sequence[str] = (),
    *,
    allow: Collection[str] = (),
    progress: Callable[[str], None] = lambda stage: None,
) -> Ablation:
    """Finds the settings that make a training script faster, by measuring them.

    The script runs unchanged in a sandbox, about ten times for some seconds each.

    Args:
        script: path of the script.
        arguments: the script's own.
        allow: settings that change what is learned and may be kept, of `ALLOWED`.
        progress: called with the name of each stage.

    Raises:
        ProbeError: the script failed, or shows no training loop.
    """
    return Optimizer(script, arguments, allow, progress).run()


def stays_inside(seeds: Sequence[Sequence[float]], curve: Sequence[float]) -> bool:
    """Whether a curve is as near to that of the first seed as the other seeds are.

    The distance of two curves is the root of their mean squared difference.
    """
    spread = max(_distance(a, b) for a in seeds for b in seeds)
    size = math.sqrt(mean(value * value for value in seeds[0]))
    return _distance(seeds[0], curve) <= max(spread, _ROUNDING * size)


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return math.sqrt(mean((a - b) ** 2 for a, b in zip(one, other)))


def _prefix_names(kept: Sequence[Candidate]) -> list[str]:
    names = [candidate.name for candidate in kept]
    return [" + ".join(names[: i + 1]) for i in range(len(names))]


def _gain_of(name: str, base: str | None = None) -> Callable[[Sample], float | None]:
    """A switch's gain over the unchanged script, or over another switch."""

    def statistic(sample: Sample) -> float | None:
        gain = sample.gain_of_switch(name)
        under = sample.gain_of_switch(base) if base else 1.0
        return gain / under if gain and under else None

    return statistic


def _is_faster(gain: Gain | None) -> bool:
    return gain is not None and gain.gain >= LEAST and gain.low > 1
