"""Out-of-memory errors as torch and the system write them, and what is advised."""

import io
import json

import pytest

import trainfast
from trainfast.cli import main
from trainfast.diagnosis.settings import Settings
from trainfast.memory.out_of_memory import parse

MIB, GIB = 1 << 20, 1 << 30
# torch 1.13 and 2.0.
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 3.95 GiB "
    "total capacity; 2.93 GiB already allocated; 12.06 MiB free; 2.97 GiB reserved in "
    "total by PyTorch) If reserved memory is >> allocated memory try setting "
    "max_split_size_mb to avoid fragmentation."
)
# torch 2.1 and later.
NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has "
    "a total capacity of 14.75 GiB of which 1.06 GiB is free. Including non-PyTorch "
    "memory, this process has 13.69 GiB memory in use. Of the allocated memory 12.90 "
    "GiB is allocated by PyTorch, and 600.00 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
FRAGMENTED = NEW.replace("12.90 GiB", "10.50 GiB").replace("600.00 MiB", "3.00 GiB")
SHARED_CARD = NEW.replace(
    "Including non-PyTorch memory, this process has 13.69 GiB memory in use.",
    "Process 77 has 9.00 GiB memory in use. Including non-PyTorch memory, this process "
    "has 4.69 GiB memory in use.",
)
NAMELESS = NEW.replace(
    "Including non-PyTorch memory, this process has 13.69 GiB memory in use.",
    "Process 12 has 13.69 GiB memory in use.",
)


def test_the_numbers_of_an_old_message():
    found = parse(OLD)
    assert found.requested == 20 * MIB and found.free == int(12.06 * MIB)
    assert found.capacity == int(3.95 * GIB) and found.allocated == int(2.93 * GIB)
    assert found.unallocated == int(2.97 * GIB) - int(2.93 * GIB)
    assert found.cause == "fragmentation"  # 41 MiB are there, in pieces


def test_the_numbers_of_a_new_message():
    found = parse(NEW)
    assert found.requested == 2 * GIB and found.unallocated == 600 * MIB
    assert found.capacity == int(14.75 * GIB) and found.free == int(1.06 * GIB)
    assert found.others is None and found.cause == "need"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (FRAGMENTED, "fragmentation"),
        (SHARED_CARD, "other processes"),
        (NAMELESS, "need"),  # the one process that is listed is this one
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", "need"),
        ("RuntimeError: CUDA error: out of memory", "need"),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. "
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 "
            "bytes.",
            "host memory",
        ),
        (
            "RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed. ",
            "host memory",
        ),
        ("epoch 3\nKilled\n", "host memory"),
        ("Command exited with code 137", "host memory"),
        (
            "ERROR: Unexpected bus error encountered in worker. This might be caused "
            "by insufficient shared memory (shm).",
            "shared memory",
        ),
    ],
)
def test_causes(text, cause):
    assert parse(text).cause == cause


def test_the_last_failure_in_a_log_counts():
    log = f"step 1\n{OLD}\nretrying\n{NEW}\n  File 'a.py'\n"
    assert parse(log).requested == 2 * GIB
    assert parse(f"{NEW}\nKilled\n").cause == "host memory"
    assert parse("nothing went wrong; kill them all; Killed by frost") is None
    assert parse("") is None


def test_a_limit_of_the_process_is_read():
    text = NEW.replace("Of the allocated", "10.00 GiB allowed; Of the allocated")
    assert parse(text).allowed == 10 * GIB


def test_the_effective_batch_is_kept():
    advice = trainfast.oom_advice(NEW, batch_size=16, accumulation=12)
    assert advice.batch == (12, 16)
    assert any("batch 12 with accumulation 16" in do for do, _ in advice.remedies)
    assert advice.to_yaml() == "batch_size: 12\naccumulation_steps: 16\n"
    assert trainfast.oom_advice(NEW, batch_size=1).batch is None
    assert trainfast.oom_advice(NEW).batch is None


def test_the_configurations_own_keys_are_written():
    config = {"data": {"batch_size": 16}, "trainer": {"accumulate_grad_batches": 12}}
    advice = trainfast.oom_advice(NEW, settings=Settings(config))
    assert advice.to_yaml() == (
        "data:\n  batch_size: 12\ntrainer:\n  accumulate_grad_batches: 16\n"
    )


def test_remedies_by_cause():
    first = {
        text: trainfast.oom_advice(text).remedies[0][0]
        for text in (FRAGMENTED, SHARED_CARD, NEW, "\nKilled\n")
    }
    assert "expandable_segments:True" in first[FRAGMENTED]
    assert "nvidia-smi" in first[SHARED_CARD]
    assert "autocast" in first[NEW]
    assert "workers" in first["\nKilled\n"]


def test_an_estimate_gives_the_savings():
    torch = pytest.importorskip("torch")
    layers = (torch.nn.Linear(512, 512) for _ in range(8))
    model = torch.nn.Sequential(*layers)
    batch = torch.randn(4096, 512)
    estimate = trainfast.estimate_memory(model, batch, gpu="4GB")
    advice = trainfast.oom_advice(NEW, estimate=estimate)
    assert advice.batch == (2048, 2)
    assert any(effect.startswith("saves ") for _, effect in advice.remedies)


def test_help_prints_and_lets_the_error_go_on(capsys):
    caught = pytest.raises(RuntimeError, match="out of memory")
    with caught, trainfast.oom_help(batch_size=8):
        raise RuntimeError(OLD)
    assert "Out of memory: fragmentation" in capsys.readouterr().err
    with pytest.raises(KeyError), trainfast.oom_help():
        raise KeyError("other")
    assert capsys.readouterr().err == ""
    with trainfast.oom_help():
        pass


def test_text_without_a_failure_is_an_error():
    with pytest.raises(ValueError, match="no out-of-memory error"):
        trainfast.oom_advice("all is well")


def test_command_line(tmp_path, capsys, monkeypatch):
    pytest.importorskip("yaml")
    (tmp_path / "log").write_text(f"line\n{NEW}\n")
    (tmp_path / "a.yaml").write_text("batch_size: 16\naccumulation_steps: 12\n")
    words = ["oom", str(tmp_path / "log"), "--config", str(tmp_path / "a.yaml")]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "Out of memory: need" in text and "batch_size: 12\n" in text
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batch"]["accumulation"] == 16
    assert main(["oom", str(tmp_path / "missing")]) == 1
    assert "missing" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO(NEW))
    assert main(["oom", "-"]) == 0
