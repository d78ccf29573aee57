"""Counts calls of kernels, and fallbacks to the framework's own path."""

from collections.abc import Callable
from typing import Any

from trainfast.report import Report, Table

_NOTHING = (
    "Nothing has run yet. If a step has: optimizers that were made before "
    "trainfast.patch() stay torch's."
)
_calls: dict[tuple[str, str], int] = {}
_fallbacks: dict[tuple[str, str], int] = {}
_others: list[Callable[[bool], dict[tuple[str, str], int]]] = []


def count_call(capability: str, backend: str = "") -> None:
    """Counts one call of a kernel, for adapters; `backend` if the caller knows it."""
    _count(_calls, (capability, backend))


def count_fallback(capability: str, reason: str) -> None:
    """Counts one use of the framework's own path (or an extra copy), for adapters."""
    _count(_fallbacks, (capability, reason))


def add_fallbacks(counted: Callable[[bool], dict[tuple[str, str], int]]) -> None:
    """Adds fallbacks that are counted elsewhere, as in C. `counted(reset)` returns the
    counts by capability and reason, and sets them to 0 if `reset` is true."""
    _others.append(counted)


class CallTally:
    """Counts a user's call once for each backend and reason, however many passes it
    has."""

    __slots__ = ("_capability", "_counted")

    def __init__(self, capability: str) -> None:
        self._capability = capability
        self._counted: list[str] = []

    def count_call(self, backend: str) -> None:
        if backend not in self._counted:
            self._counted.append(backend)
            count_call(self._capability, backend)

    def count_fallback(self, reason: str) -> None:
        if reason not in self._counted:
            self._counted.append(reason)
            count_fallback(self._capability, reason)


def _count(counts: dict[tuple[str, str], int], key: tuple[str, str]) -> None:
    # Exact between threads without a lock: CPython releases the GIL only at calls and
    # backward jumps, so not between the read and the write of this line.
    try:
        counts[key] += 1
    except KeyError:
        counts.setdefault(key, 0)
        counts[key] += 1


def reset_stats() -> None:
    """Clears all counts."""
    _calls.clear()
    _fallbacks.clear()
    for counted in _others:
        counted(True)


def stats() -> "StatsReport":
    """The calls and fallbacks of this process so far.

    The report is a snapshot: `calls` and `fallbacks` are nested dicts of counts by
    capability ("adamw", "amp", "attention", "clip", "pyg") and then by backend, or by
    the reason why the framework's own path ran or an array was copied. In a compiled
    function attention's fallbacks are counted when it is traced.
    """
    fallbacks = _fallbacks.copy()
    for counted in _others:
        fallbacks |= {key: n for key, n in counted(False).items() if n}
    return StatsReport(_nested(_calls), _nested(fallbacks))


class StatsReport(Report):
    """The counts at one moment; print it, or use `calls` and `fallbacks`."""

    def __init__(
        self, calls: dict[str, dict[str, int]], fallbacks: dict[str, dict[str, int]]
    ) -> None:
        self.calls = calls
        self.fallbacks = fallbacks

    def tables(self) -> list[Table]:
        return [
            Table("calls", ("capability", "backend", "calls"), _flat(self.calls)),
            Table(
                "fallbacks", ("capability", "reason", "calls"), _flat(self.fallbacks)
            ),
        ]

    def text(self, width: int | None = None) -> str:
        text = super().text(width)
        return text if self.calls or self.fallbacks else f"{text}\n{_NOTHING}"

    def _repr_html_(self) -> str:
        from html import escape

        html = super()._repr_html_()
        return (
            html if self.calls or self.fallbacks else f"{html}<p>{escape(_NOTHING)}</p>"
        )

    def to_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "fallbacks": self.fallbacks}


def _nested(counts: dict[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for (capability, detail), count in sorted(counts.copy().items()):
        nested.setdefault(capability, {})[detail] = count
    return nested


def _flat(nested: dict[str, dict[str, int]]) -> list[tuple[Any, ...]]:
    return [(outer, key, n) for outer, row in nested.items() for key, n in row.items()]
