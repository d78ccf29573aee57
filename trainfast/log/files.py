"""Logs as CSV and as JSON lines.

Both open their file for each write, four times a second at most: a file that was moved,
deleted or put on a full disk in between is no special case. A write is undone where it
fails half way, and a line that a crash has left without its end is cut off by the next.
"""

import contextlib
import csv
import io
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from trainfast.log.target import Record

_OWN = ["step", "time"]
_BLOCK = 1 << 16
_BAD_TEXT = "backslashreplace"  # for half characters, which UTF-8 lacks


class _File:
    """A file of whole lines, of which the first begins with `mark`."""

    keeps_whole = True
    kind = mark = ""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = f"{self.kind} {os.fspath(path)}"
        self._path = os.path.realpath(path)

    def close(self) -> None:
        pass

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        """The file, made if it is not there, whose last line is whole.

        Raises:
            ValueError: it is another kind of file, which stays as it is.
        """
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        with open(self._path, "a+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size:
                file.seek(0)
                mark = self.mark.encode()
                begin = file.read(min(size, len(mark)))
                if not mark.startswith(begin):
                    raise ValueError(
                        f"the file is no log, since it does not begin with {self.mark}"
                    )
                whole = _whole_lines(file, size)
                if whole < size:
                    file.truncate(whole)
            yield file


class CsvWriter(_File):
    """Rows under a header. New names widen the file: it is written anew beside itself
    and renamed, so that each row has as many cells as the header."""

    kind, mark = "csv", "step,time"

    def write(self, records: Sequence[Record]) -> None:
        with self._open() as file:
            columns = _header(file)
        new = {name: None for r in records for name in r.values}
        new = {name: None for name in new if name not in columns}
        rows: list[list[Any]] = []
        if not columns:
            columns = [*_OWN, *new]
            rows = [columns]
        elif new:
            columns = [*columns, *new]
            self._widen(columns, len(new))
        rows += [[_cell(record, name) for name in columns] for record in records]
        with self._open() as file:
            _append(file, _csv_text(rows))

    def _widen(self, columns: list[str], added: int) -> None:
        partial = self._path + ".partial"
        end = b"," * added + b"\n"
        try:
            with open(self._path, "rb") as old, open(partial, "wb") as wider:
                old.readline()
                wider.write(_csv_text([columns]).encode())
                for line in old:
                    wider.write(line.rstrip(b"\r\n") + end)
                wider.flush()
                os.fsync(wider.fileno())
            shutil.copymode(self._path, partial)
            os.replace(partial, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise


class JsonlWriter(_File):
    """A JSON object a line. NaN and the infinities, which JSON lacks, are the strings
    "NaN", "Infinity" and "-Infinity", which `float()` reads."""

    keeps_whole = True

    kind, mark = "jsonl", '{"step": '

    def write(self, records: Sequence[Record]) -> None:
        text = "".join(map(_json_line, records))
        with self._open() as file:
            _append(file, text)


def _cell(record: Record, name: str) -> Any:
    if name in _OWN:
        return record.step if name == "step" else round(record.time, 3)
    value = record.values.get(name, "")
    # One line a row, so that a widened file can be written line by line.
    return " ".join(value.splitlines()) if isinstance(value, str) else value


def _csv_text(rows: list[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _json_line(record: Record) -> str:
    line = {"step": record.step, "time": round(record.time, 3), **record.values}
    try:
        return json.dumps(line, allow_nan=False) + "\n"
    except ValueError:
        named = {name: _named(value) for name, value in line.items()}
        return json.dumps(named) + "\n"


def _named(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


def _whole_lines(file: Any, size: int) -> int:
    """Bytes up to the end of the last line that has one."""
    while size > 0:
        begin = max(0, size - _BLOCK)
        file.seek(begin)
        found = file.read(size - begin).rfind(b"\n")
        if found >= 0:
            return int(begin + found + 1)
        size = begin
    return 0


def _header(file: Any) -> list[str]:
    """The columns; [] for an empty file."""
    file.seek(0)
    reader = io.BufferedReader(file)
    line = reader.readline() if os.fstat(file.fileno()).st_size else b""
    reader.detach()  # else it would close the file
    return next(csv.reader([line.decode()])) if line else []


def _append(file: Any, text: str) -> None:
    size = os.fstat(file.fileno()).st_size
    view = memoryview(text.encode(errors=_BAD_TEXT))
    try:
        while view:
            view = view[file.write(view) :]
    except BaseException:
        with contextlib.suppress(OSError):  # the next write cuts a torn line off
            file.truncate(size)
        raise
