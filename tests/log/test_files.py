"""CSV and JSON lines: what is in them, also when a run goes on and after faults."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

import trainfast
from tests.log.test_logger import lines, python
from trainfast.log import files, target
from trainfast.log.files import CsvWriter, JsonlWriter
from trainfast.log.target import Record


def records(*values, start=0):
    return [Record(start + i, 1.8e9, v) for i, v in enumerate(values)]


def rows(path):
    """The table without its times; each row has as many cells as the header."""
    table = list(csv.reader(path.read_text().splitlines()))
    assert {len(row) for row in table} == {len(table[0])}
    return [[row[0], *row[2:]] for row in table]


def test_csv_widens_when_names_come(tmp_path):
    path = tmp_path / "new" / "log.csv"
    writer = CsvWriter(path)
    writer.write(records({"loss": 0.5, "name": 'a,"b"\nc'}))
    os.chmod(path, 0o640)
    writer.write(records({"loss": math.nan}, {"ade": 1e-7, "ok": True}, start=1))
    writer.write(records({"loss": -math.inf}, start=3))
    assert path.read_text().splitlines() == [
        "step,time,loss,name,ade,ok",
        '0,1800000000.0,0.5,"a,""b"" c",,',
        "1,1800000000.0,nan,,,",
        "2,1800000000.0,,,1e-07,True",
        "3,1800000000.0,-inf,,,",
    ]
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(path.parent) == ["log.csv"]


def test_half_characters_are_written_as_their_codes(tmp_path):
    with trainfast.Logger(csv=tmp_path / "csv", jsonl=tmp_path / "jsonl") as logger:
        logger.log({"a": "b\udc80"}, 0)
    assert rows(tmp_path / "csv") == [["step", "a"], ["0", "b\\udc80"]]
    assert lines(tmp_path / "jsonl") == [{"step": 0, "a": "b\udc80"}]


def test_link_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "log.csv"
    link.symlink_to(tmp_path / "there" / "real.csv")
    writer = CsvWriter(link)
    writer.write(records({"a": 1}))
    writer.write(records({"b": 1}, start=1))
    assert link.is_symlink() and rows(link)[0] == ["step", "a", "b"]


def test_json_has_named_infinities(tmp_path):
    path = tmp_path / "log.jsonl"
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}
    JsonlWriter(path).write(records(values))

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads(path.read_text(), parse_constant=refuse)
    assert line["a"] == "NaN" and line["d"] == 1.0
    assert (float(line["b"]), float(line["c"])) == (math.inf, -math.inf)


def test_runs_that_go_on_append(tmp_path):
    paths = {"csv": tmp_path / "log.csv", "jsonl": tmp_path / "log.jsonl"}
    for start, name in ((0, "a"), (2, "b")):
        with trainfast.Logger(**paths) as logger:
            logger.log({"loss": 0.5}, start)
            logger.log({"loss": 0.5, name: 1}, start + 1)
    assert rows(paths["csv"]) == [
        ["step", "loss", "a", "b"],
        ["0", "0.5", "", ""],
        ["1", "0.5", "1", ""],
        ["2", "0.5", "", ""],
        ["3", "0.5", "", "1"],
    ]
    assert [line["step"] for line in lines(paths["jsonl"])] == [0, 1, 2, 3]


@pytest.mark.parametrize("cut", range(1, 45, 3))
@pytest.mark.parametrize("kind", [CsvWriter, JsonlWriter])
def test_torn_line_is_cut_off(kind, cut, tmp_path):
    """Wherever a crash has torn it, in the header too."""
    path = tmp_path / "log"
    writer = kind(path)
    writer.write(records({"a": 1.25}, {"a": 2.5}))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    writer.write(records({"a": 3}, start=2))
    kept = path.read_text().splitlines()
    before = whole.decode().splitlines()
    assert kept[:-1] == before[: len(kept) - 1] and "3" in kept[-1]
    if kind is CsvWriter:
        assert rows(path)[0] == ["step", "a"]
    else:
        assert [list(line) for line in lines(path)] == [["step", "a"]] * len(kept)


def test_long_torn_line_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_BLOCK", 16)
    path = tmp_path / "log"
    JsonlWriter(path).write(records({"a": 1}))
    whole = path.read_text()
    path.write_text(whole + '{"step": 1, "text": "' + "x" * 100)
    JsonlWriter(path).write([])
    assert path.read_text() == whole


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("text", ["epoch,loss\n1,0.5", "{}", "torn\n{", "\0\0"])
def test_other_files_stay_as_they_are(kind, text, tmp_path):
    path = tmp_path / "log"
    path.write_text(text)
    logger = trainfast.Logger(**{kind: path})
    logger.log({"a": 1}, 0)
    with pytest.warns(UserWarning) as seen:
        logger.close()
    said = [str(warning.message) for warning in seen]
    assert "ValueError: the file is no log, since it does not begin with" in said[0]
    assert "nothing more is logged there" in said[0] and "dropped 1 record" in said[1]
    assert path.read_text() == text


# ---- Faults --------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/dev/full", "/proc/self/log", "/dev/null/log"])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_place_that_can_not_be_written_warns_once(kind, path, monkeypatch):
    monkeypatch.setattr(target, "PERIOD", 0.01)
    logger = trainfast.Logger(**{kind: path})
    with pytest.warns(UserWarning) as seen:
        for step in range(20):
            logger.log({"a": step}, step)
            time.sleep(0.01)
        logger.close()
    said = [str(warning.message) for warning in seen]
    assert len(said) == 2
    assert said[0].startswith(f"logging to {kind} {path} failed with ")
    assert "Error: [Errno" in said[0] and said[0].endswith("; it is tried again")
    assert said[1] == f"logging to {kind} {path} dropped 20 records"


@pytest.fixture
def not_root():
    """Root may write everywhere: for the test the process is somebody else's."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    yield
    os.seteuid(was)


def test_read_only_folder_warns(not_root):
    logger = trainfast.Logger(csv="/usr/lib/log.csv")
    logger.log({"a": 1}, 0)
    with pytest.warns(UserWarning, match="PermissionError"):
        logger.close()


def test_place_that_comes_back_gets_all_records(tmp_path, monkeypatch):
    monkeypatch.setattr(target, "PERIOD", 0.01)
    folder = tmp_path / "mount"
    folder.write_text("a file, so that the folder can't be made")
    logger = trainfast.Logger(csv=folder / "log.csv")
    logger.log({"a": 0}, 0)
    (own,) = logger._targets.targets
    wait_until(lambda: own.warnings)
    folder.unlink()
    with pytest.warns(UserWarning, match="FileExistsError.* it is tried again") as seen:
        for step in range(1, 5):
            logger.log({"a": step, f"new{step}": 1}, step)
        logger.close()
    assert len(seen) == 1
    assert [row[0] for row in rows(folder / "log.csv")] == ["step", *"01234"]


def wait_until(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_disk_that_fills_up_leaves_whole_lines(kind, tmp_path):
    """A limit on the size of files stands for the disk: writes stop within a line. When
    there is room again, each record is there once."""
    path = tmp_path / "log"
    code = f"""
import resource, signal, time, warnings
import trainfast
from trainfast.log import target
target.PERIOD = 0.01
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
logger = trainfast.Logger({kind}={str(path)!r})
for step in range(100):
    logger.log({{"loss": step / 7, "text": "x" * step}}, step)
    time.sleep(0.002)
with open({str(path)!r}) as file:
    print(file.read().endswith("\\n"))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
"""
    out, err = python(code)
    assert out == "True\n"
    assert err.count("Warning") == 1 and "File too large; it is tried again" in err
    steps = rows(path)[1:] if kind == "csv" else lines(path)
    got = [int(s[0]) if kind == "csv" else s["step"] for s in steps]
    assert got == list(range(100))


def test_killed_while_a_file_is_widened_it_is_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "log.csv"
    writer = CsvWriter(path)
    writer.write(records({"a": 1}))
    before = path.read_bytes()

    def no_space(source, destination):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(OSError, match="No space"):
        writer.write(records({"b": 1}, start=1))
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["log.csv"]
    monkeypatch.undo()
    (tmp_path / "log.csv.partial").write_text("of a killed process")
    writer.write(records({"b": 1}, start=1))
    assert rows(path) == [["step", "a", "b"], ["0", "1", ""], ["1", "", "1"]]
    assert os.listdir(tmp_path) == ["log.csv"]


def test_killed_process_leaves_a_file_that_can_be_read(tmp_path):
    code = f"""
import os, time, trainfast
os.chdir({str(tmp_path)!r})
logger = trainfast.Logger(csv="log.csv", jsonl="log.jsonl")
for step in range(10**9):
    logger.log({{"a": step, f"name{{min(step // 100, 30)}}": 1}}, step)
    time.sleep(0.0005)
"""
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until((tmp_path / "log.csv").exists)
        time.sleep(1.2)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    table = rows(tmp_path / "log.csv")
    assert [int(row[0]) for row in table[1:]] == list(range(len(table) - 1))
    steps = [line["step"] for line in lines(tmp_path / "log.jsonl")]
    assert len(steps) > 100 and steps == list(range(len(steps)))


def test_deleted_and_moved_files_are_made_again(tmp_path):
    path = tmp_path / "log.csv"
    writer = CsvWriter(path)
    writer.write(records({"a": 1}))
    path.rename(tmp_path / "old.csv")
    writer.write(records({"a": 2}, start=1))
    assert rows(path) == [["step", "a"], ["1", "2"]]
    assert rows(tmp_path / "old.csv") == [["step", "a"], ["0", "1"]]
