"""A counterfactual: one thing that the probe changes in a running training loop."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainfast.torch.probe.loop import Loop


class Switch:
    """Changes nothing: what each counterfactual is compared with.

    A counterfactual overrides the methods whose part of the loop it changes. Each of
    these gets torch's own function as `original`. Everything must be undone by `leave`:
    blocks with and without the switch interleave in one process.

    Attributes:
        name: unique in a plan.
        warm: optimizer steps to drop after the switch has been entered.
        by_name: tried only where a plan names it: it takes long, or needs a process of
            its own, because a mistake of the script under it could outlast it.
    """

    name = "base"
    warm = 1
    by_name = False

    def possible(self, loop: "Loop", share: Callable[[str], float]) -> bool:
        """Whether the switch applies here and could gain anything.

        Args:
            loop: the loop after its warm-up.
            share: the share of the time that a phase has taken.
        """
        return True

    def enter(self, loop: "Loop") -> None: ...

    def leave(self, loop: "Loop") -> None: ...

    def used(self) -> bool:
        """Whether the steps since `enter` met what the switch changes."""
        return True

    def iterate(self, loop: "Loop", loader: Any, original: Any) -> Any:
        return original(loader)

    def next_batch(self, loop: "Loop", iterator: Any, original: Any) -> Any:
        return original(iterator)

    def backward(self, loop: "Loop", original: Any, args: Any, kwargs: Any) -> None:
        original(*args, **kwargs)

    def step(self, loop: "Loop", original: Any, args: Any, kwargs: Any) -> Any:
        return original(*args, **kwargs)

    def runs_statement(self, number: int) -> bool:
        return True


class Together(Switch):
    """Several switches as one."""

    by_name = True

    def __init__(self, parts: Sequence[Switch]) -> None:
        self.parts = parts
        self.name = " + ".join(part.name for part in parts)
        self.entered: list[Switch] = []

    def possible(self, loop: "Loop", share: Callable[[str], float]) -> bool:
        if not all(part.possible(loop, share) for part in self.parts):
            return False
        self.warm = max(part.warm for part in self.parts)
        return True

    def enter(self, loop: "Loop") -> None:
        for part in self.parts:
            part.enter(loop)
            self.entered.append(part)

    def leave(self, loop: "Loop") -> None:
        while self.entered:
            self.entered.pop().leave(loop)

    def iterate(self, loop: "Loop", loader: Any, original: Any) -> Any:
        for part in self.entered:
            original = partial(part.iterate, loop, original=original)
        return original(loader)

    def next_batch(self, loop: "Loop", iterator: Any, original: Any) -> Any:
        for part in self.entered:
            original = partial(part.next_batch, loop, original=original)
        return original(iterator)

    def backward(self, loop: "Loop", original: Any, args: Any, kwargs: Any) -> None:
        for part in self.entered:
            original = _nested(part.backward, loop, original)
        original(*args, **kwargs)

    def step(self, loop: "Loop", original: Any, args: Any, kwargs: Any) -> Any:
        for part in self.entered:
            original = _nested(part.step, loop, original)
        return original(*args, **kwargs)


def _nested(method: Callable[..., Any], loop: "Loop", original: Any) -> Any:
    return lambda *args, **kwargs: method(loop, original, args, kwargs)
