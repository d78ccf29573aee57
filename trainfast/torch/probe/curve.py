"""Runs the first steps of a script under a configuration and records their losses.

    python -m trainfast.torch.probe.curve

The job is in the environment, as that of `trainfast.torch.probe.child`. Capabilities
that it names are patched before the script starts. Switches are entered after the first
step: before it there is no model or optimizer.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from trainfast.patching import patch
from trainfast.torch.probe import hooks
from trainfast.torch.probe.child import Child, begin, switches, write
from trainfast.torch.probe.loop import Loop, Switch
from trainfast.torch.probe.together import Together


class Recorder(Switch):
    """Keeps the loss of each backward pass."""

    name = "losses"

    def __init__(self) -> None:
        self.losses: list[list[float]] = [[]]  # by optimizer step

    def backward(self, loop: Loop, original: Any, args: Any, kwargs: Any) -> None:
        loss = args[0] if args else kwargs["tensors"]
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self.losses[-1].append(float(loss.detach()))
        original(*args, **kwargs)


class Curve(Child):
    """A script whose losses are recorded."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__({**job, "switches": [], "rounds": 0, "seconds": 0, "seed": 0})
        self.names: list[str] = job["switches"]
        self.recorder = Recorder()
        self.loop.switch = self.recorder

    def run(self) -> None:
        hooks.install(self.loop, self.step_ended)
        hooks.find_model(self.loop)
        error = self.run_once()
        self.finish(error)

    def step_ended(self) -> None:
        if self.loop.steps == 1 and self.names:
            self.loop.switch = Together([self.recorder, *switches(self.names)])
            self.loop.switch.enter(self.loop)
        if self.loop.steps == self.job["steps"]:
            self.finish()
        self.recorder.losses.append([])

    def finish(
        self, error: str | None = None, backwards: int = 0, cut: bool = False
    ) -> None:
        """Writes the mean loss of each step's backward passes and ends the process."""
        losses = [sum(step) / len(step) for step in self.recorder.losses if step]
        write(self.job, {"losses": losses, "error": error})


def _seed(offset: int) -> None:
    """Gives this process a seed, and adds the offset to those that the script sets."""
    torch.manual_seed(offset)
    random.seed(offset)
    np.random.seed(offset)
    if offset:
        torch.manual_seed = _shifted(torch.manual_seed, offset)
        random.seed = _shifted(random.seed, offset)
        np.random.seed = _shifted(np.random.seed, offset)
        np.random.default_rng = _shifted(np.random.default_rng, offset)


def _shifted(seed: Callable[..., Any], offset: int) -> Callable[..., Any]:
    def shifted(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (args[0] + offset, *args[1:])
        return seed(*args, **kwargs)

    return shifted


def main() -> None:
    job = begin()
    if job["patches"]:
        patch(*job["patches"])
    _seed(job["offset"])
    Curve(job).run()


if __name__ == "__main__":
    main()
