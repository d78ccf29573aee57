"""Logs to TensorBoard, W&B and trackio.

Each is imported and set up with the first record, in the thread of its target: that
takes a second, and without a network minutes.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from trainfast.log.target import Record


class TensorBoardWriter:
    """Event files, by tensorboard's own writer, which needs no torch."""

    keeps_whole = False

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.name = f"tensorboard {os.fspath(folder)}"
        self._folder = os.fspath(folder)
        if "://" not in self._folder:  # a store, which fsspec knows
            self._folder = os.path.abspath(self._folder)
        self._events: Any = None

    def write(self, records: Sequence[Record]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._events is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._events = EventFileWriter(self._folder)
        for step, time, values in records:
            scalars = [
                Summary.Value(tag=name, simple_value=float(value))
                for name, value in values.items()
                if not isinstance(value, str)
            ]
            summary = Summary(value=scalars)
            self._events.add_event(Event(wall_time=time, step=step, summary=summary))
        self._events.flush()

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


class _Run:
    """A run of W&B or trackio, whose calls are the same."""

    keeps_whole = False

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = dict(arguments)
        self._run: Any = None

    def _start(self) -> Any:
        raise NotImplementedError

    def write(self, records: Sequence[Record]) -> None:
        if self._run is None:
            self._run = self._start()
        for record in records:
            self._run.log(dict(record.values), step=record.step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class WandbWriter(_Run):
    name = "wandb"

    def _start(self) -> Any:
        import wandb

        return wandb.init(**self._arguments)


class TrackioWriter(_Run):
    name = "trackio"

    def _start(self) -> Any:
        import trackio

        return trackio.init(**self._arguments)
