"""Blocks of steps with and without each switch, in shuffled order, and their times."""

import random
import resource
from collections import defaultdict
from collections.abc import Callable, Sequence

from trainfast.torch.probe.loop import EVENTS, LONGEST_PERIOD, Loop, Switch, clock

WARM_STEPS, WARM_SECONDS = 6, 0.7  # before the first block, both
LONGEST_WARM = 6.0  # seconds; with long steps fewer of them warm up
BLOCK_SECONDS, MOST_STEPS = 0.12, 40  # of a block
LEAST_ROUNDS = 3


def page_faults() -> int:
    """How often this process has got a page of memory from the system so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Schedule:
    """Runs blocks of optimizer steps under switches.

    A round holds every switch once and the base twice. A block's first steps are
    dropped, so that the switch is in full effect; events (saves, evaluations, logs) are
    taken out of its time.

    Attributes:
        blocks: (round, switch, seconds a step, seconds from a batch to its gradients).
        shares: what part of the warm-up each phase took.
        faults: page faults a step, of each block of the base.
        may_wait: whether a block may drop steps until its switch has settled.
    """

    def __init__(
        self,
        loop: Loop,
        offered: Sequence[Switch],
        rounds: int,
        seconds: float,
        seed: int,
        warmed_up: Callable[[], None],
        done: Callable[[], None],
    ) -> None:
        self.loop = loop
        self.offered = offered
        self.rounds = rounds
        self.seconds = seconds
        self.warmed_up = warmed_up
        self.done = done
        self.random = random.Random(seed)
        self.base = self.previous = Switch()
        self.plan: list[tuple[int, Switch]] | None = None
        self.blocks: list[tuple[int, str, float, float]] = []
        self.shares: dict[str, float] = {}
        self.step_seconds = 0.0
        self.faults: list[float] = []
        self.failed: dict[str, str] = {}
        self.may_wait = True
        self.began = clock()
        self.warm_seconds, self.warm_steps = 0.0, 0  # of earlier runs of the script
        self.run_began()

    def run_began(self) -> None:
        """The script starts (again): its first steps warm up, an open block is void."""
        self.first_end: float | None = None
        self.warm = False
        self.entered: int | None = None
        self.blocks_then = len(self.blocks)

    def step_ended(self) -> None:
        if not self.warm:
            self._warm_up()
            if self.warm and self.plan is None:
                self._make_plan()
            if self.warm:
                self._enter()
            return
        self._advance()

    # ---- The warm-up -----------------------------------------------------------------

    def _warm_up(self) -> None:
        now = clock()
        if self.first_end is None:
            self.first_end, self.warm_from = now, self.loop.steps
            if not self.warm_steps:
                self.seconds_then = defaultdict(float, self.loop.seconds)
            return
        elapsed = self.warm_seconds + now - self.first_end
        steps = self.warm_steps + self.loop.steps - self.warm_from
        enough = steps >= WARM_STEPS and elapsed >= WARM_SECONDS
        again = self.plan is not None and self.loop.steps - self.warm_from >= 2
        self.warm = enough or again or (steps >= 2 and elapsed >= LONGEST_WARM)
        if self.warm and self.plan is None:
            took = {p: s - self.seconds_then[p] for p, s in self.loop.seconds.items()}
            rest = max(1e-6, elapsed - sum(took.get(name, 0.0) for name in EVENTS))
            self.step_seconds = rest / steps
            self.shares = {
                phase: seconds / (elapsed if phase in EVENTS else rest)
                for phase, seconds in took.items()
            }

    def _make_plan(self) -> None:
        self.warmed_up()
        self.steps = max(2, min(MOST_STEPS, round(BLOCK_SECONDS / self.step_seconds)))
        period = self.loop.period()
        if 0 < period <= LONGEST_PERIOD:  # each block pays for its share of restarts
            self.steps = period * max(1, round(self.steps / period))
        share = self.shares.get
        possible = [
            s for s in self.offered if s.possible(self.loop, lambda p: share(p, 0.0))
        ]
        self.plan = []
        for number in range(self.rounds):
            self.random.shuffle(possible)
            half = len(possible) // 2
            order = [self.base, *possible[:half], self.base, *possible[half:]]
            self.plan += [(number, switch) for switch in order]

    # ---- Blocks ----------------------------------------------------------------------

    def _enter(self) -> None:
        """Enters the switch of the plan's next block."""
        if not self.plan or self._is_over():
            self.done()
            return
        switch = self.plan[0][1]
        self._switch_to(switch)
        full_queues = self._full_queues() if switch is self.base else 0
        self.drop = max(switch.warm, full_queues)
        self.entered, self.entered_at = self.loop.steps, clock()

    def _switch_to(self, switch: Switch) -> None:
        self.previous = self.loop.switch
        if self.loop.switch is not switch:
            self.loop.switch.leave(self.loop)
            self.loop.switch = switch
            switch.enter(self.loop)

    def _full_queues(self) -> int:
        """Batches that workers have prefetched while a switch did not use them."""
        loader = self.loop.loader
        workers = getattr(loader, "num_workers", 0) or 0
        return 2 + workers * (loader.prefetch_factor or 0) if workers else 1

    def whole_rounds(self) -> int:
        return self.plan[0][0] if self.plan else 0

    def _is_over(self) -> bool:
        number = self.whole_rounds()
        late = clock() - self.began > self.seconds
        starts_a_round = not self.blocks or self.blocks[-1][0] != number
        return late and number >= LEAST_ROUNDS and starts_a_round

    def _is_short(self, elapsed: float, steps: int) -> bool:
        """Whether a block goes on: twice as fast, it lasts as long as without a switch.

        The first steps after slow ones can be slow, too.
        """
        share = 0.5 if steps == self.steps else 1.0
        return elapsed < share * self.steps * self.step_seconds and steps < MOST_STEPS

    def _event_seconds(self) -> float:
        return sum(self.loop.event_seconds().values())

    def _advance(self) -> None:
        assert self.plan is not None and self.entered is not None
        done = self.loop.steps - self.entered - self.drop
        if done == 0:
            settled = clock() - self.entered_at >= self.plan[0][1].settle
            if self.may_wait and not settled:
                self.drop += 1
                return
            self.loop.synchronize()
            self.loop.forward_backward = 0.0
            self.faults_then = page_faults()
            self.events_then, self.start = self._event_seconds(), clock()
        elif done > 0 and done % self.steps == 0:
            self.loop.synchronize()
            elapsed = clock() - self.start
            if self._is_short(elapsed, done):
                return
            took = (elapsed - self._event_seconds() + self.events_then) / done
            inner = self.loop.forward_backward / done
            number, switch = self.plan.pop(0)
            if switch is self.base:
                self.faults.append((page_faults() - self.faults_then) / done)
            if switch.used():
                self.blocks.append((number, switch.name, took, inner))
            else:
                self._drop(switch)
            self._enter()

    def failed_under(self, error: str) -> bool:
        """The script raised: drops the switch in force; False if none was.

        An iteration's statements after its optimizer step may still see what the
        switch before has left.
        """
        switch = self.loop.switch
        if self.entered is not None and self.loop.steps - self.entered <= 1:
            switch = self.previous if switch is self.base else switch
        if switch is self.base or self.plan is None:
            return False
        self.failed[switch.name] = error
        self._drop(switch)
        self.run_ended()
        return True

    def _drop(self, switch: Switch) -> None:
        self.plan = [entry for entry in self.plan or () if entry[1] is not switch]
        self.blocks = [block for block in self.blocks if block[1] != switch.name]

    def run_ended(self) -> None:
        """The script has ended: its objects go, so the switch in force is left."""
        if self.plan is None and self.first_end is not None:
            self.warm_seconds += clock() - self.first_end
            self.warm_steps += self.loop.steps - self.warm_from
        elif self.plan is not None and len(self.blocks) == self.blocks_then:
            self.steps = max(1, self.steps // 2)  # a run is too short for a block
            self.may_wait = False
        self.loop.switch.leave(self.loop)
        self.loop.switch = self.base
