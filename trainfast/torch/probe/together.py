"""Several counterfactuals as one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from trainfast.torch.probe.loop import Loop, Switch


class Together(Switch):
    """Several switches as one."""

    by_name = True

    def __init__(self, parts: Sequence[Switch]) -> None:
        self.parts = parts
        self.name = " + ".join(part.name for part in parts)
        self.entered: list[Switch] = []

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        if not all(part.possible(loop, share) for part in self.parts):
            return False
        self.warm = max(part.warm for part in self.parts)
        return True

    def enter(self, loop: Loop) -> None:
        for part in self.parts:
            part.enter(loop)
            self.entered.append(part)

    def leave(self, loop: Loop) -> None:
        while self.entered:
            self.entered.pop().leave(loop)

    def iterate(self, loop: Loop, loader: Any, original: Any) -> Any:
        for part in self.entered:
            original = partial(part.iterate, loop, original=original)
        return original(loader)

    def next_batch(self, loop: Loop, iterator: Any, original: Any) -> Any:
        for part in self.entered:
            original = partial(part.next_batch, loop, original=original)
        return original(iterator)

    def backward(self, loop: Loop, original: Any, args: Any, kwargs: Any) -> None:
        for part in self.entered:
            original = _nested(part.backward, loop, original)
        original(*args, **kwargs)

    def step(self, loop: Loop, original: Any, args: Any, kwargs: Any) -> Any:
        for part in self.entered:
            original = _nested(part.step, loop, original)
        return original(*args, **kwargs)


def _nested(method: Callable[..., Any], loop: Loop, original: Any) -> Any:
    return lambda *args, **kwargs: method(loop, original, args, kwargs)
