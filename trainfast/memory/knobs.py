"""What each setting saves, and the largest batch: by estimating again with it."""

from collections.abc import Callable, Iterator
from typing import Any

from trainfast.memory.estimate import Estimate
from trainfast.report import Table

MIB = 1 << 20
_TRIES = 5


def savings(
    estimate: Estimate, progress: Callable[[str], None] | None = None
) -> dict[str, Estimate]:
    """The estimate anew with one setting changed, by the setting's name.

    A setting that the step refuses, or that changes nothing, is left out.
    """
    found = {}
    for name, changes in _settings(estimate):
        if progress is not None:
            progress(f"estimating: {name}")
        assert estimate.again is not None
        try:
            other = estimate.again(**changes)
        except Exception:  # such as a model that is not made of repeated blocks
            continue
        if estimate.total - other.total > MIB:
            found[name] = other
    return found


def _settings(estimate: Estimate) -> Iterator[tuple[str, dict[str, object]]]:
    used = estimate.settings
    if used.get("amp") is None:
        without_scaler = used.get("release_gradients")
        has_bf16 = used.get("capability", 0) >= 80
        amp = "bf16" if has_bf16 or without_scaler else "fp16"
        yield f"autocast to {amp}", {"amp": amp}
    if not used.get("checkpointing"):
        yield "trainfast.enable_checkpointing(model)", {"checkpointing": True}
    yield from _optimizers(used)
    if estimate.batch_size is not None and estimate.batch_size > 1:
        half = estimate.batch_size // 2
        yield f"batch {half}, twice the accumulation", {"batch_size": half}
    if used.get("capability") and not used.get("attention_patch"):
        yield 'trainfast.patch("attention")', {"attention_patch": True}
    if used.get("capability") and not used.get("expandable_segments"):
        yield "expandable_segments:True", {"expandable_segments": True}


def _optimizers(used: dict[str, Any]) -> Iterator[tuple[str, dict[str, object]]]:
    if used.get("optimizer") not in ("adamw", "adam", "trainfast"):
        return
    if used["optimizer"] != "trainfast":
        yield "trainfast.AdamW", {"optimizer": "trainfast"}
    coded = ("trainfast", {"state_dtype": "int8"})
    yield 'trainfast.AdamW(state_dtype="int8")', {"optimizer": coded}
    scaled = used.get("amp") == "fp16"  # and the scaler needs all gradients at once
    if not scaled and not used.get("release_gradients"):
        released = {"optimizer": "trainfast", "release_gradients": True}
        yield "trainfast.AdamW with release_gradients()", released


def savings_table(estimate: Estimate, found: dict[str, Estimate]) -> Table:
    rows = [
        (
            name,
            round(other.total / MIB),
            round((estimate.total - other.total) / MIB),
            other.verdict,
        )
        for name, other in sorted(found.items(), key=lambda item: item[1].total)
    ]
    columns = ("with", "total MiB", "saved MiB", "verdict")
    return Table(
        "What would save memory", columns, rows, empty="nothing that was tried"
    )


def largest_batch(
    estimate: Estimate, progress: Callable[[str], None] | None = None
) -> int | None:
    """The largest batch whose estimate fits, 0 where a single sample does not.

    None where the batch's size cannot be told or changed. Totals are linear in the
    batch but for the allocator's rounding, so a line is followed and corrected.
    """
    size = estimate.batch_size
    if size is None or estimate.again is None:
        return None
    totals = {size: estimate}
    fits = {0: True}

    def at(n: int) -> Estimate:
        if n not in totals:
            if progress is not None:
                progress(f"estimating: batch {n}")
            assert estimate.again is not None
            totals[n] = estimate.again(batch_size=n)
        fits[n] = totals[n].fits
        return totals[n]

    low, high = (size // 2, size) if size > 1 else (1, 2)
    try:
        for _ in range(_TRIES):
            one, two = at(low), at(high)
            slope = max(1.0, (two.total - one.total) / (high - low))
            guess = max(1, int(high + (estimate.capacity - two.total) / slope))
            if guess in fits:
                break
            low, high = sorted(
                (low if abs(low - guess) < abs(high - guess) else high, guess)
            )
        best = max(n for n, good in fits.items() if good)
        while best + 1 not in fits and best >= guess - 1 and at(best + 1).fits:
            best += 1
    except Exception:
        return None
    return best
