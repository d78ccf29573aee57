"""The probe inside of a running loop, as in a notebook: no script, no other process."""

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import torch

from trainfast.probe.report import Diagnosis, conclude
from trainfast.torch.probe import forward, loaders, training
from trainfast.torch.probe.hooks import keep_batch
from trainfast.torch.probe.loop import Loop, Switch, clock
from trainfast.torch.probe.result import measured
from trainfast.torch.probe.schedule import LEAST_ROUNDS, Schedule
from trainfast.torch.probe.settings import settings

_ROUNDS = 15


class Watch:
    """A loop that shows its batches and steps, and nothing else.

    Attributes:
        report: the diagnosis, once enough was measured.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        seconds: float,
        file: str,
    ) -> None:
        self.loader = loader
        self.report: Diagnosis | None = None
        self.began = clock()
        self.loop = Loop(file)
        self.loop.model = model
        self.loop.loader = loader if hasattr(loader, "dataset") else None
        self.optimizer = optimizer
        if optimizer is not None:
            self.loop.optimizers.append(optimizer)
            self._route(optimizer)
        offered: list[Switch] = [
            loaders.CachedBatches(),
            training.NoOptimizerStep(),
            training.FusedOptimizer(),
            training.TrainfastOptimizer(),
            training.NoAttentionWeights(),
            forward.ChannelsLast(),
            *settings(),
        ]
        self.schedule = Schedule(
            self.loop, offered, _ROUNDS, seconds, 0, lambda: None, self._finish
        )

    def _route(self, optimizer: torch.optim.Optimizer) -> None:
        """Sends the optimizer's steps through the switch in force."""
        self.own_step = vars(optimizer).get("step")  # a scheduler's wrapper
        original = optimizer.step

        def through(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        def step(*args: Any, **kwargs: Any) -> Any:
            loop, all_args = self.loop, (optimizer, *args)
            return loop.timed(
                "optimizer", loop.switch.step, loop, through, all_args, kwargs
            )

        optimizer.step = step  # type: ignore[method-assign]

    def batches(self) -> Iterator[Any]:
        """One epoch. An epoch keeps its length under every switch."""
        loop, iterator = self.loop, iter(self.loader)
        left = len(self.loader) if isinstance(self.loader, Sized) else -1
        loop.restarts.append(loop.steps)
        ended = False
        loop.switch.enter(loop)
        try:
            while left != 0:
                try:
                    batch = loop.timed(
                        "data", loop.switch.next_batch, loop, iterator, next
                    )
                except StopIteration:
                    break
                left -= 1
                if loop.keeps_batches and type(loop.switch) is Switch:
                    keep_batch(loop, batch)
                yield batch
            ended = True
        finally:
            if ended and self.report is None:
                loop.switch.leave(loop)  # it is entered again in the next epoch
            elif self.report is None:
                self.schedule.run_ended()
                self.schedule.run_began()

    @contextmanager
    def step(self) -> Iterator[None]:
        if self.report is not None:
            yield
            return
        try:
            yield
        except BaseException:
            self.schedule.run_ended()
            self.schedule.run_began()
            raise
        self.loop.steps += 1
        self.loop.steps_under[self.loop.switch.name] += 1
        self.schedule.step_ended()

    def _finish(self) -> None:
        self.conclude()
        print(self.report)

    def conclude(self) -> None:
        """Restores what was switched and makes the report."""
        self.give_up()
        self.loop.keeps_batches = False
        result = measured(self.loop, self.schedule, [(0, self.loop.steps, False)])
        script = self.loop.script
        self.report = conclude(script, [result], {}, clock() - self.began)

    def give_up(self) -> None:
        """Restores what was switched."""
        self.schedule.run_ended()
        if self.optimizer is not None:
            if self.own_step is None:
                del self.optimizer.step
            else:
                self.optimizer.step = self.own_step  # type: ignore[method-assign]

    def missing(self) -> str:
        """What is to be seen before there can be a report; empty if nothing is."""
        rounds = self.schedule.whole_rounds()
        if rounds >= LEAST_ROUNDS:
            return ""
        return f"{self.loop.steps} steps seen, {rounds} of {LEAST_ROUNDS} rounds"
