"""TensorBoard, W&B and trackio: the real ones where they are installed."""

import importlib.machinery
import json
import math
import struct
import sys
import time
import types

import pytest

import trainfast
from tests.log.test_logger import python

TAGS = ("train_loss", "val_loss", "val_ade", "val_minADE", "val_fde", "learning_rate")


class Run:
    """What W&B and trackio have in common."""

    def __init__(self, **arguments):
        self.arguments, self.calls, self.finished = arguments, [], False

    def log(self, values, step):
        self.calls.append((step, values))

    def finish(self):
        self.finished = True


def use_stub(monkeypatch, name, init):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.init = init
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_service_gets_all_values(name, monkeypatch):
    runs = []

    def init(**arguments):
        runs.append(Run(**arguments))
        return runs[-1]

    use_stub(monkeypatch, name, init)
    with trainfast.Logger(**{name: {"project": "x", "name": "y"}}) as logger:
        logger.log({"loss": 0.5, "text": "a"}, 3)
        logger.log({"loss": math.inf}, 4)
    (run,) = runs
    assert run.arguments == {"project": "x", "name": "y"} and run.finished
    assert run.calls == [(3, {"loss": 0.5, "text": "a"}), (4, {"loss": math.inf})]


def test_service_that_is_not_reached_is_told(monkeypatch):
    def init(**_):
        raise ConnectionError("no network")

    use_stub(monkeypatch, "wandb", init)
    logger = trainfast.Logger(wandb={})
    logger.log({"loss": 0.5}, 3)
    with pytest.warns(UserWarning) as seen:
        logger.close()
    assert str(seen[0].message).startswith(
        "logging to wandb failed with ConnectionError: no network; nothing more is"
    )


def tensorboard_events(folder):
    """(step, {tag: value}) of each event."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (file,) = folder.iterdir()
    for event in EventFileLoader(str(file)).Load():
        values = {v.tag: v.tensor.float_val[0] for v in event.summary.value}
        if values:
            assert abs(event.wall_time - time.time()) < 600
            yield event.step, values


def test_tensorboard_has_the_guides_tags(tmp_path):
    pytest.importorskip("tensorboard")
    folder = tmp_path / "runs" / "first"
    with trainfast.Logger(tensorboard=folder) as logger:
        for step in range(300):
            numbers = {tag: step + i / 2 for i, tag in enumerate(TAGS)}
            logger.log({**numbers, "text": "left out"}, step)
        logger.log({"val_ade": math.nan}, 300)
    events = list(tensorboard_events(folder))
    assert events[7] == (7, {tag: 7 + i / 2 for i, tag in enumerate(TAGS)})
    assert len(events) == 301 and math.isnan(events[-1][1]["val_ade"])


def test_tensorboard_on_a_full_disk_ends_nothing(tmp_path):
    pytest.importorskip("tensorboard")
    code = f"""
import resource, signal, time
import trainfast
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
logger = trainfast.Logger(tensorboard={str(tmp_path)!r})
began = time.monotonic()
for step in range(300):
    logger.log({{"loss": 1.0}}, step)
    time.sleep(0.01)
logger.close()
print(time.monotonic() - began < 20)
"""
    out, err = python(code)
    assert out == "True\n"
    assert err.count(f"UserWarning: logging to tensorboard {tmp_path} failed") == 1


def test_wandb_offline(tmp_path):
    pytest.importorskip("wandb")
    code = f"""
import trainfast
wandb = {{"project": "x", "mode": "offline", "dir": {str(tmp_path)!r}}}
logger = trainfast.Logger(wandb=wandb)
for step in range(20):
    logger.log({{"loss": step / 2, "nan": float("nan")}}, step)
logger.close(timeout=60)
"""
    _, err = python(code)
    assert "UserWarning" not in err
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    losses = []
    for data in leveldb_records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        items = {item.key or item.nested_key[0]: item for item in record.history.item}
        losses += [json.loads(items["loss"].value_json)] if "loss" in items else []
    assert losses == [step / 2 for step in range(20)]


def leveldb_records(data):
    """Those of a log that fits into its first block, after W&B's 7 bytes of header."""
    at = 7
    while at + 7 <= min(len(data), 1 << 15):
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if kind != 1:
            return
        yield data[at + 7 : at + 7 + length]
        at += 7 + length


@pytest.mark.slow
def test_wandb_without_a_network_holds_up_nothing(tmp_path):
    """Its `init` waits for minutes, in a thread that the process leaves behind."""
    pytest.importorskip("wandb")
    code = f"""
import time
import trainfast
logger = trainfast.Logger(wandb={{"project": "x", "dir": {str(tmp_path)!r}}})
began = time.monotonic()
for step in range(30):
    logger.log({{"loss": 1.0}}, step)
    time.sleep(0.1)
logger.close()
print(time.monotonic() - began < 10)
"""
    blocked = {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    began = time.monotonic()
    out, err = python(code, **blocked)
    assert time.monotonic() - began < 40
    assert out.splitlines()[-1] == "True" and "UserWarning: logging to wandb" in err


def test_trackio(tmp_path):
    pytest.importorskip("trackio")
    code = """
import trainfast
logger = trainfast.Logger(trackio={"project": "x", "name": "first"})
for step in range(20):
    logger.log({"val_ade": step / 2, "text": "a"}, step)
logger.close(timeout=60)
"""
    _, err = python(code, TRACKIO_DIR=str(tmp_path))
    assert "UserWarning" not in err
    code = """
import json
from trackio import Api
(run,) = Api().runs("x")
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps(SQLiteStorage.get_logs("x", run.name)))
"""
    logs = json.loads(python(code, TRACKIO_DIR=str(tmp_path))[0].splitlines()[-1])
    assert [log["val_ade"] for log in logs] == [step / 2 for step in range(20)]
    assert [log["step"] for log in logs] == list(range(20)) and logs[0]["text"] == "a"
