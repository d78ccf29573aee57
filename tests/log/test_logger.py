"""What a logger takes, in which order it hands it on, and what it never waits for."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch

import trainfast
from tests.log.far_tensors import far, use_fake_gpu
from trainfast.log import logger as logger_module
from trainfast.log import target


def python(code, **environment):
    """What another interpreter prints; code that hangs is a failure."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def lines(path):
    """The records without their time."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        assert 1.7e9 < record.pop("time") < 5e9
    return records


@pytest.fixture
def file(tmp_path):
    return tmp_path / "log.jsonl"


class Kept:
    """A writer that keeps what it gets."""

    name, keeps_whole = "kept", True

    def __init__(self, *_):
        self.records, self.closed = [], False

    def write(self, records):
        self.records += records

    def close(self):
        self.closed = True


def use_writer(monkeypatch, made):
    """The logger's csv target writes with `made`."""
    monkeypatch.setattr(logger_module, "CsvWriter", lambda path: made)
    monkeypatch.setattr(target, "PERIOD", 0.01)
    return trainfast.Logger(csv="")


def test_numbers_of_all_kinds_become_pythons(file):
    values = {
        "float": 0.1,
        "int": 3,
        "bool": True,
        "text": "größer",
        "numpy": np.float32(0.5),
        "array": np.array([[2]]),
        "float64": np.float64(0.25),
        "tensor": torch.tensor([1.5], requires_grad=True),
        "half": torch.tensor(2.0, dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "flag": torch.tensor(False),
    }
    with trainfast.Logger(jsonl=file) as logger:
        logger.log(values, np.int64(4))
    (line,) = lines(file)
    assert line == {
        "step": 4,
        **{"float": 0.1, "int": 3, "bool": True, "text": "größer", "numpy": 0.5},
        **{"array": 2, "float64": 0.25, "tensor": 1.5, "half": 2.0, "count": 7},
        "flag": False,
    }
    assert type(line["count"]) is int and line["flag"] is False


def test_values_are_those_at_the_call(file):
    loss = torch.tensor(1.0)
    values = {"loss": loss}
    with trainfast.Logger(jsonl=file) as logger:
        logger.log(values, 0)
        loss.mul_(5)
        values["more"] = 1
    assert lines(file) == [{"step": 0, "loss": 1.0}]


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("a", torch.zeros(2), ValueError, r"'a' must have one element.*shape \(2,\)"),
        ("a", np.zeros((0, 3)), ValueError, r"'a' must have one .*shape \(0, 3\)"),
        ("a", {"b": 1}, TypeError, "'a' must be a number or a string, got dict"),
        ("a", None, TypeError, "'a' must be a number or a string, got NoneType"),
        ("a", torch.tensor(1j), TypeError, "'a' must be a number or a string"),
        ("a", 1j, TypeError, "'a' must be a number or a string, got complex"),
        ("step", 1, ValueError, "'step' can't be the name of a value"),
        ("a\nb", 1, ValueError, r"'a\\nb' can't be the name"),
        ("", 1, ValueError, "'' can't be the name"),
        (3, 1, TypeError, "names of values must be strings, got 3"),
    ],
)
def test_wrong_values_are_refused_by_name(name, value, error, message, file):
    with trainfast.Logger(jsonl=file) as logger:
        with pytest.raises(error, match=message):
            logger.log({name: value}, 0)
        with pytest.raises(TypeError, match=r"`step` must be an integer, got 0\.5"):
            logger.log({"a": 1}, 0.5)
    assert not file.exists()


def test_values_on_a_gpu_are_read_a_step_later(file, monkeypatch):
    """One transfer a call, no wait, and the order is kept."""
    gpu = use_fake_gpu(monkeypatch)
    with trainfast.Logger(jsonl=file) as logger:
        for step in range(3):
            values = {"loss": far(step + 0.5), "lr": 0.1, "count": far(step + 2**40)}
            logger.log({**values, "n": far(2**40 + step, torch.int64)}, step)
        logger.log({"lr": 0.2}, 3)
        assert (gpu.transfers, gpu.reads, gpu.waits) == (3, 0, 0)
        assert len(logger._targets._late) == 4
        gpu.finished = True
        logger.log({"loss": far(9.0)}, 4)
        assert len(logger._targets._late) == 1
    assert (gpu.transfers, gpu.reads, gpu.waits) == (4, 0, 0)
    written = lines(file)
    assert [line["step"] for line in written] == [0, 1, 2, 3, 4]
    assert written[2] == {
        **{"step": 2, "loss": 2.5, "lr": 0.1, "count": 2**40, "n": 2**40 + 2}
    }
    assert list(written[2]) == ["step", "loss", "lr", "count", "n"]
    assert written[4] == {"step": 4, "loss": 9.0}


def test_close_waits_for_values_on_a_gpu(file, monkeypatch):
    gpu = use_fake_gpu(monkeypatch)
    logger = trainfast.Logger(jsonl=file)
    logger.log({"loss": far(2.0)}, 0)
    logger.close()
    assert gpu.waits == 1 and lines(file) == [{"step": 0, "loss": 2.0}]


def test_gpu_that_fails_is_told_and_ends_nothing(file, monkeypatch):
    gpu = use_fake_gpu(monkeypatch)

    def fails(self):
        raise RuntimeError("CUDA error: device-side assert triggered")

    logger = trainfast.Logger(jsonl=file)
    logger.log({"loss": far(2.0)}, 0)
    gpu.finished = True
    monkeypatch.setattr(torch.cuda.Event, "synchronize", fails)
    with pytest.warns(UserWarning, match="values on a GPU are lost: CUDA error"):
        logger.log({"lr": 1.0}, 1)
    logger.close()
    assert lines(file) == [{"step": 1, "lr": 1.0}]


def test_several_threads_may_log(file):
    def work(first):
        go.wait()
        for step in range(first, first + 500):
            logger.log({"a": step}, step)

    go = threading.Event()
    with trainfast.Logger(jsonl=file) as logger:
        threads = [threading.Thread(target=work, args=(i * 500,)) for i in range(8)]
        for thread in threads:
            thread.start()
        go.set()
        for thread in threads:
            thread.join()
    assert sorted(line["step"] for line in lines(file)) == list(range(4000))


def test_closed_logger_says_so_once(file):
    logger = trainfast.Logger(jsonl=file)
    logger.log({"a": 1}, 0)
    logger.close()
    logger.close()
    assert logger.closed
    with pytest.warns(UserWarning, match="nothing is logged by this .* it is closed"):
        logger.log({"a": 1}, 1)
    with warnings.catch_warnings(action="error"):
        logger.log({"a": 1}, 2)
    assert len(lines(file)) == 1


def test_logger_without_targets_or_records_does_nothing(file):
    with trainfast.Logger() as logger:
        logger.log({"a": 1}, 0)
    with trainfast.Logger(jsonl=file):
        pass
    assert not file.exists()


def test_writers_thread_starts_with_the_first_record(monkeypatch):
    kept = Kept()
    logger = use_writer(monkeypatch, kept)
    (own,) = logger._targets.targets
    assert own._thread is None
    logger.log({"a": 1}, 0)
    assert own._thread.daemon
    logger.close()
    assert kept.closed and [record.step for record in kept.records] == [0]


def test_other_ranks_write_nothing(file, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with trainfast.Logger(jsonl=file) as logger:
        logger.log({"a": 1}, 0)
    assert not file.exists()
    monkeypatch.setenv("RANK", "0")
    with trainfast.Logger(jsonl=file) as logger:
        logger.log({"a": 1}, 0)
    assert file.exists()


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "trackio"])
def test_missing_package_is_named_at_once(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"pip install {package}$"):
        trainfast.Logger(**{package: {"project": "x"}})


# ---- Processes -----------------------------------------------------------------------


def test_end_of_the_process_closes(file):
    code = f"""
import trainfast
logger = trainfast.Logger(jsonl={str(file)!r})
for step in range(1000):
    logger.log({{"a": step}}, step)
"""
    python(code)
    assert [line["a"] for line in lines(file)] == list(range(1000))


def test_without_torch_and_unused_it_loads_nothing(file):
    code = f"""
import sys
import trainfast
sys.modules["torch"] = None
with trainfast.Logger(jsonl={str(file)!r}) as logger:
    logger.log({{"a": 1.5}}, 0)
report = trainfast.EpochReport()
report.step(1.0, 1)
report.end_epoch()
list(trainfast.progress([1]))
packages = ("tensorboard", "tqdm", "trackio", "wandb")
print([name for name in packages if name in sys.modules])
"""
    assert python(code)[0].splitlines()[-1] == "[]"
    assert len(lines(file)) == 1


def _child(logger, step):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for i in range(3):
            logger.log({"a": step}, step + i)
        logger.close()
    texts = [str(warning.message) for warning in seen]
    os._exit(0 if len(texts) == 1 and "another process" in texts[0] else 1)


@pytest.mark.forks
@pytest.mark.parametrize("is_started", [False, True])
def test_forked_child_writes_nothing_and_ends(is_started, file):
    with trainfast.Logger(jsonl=file) as logger:
        if is_started:
            logger.log({"a": 0}, 0)
        context = multiprocessing.get_context("fork")
        child = context.Process(target=_child, args=(logger, 50))
        child.start()
        child.join(30)
        assert child.exitcode == 0
        logger.log({"a": 1}, 1)
    assert [line["step"] for line in lines(file)] == ([0, 1] if is_started else [1])


def test_forked_child_that_exits_by_itself_ends(file):
    """With the handlers of the interpreter's exit, as os.fork leaves them."""
    code = f"""
import os, sys, trainfast, warnings
logger = trainfast.Logger(jsonl={str(file)!r})
logger.log({{"a": 0}}, 0)
warnings.filterwarnings("ignore", ".*fork")  # Python 3.13: other threads run
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
logger.log({{"a": 1}}, 1)
"""
    assert python(code)[1] == ""
    assert [line["step"] for line in lines(file)] == [0, 1]
