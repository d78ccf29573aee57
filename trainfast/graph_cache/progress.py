"""The progress bar of a build: tqdm's, if it is installed.

`tqdm.auto` draws a widget in a notebook and text in a terminal. Without tqdm nothing is
shown.
"""

from types import TracebackType
from typing import Any


class Progress:
    """Counts graphs; shows a bar with rate and remaining time if `shown`."""

    def __init__(self, shown: bool, total: int | None, what: str = "graphs") -> None:
        self._bar: Any = None
        if shown:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                return
            bar = tqdm(total=total, unit=f" {what}", dynamic_ncols=True)
            self._bar = None if bar.disable else bar  # by TQDM_DISABLE

    def reused(self) -> None:
        """One more that was there already; the rate and the remaining time are not
        about it."""
        if self._bar is not None:
            self._bar.initial += 1
            self._bar.update(1)

    def made(self, n: int) -> None:
        if self._bar is not None:
            self._bar.update(n)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
