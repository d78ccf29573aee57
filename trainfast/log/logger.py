"""`Logger`: numbers of a run to files and services, without holding up the run."""

import os
import sys
import time
import warnings
import weakref
from collections.abc import Mapping
from importlib.util import find_spec
from os import PathLike
from typing import Any

import numpy as np

from trainfast.log.files import CsvWriter, JsonlWriter
from trainfast.log.services import TensorBoardWriter, TrackioWriter, WandbWriter
from trainfast.log.target import Record, Targets, Writer
from trainfast.report import one_line

_PLAIN = (float, int, bool, str)
_TIMEOUT = 1.0  # seconds that the end of a run may be held up
_OWN = ("step", "time")  # columns of the files

Path = str | PathLike[str]


class Logger:
    """Logs numbers of a run to several targets at once.

        with trainfast.Logger(csv="log.csv", tensorboard="runs/first") as logger:
            for step, batch in enumerate(loader):
                ...
                logger.log({"train_loss": loss, "learning_rate": lr}, step)

    Each target has a queue and a thread of its own. A target that fails gives one
    warning and never ends the run; one that is too slow drops records and says how
    many. Only the process that made the logger writes; of several ranks only rank 0.

    Args:
        csv: a file with the columns step, time and one for each name; a file that is
            there is appended to.
        jsonl: a file with a JSON object a line; likewise.
        tensorboard: a folder for event files.
        wandb: arguments of `wandb.init`, such as {"project": "x"}.
        trackio: arguments of `trackio.init`.

    Raises:
        ImportError: a target's package is not installed.
    """

    def __init__(
        self,
        *,
        csv: Path | None = None,
        jsonl: Path | None = None,
        tensorboard: Path | None = None,
        wandb: Mapping[str, Any] | None = None,
        trackio: Mapping[str, Any] | None = None,
    ) -> None:
        packages = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}
        for package, argument in packages.items():
            if argument is not None and find_spec(package) is None:
                raise ImportError(
                    f"`{package}` needs the package {package}: pip install {package}",
                    name=package,
                )
        writers: list[Writer] = []
        if csv is not None:
            writers.append(CsvWriter(csv))
        if jsonl is not None:
            writers.append(JsonlWriter(jsonl))
        if tensorboard is not None:
            writers.append(TensorBoardWriter(tensorboard))
        if wandb is not None:
            writers.append(WandbWriter(wandb))
        if trackio is not None:
            writers.append(TrackioWriter(trackio))
        self._targets = Targets([] if _is_other_rank() else writers)
        self._names: set[str] = set()  # that were found right
        self._is_told = False
        # Also where close() is never called: at the end of the logger or the process.
        self._finalizer = weakref.finalize(self, _close, self._targets, _TIMEOUT)

    def __repr__(self) -> str:
        if not hasattr(self, "_finalizer"):
            return one_line(self)
        targets = [target.writer.name for target in self._targets.targets]
        return one_line(self, targets=targets, closed=self.closed)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Logs numbers of one step. Nothing waits, neither for a target nor for a GPU:
        values on a GPU are copied and read when the next call comes.

        Args:
            values: by name: numbers, strings (not for TensorBoard), and arrays and
                tensors of one element. They count as they are at this moment.
            step: of the run; targets such as W&B want it to grow.

        Raises:
            ValueError: a value has several elements, or a name can't be a column's.
            TypeError: a value is neither a number nor a string, or a name no string.
        """
        kept: dict[str, Any] = {}
        names = self._names
        late: list[Any] = []
        for name, value in values.items():
            if name not in names:
                self._check_name(name)
            if type(value) is not float and type(value) is not int:
                value = _plain(name, value)
                if type(value) not in _PLAIN:  # a tensor on a device
                    late.append(value)
                    value = None
            kept[name] = value
        if type(step) is not int:
            step = _index(step)
        targets = self._targets
        if not self._finalizer.alive or os.getpid() != targets.process:
            self._tell_why_not()
            return
        record = Record(step, time.time(), kept)
        targets.put(record, _late_values(late) if late else None)
        for text in targets.warnings():
            warnings.warn(text, stacklevel=2)

    def close(self, timeout: float = _TIMEOUT) -> None:
        """Writes what waits, and closes the targets.

        Args:
            timeout: seconds to wait for all targets together; what they could not do by
                then is told as a warning.
        """
        if self._finalizer.detach():
            _close(self._targets, timeout, stacklevel=3)

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_name(self, name: Any) -> None:
        if not isinstance(name, str):
            raise TypeError(f"names of values must be strings, got {name!r}")
        if name in _OWN or not name.isprintable() or not name:
            raise ValueError(
                f"{name!r} can't be the name of a value: it must be printable, and "
                "neither 'step' nor 'time', which each record has"
            )
        self._names.add(name)

    def _tell_why_not(self) -> None:
        if not self._is_told:
            self._is_told = True
            closed = not self._finalizer.alive
            why = "it is closed" if closed else "it belongs to another process"
            text = f"nothing is logged by this logger: {why}"
            warnings.warn(text, stacklevel=3)


def _close(targets: Targets, timeout: float, stacklevel: int = 1) -> None:
    for text in targets.close(timeout):
        warnings.warn(text, stacklevel=stacklevel)


def _is_other_rank() -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available():
        from trainfast.torch.ranks import is_distributed, rank

        if is_distributed():
            return rank() > 0
    return os.environ.get("RANK", "0") != "0"  # of torchrun and accelerate


def _plain(name: str, value: Any) -> Any:
    """A number or string of Python, or a one-element tensor on a device."""
    if type(value) in _PLAIN:
        return value
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise _several(name, tuple(value.shape))
        if value.is_complex():
            raise _no_number(name, value)
        return value if value.device.type != "cpu" else value.item()
    if isinstance(value, np.ndarray | np.generic):
        if value.size != 1:
            raise _several(name, value.shape)
        value = value.item()
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise _no_number(name, value)


def _several(name: str, shape: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"the value of {name!r} must have one element, got the shape {shape}; log its "
        "mean, or each element by a name of its own"
    )


def _no_number(name: str, value: Any) -> TypeError:
    return TypeError(
        f"the value of {name!r} must be a number or a string, got "
        f"{type(value).__name__}; log each number by a name of its own"
    )


def _index(step: Any) -> int:
    try:
        return int(step.__index__())
    except (AttributeError, TypeError):
        raise TypeError(f"`step` must be an integer, got {step!r}") from None


def _late_values(tensors: list[Any]) -> Any:
    from trainfast.torch.late_values import LateValues

    return LateValues(tensors)
