"""Targets that fail, block or are slow: one warning, and an end within a second."""

import threading
import time
import warnings

import pytest

import trainfast
from tests.log.test_logger import Kept, python, use_writer
from trainfast.log import target


class Raises(Kept):
    name, keeps_whole = "raises", False

    def write(self, records):
        self.records += records
        raise ValueError("the service said no")


class Exits(Raises):
    def write(self, records):
        raise SystemExit("from a library")


class Blocks(Kept):
    name = "blocks"

    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def write(self, records):
        self.go.wait()
        super().write(records)


def texts(seen):
    return [str(warning.message) for warning in seen]


def test_writer_that_raises_warns_once(monkeypatch):
    made = Raises()
    logger = use_writer(monkeypatch, made)
    with pytest.warns(UserWarning) as seen:
        for step in range(10):
            logger.log({"a": step}, step)
            time.sleep(0.03)
        logger.close()
    assert texts(seen) == [
        "logging to raises failed with ValueError: the service said no; nothing more "
        "is logged there",
        "logging to raises dropped 10 records",
    ]
    assert seen[0].filename == __file__ and len(made.records) < 10


def test_library_that_exits_ends_its_target_alone(monkeypatch):
    logger = use_writer(monkeypatch, Exits())
    logger.log({"a": 1}, 0)
    with pytest.warns(UserWarning) as seen:
        logger.close()
    assert "failed with SystemExit: from a library" in texts(seen)[0]


def test_blocked_writer_holds_nothing_up(monkeypatch, tmp_path):
    """Neither the run nor the other targets; close() waits for a second."""
    made = Blocks()
    monkeypatch.setattr(target, "CAPACITY", 100)
    monkeypatch.setattr(trainfast.log.logger, "CsvWriter", lambda path: made)
    other = tmp_path / "log.jsonl"
    logger = trainfast.Logger(csv="", jsonl=other)
    with pytest.warns(UserWarning) as seen:
        for step in range(90):
            logger.log({"a": step}, step)
        time.sleep(0.6)  # the thread takes these, and blocks
        for step in range(90, 250):
            logger.log({"a": step}, step)
            time.sleep(0.005)
        began = time.monotonic()
        logger.close()
    assert 0.9 < time.monotonic() - began < 3
    made.go.set()
    assert texts(seen) == [
        "logging to blocks is slower than the run; records are dropped",
        "logging to blocks was still busy with 190 records to write; "
        "close(timeout=30) waits longer",
        "logging to blocks dropped 60 records",
    ]
    assert len(other.read_text().splitlines()) == 250


def test_close_waits_as_long_as_it_is_told(monkeypatch):
    made = Blocks()
    logger = use_writer(monkeypatch, made)
    logger.log({"a": 1}, 0)
    threading.Timer(1.3, made.go.set).start()
    with warnings.catch_warnings(action="error"):
        logger.close(timeout=60)
    assert made.closed


def test_slow_close_is_told(monkeypatch):
    made = Kept()
    made.close = lambda: time.sleep(3)
    logger = use_writer(monkeypatch, made)
    logger.log({"a": 1}, 0)
    with pytest.warns(UserWarning, match="was still busy at its end"):
        logger.close(timeout=0.1)


def test_process_ends_while_a_writer_blocks():
    code = """
import threading, time
import trainfast
from trainfast.log import services
from trainfast.log.files import JsonlWriter
JsonlWriter.write = lambda self, records: threading.Event().wait()
logger = trainfast.Logger(jsonl="nowhere")
logger.log({"a": 1}, 0)
time.sleep(0.5)
print(time.time())
"""
    out, err = python(code)
    assert time.time() - float(out) < 5
    assert "still busy with 1 record to write" in err


def test_thread_that_can_not_start_is_told(monkeypatch):
    logger = use_writer(monkeypatch, Kept())

    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.warns(UserWarning, match="can't start new thread; nothing more is"):
        logger.log({"a": 1}, 0)
    with pytest.warns(UserWarning, match="dropped 1 record$"):
        logger.close()
