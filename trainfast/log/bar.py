"""`progress`: tqdm's bar around a loader, where somebody looks at it."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

T = TypeVar("T")
INTERVAL = 0.5  # seconds from one drawing to the next
# The same in a notebook without widgets, which keeps each drawing as a line.
LINE_INTERVAL = 10.0


class Progress(Generic[T]):
    """A loader with a bar. Made by `progress`."""

    def __init__(self, loader: Iterable[T], options: dict[str, Any]) -> None:
        self._loader, self._options = loader, options
        self._bar: Any = None
        self._shown: dict[str, Any] = {}
        self._late: tuple[list[str], Any] | None = None  # names, LateValues
        self._due = 0.0

    def __iter__(self) -> Iterator[T]:
        make, interval = _tqdm()
        if make is None:
            yield from self._loader
            return
        options = {"mininterval": interval, **self._options}
        with make(self._loader, **options) as self._bar:
            try:
                yield from self._bar
            finally:
                self._bar = self._late = None
                self._shown = {}

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def postfix(self, **values: Any) -> None:
        """Shows numbers behind the bar. No call waits for a GPU: values there are
        copied, and shown by a later call.

        Args:
            **values: numbers, strings, or tensors of one element, by name.
        """
        if self._bar is None:
            return
        if self._late is not None and self._late[1].has_come():
            names, late = self._late
            self._late = None
            self._show(dict(zip(names, late.read())))
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + INTERVAL
        on_device = {name: v for name, v in values.items() if _is_on_device(v)}
        if on_device:
            from trainfast.torch.late_values import LateValues

            self._late = list(on_device), LateValues(list(on_device.values()))
        here = {name: v for name, v in values.items() if name not in on_device}
        self._show({n: v.item() if hasattr(v, "item") else v for n, v in here.items()})

    def _show(self, values: dict[str, Any]) -> None:
        self._shown |= values
        self._bar.set_postfix(self._shown, refresh=False)  # with the next drawing


def progress(
    loader: Iterable[T], description: str | None = None, **options: Any
) -> Progress[T]:
    """tqdm's bar around a loader, drawn twice a second at most (in a notebook without
    widgets each ten seconds) and removed at its end.

        bar = trainfast.progress(loader, "epoch 1")
        for x, y in bar:
            ...
            bar.postfix(loss=loss)

    Nothing is drawn where the variable CI is set, where standard error is neither a
    terminal nor a notebook's, and without tqdm.

    Args:
        loader: what to iterate over.
        description: stands before the bar.
        **options: other arguments of tqdm, such as total.
    """
    own = {"leave": False, "dynamic_ncols": True}
    return Progress(loader, {**own, "desc": description, **options})


def _tqdm() -> tuple[Any, float]:
    """tqdm's class, or None where no bar is to be drawn, and the interval."""
    in_notebook = _is_notebook()
    if os.environ.get("CI") or not (_is_terminal() or in_notebook):
        return None, INTERVAL
    try:
        if in_notebook and find_spec("ipywidgets") is None:
            from tqdm import tqdm

            return tqdm, LINE_INTERVAL
        from tqdm import auto

        return auto.tqdm, INTERVAL
    except ImportError:
        return None, INTERVAL


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _is_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


def _is_on_device(value: Any) -> bool:
    return getattr(getattr(value, "device", None), "type", "cpu") != "cpu"
