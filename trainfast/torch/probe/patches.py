"""Switches that put trainfast's functions in the place of torch's."""

from collections.abc import Callable
from typing import Any

from trainfast.patching import is_patched, patch
from trainfast.stats import stats
from trainfast.torch.probe.loop import Loop, Switch


class Patched(Switch):
    """`trainfast.patch` of one capability. For AdamW it comes too late in a running
    loop: see `TrainfastOptimizer`."""

    by_name = True

    def __init__(self, capability: str) -> None:
        self.capability = capability
        self.name = f"trainfast {capability}"
        self.patch: Any = None
        self.calls_then: dict[str, int] = {}

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        return not is_patched(self.capability)

    def enter(self, loop: Loop) -> None:
        self.calls_then = self._calls()
        self.patch = patch(self.capability)
        self.patch.__enter__()

    def leave(self, loop: Loop) -> None:
        self.patch.__exit__(None, None, None)

    def used(self) -> bool:
        return self._calls() != self.calls_then

    def _calls(self) -> dict[str, int]:
        return stats().calls.get(self.capability, {})
