"""A counterfactual: one thing that the probe changes in a running training loop."""

from collections.abc import Callable
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
        alone: needs a process of its own, because a mistake of the script under the
            switch could outlast it.
    """

    name = "base"
    warm = 1
    alone = False

    def possible(self, loop: "Loop", share: Callable[[str], float]) -> bool:
        """Whether the switch applies here and could gain anything.

        Args:
            loop: the loop after its warm-up.
            share: the share of the time that a phase has taken.
        """
        return True

    def enter(self, loop: "Loop") -> None: ...

    def leave(self, loop: "Loop") -> None: ...

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
