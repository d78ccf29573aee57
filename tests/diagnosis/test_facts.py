"""Facts of a machine: parsed from what systems and drivers print."""

import os
import subprocess
import sys
import textwrap

import pytest

from trainfast.diagnosis import facts
from trainfast.diagnosis.process import fast_math_libraries
from trainfast.machine import versions

# nvidia-smi of one GPU. A driver before 535 refuses the names of event reasons.
NVIDIA_SMI = """#!/bin/sh
case "$1" in
*compute_cap*) echo "Tesla T4, 7.5, 15360 MiB, 535.104.05" ;;
*clocks_event_reasons*) {event} ;;
*clocks_throttle_reasons*) echo "Not Active, Active, Not Active" ;;
*) echo "3 MiB, 0 %, 44, P8, 16, [N/A]" ;;
esac
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    def install(event):
        path = tmp_path / "nvidia-smi"
        path.write_text(NVIDIA_SMI.format(event=event))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


@pytest.mark.parametrize(
    ("event", "slowdowns"),
    [
        ("echo 'Active, Not Active, Not Active'", ("hw_thermal_slowdown",)),
        ("echo 'not a valid field'; exit 2", ("sw_thermal_slowdown",)),
    ],
    ids=["new driver", "old driver"],
)
def test_gpus_are_read_from_nvidia_smi(nvidia_smi, event, slowdowns):
    nvidia_smi(event)
    assert facts.gpus() == [
        facts.Gpu(
            name="Tesla T4",
            capability=(7, 5),
            memory=15360,
            driver="535.104.05",
            memory_used=3,
            utilization=0,
            temperature=44,
            pstate="P8",
            pcie_width=16,
            pcie_width_max=None,
            slowdowns=slowdowns,
        )
    ]
    assert facts.gpus()[0].driver_branch == 535


def test_gather_agrees_with_env():
    machine = facts.gather()
    assert machine.torch == versions()["torch"]
    assert machine.cores == os.cpu_count()
    assert 1 <= machine.usable_cores <= machine.affinity
    assert machine.memory > 0 and machine.disk > 0


def test_gather_reads_the_variables_that_rules_know(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    variables = facts.gather().variables
    assert variables["OMP_NUM_THREADS"] == "3"
    assert "CUDA_LAUNCH_BLOCKING" not in variables


def test_cuda_version_of_torch_is_read_without_loading_torch(tmp_path, monkeypatch):
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('loaded')\n")
    text = "__version__ = '2.9.1+cu128'\ncuda: Optional[str] = '12.8'\nhip = None\n"
    (folder / "version.py").write_text(text)
    command = "from trainfast.diagnosis import facts; print(facts.gather().torch_cuda)"
    found = {"PYTHONPATH": f"{tmp_path}:{os.pathsep.join(sys.path)}"}
    done = subprocess.run(
        [sys.executable, "-c", command],
        env=os.environ | found,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "12.8\n", done.stderr


@pytest.mark.parametrize(
    ("text", "found"),
    [("2.13.0+cpu", (2, 13)), ("12.8", (12, 8)), ("git", None), (None, None)],
)
def test_version_is_two_numbers(text, found):
    assert facts.version(text) == found


@pytest.mark.parametrize(
    ("file", "limit", "found"),
    [
        ("memory.max", "max\n", 4096),
        ("memory.max", f"{2 << 30}\n", 2048),
        ("memory/memory.limit_in_bytes", f"{1 << 30}\n", 1024),
    ],
)
def test_memory_is_that_of_the_control_group(tmp_path, file, limit, found):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(limit)
    assert facts.memory(f"MemTotal:  {4 << 20} kB\n", tmp_path) == found


def test_rotating_disk_is_told_by_its_queue(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "_on_virtual_machine", lambda: False)
    device = os.stat(tmp_path).st_dev
    folder = tmp_path / f"dev/block/{os.major(device)}:{os.minor(device)}/queue"
    assert facts.rotating(tmp_path, tmp_path) is None
    folder.mkdir(parents=True)
    (folder / "rotational").write_text("1\n")
    assert facts.rotating(tmp_path, tmp_path) is True
    monkeypatch.setattr(facts, "_on_virtual_machine", lambda: True)
    assert facts.rotating(tmp_path, tmp_path) is None


# ---- The running process -------------------------------------------------------------


def run_script(code, **options):
    """What a process prints that runs this code."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_process_without_torch_has_nothing_switched_on():
    assert run_script("""
        from trainfast.diagnosis.process import Running, look
        import sys
        print(look() == Running(), "torch" in sys.modules)
    """) == ["True False"]


@pytest.fixture
def fast_math(tmp_path):
    """A library that is linked with -ffast-math."""
    path = tmp_path / "libfast.so"
    command = ["gcc", "-shared", "-ffast-math", "-x", "c", "/dev/null", "-o", path]
    try:
        done = subprocess.run(command, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no gcc")
    assert done.returncode == 0
    return path


def test_flush_to_zero_and_the_library_that_switched_it_are_found(fast_math):
    flushed, by = run_script(f"""
        import ctypes
        ctypes.CDLL({str(fast_math)!r})
        from trainfast.diagnosis.process import look
        running = look()
        print(running.flush_to_zero)
        print(running.fast_math)
    """)
    if flushed == "False":
        pytest.skip("gcc 13 and later leave the state alone in shared libraries")
    assert by == str((str(fast_math),))


def test_libraries_of_this_process_are_linked_without_fast_math():
    assert not [path for path in fast_math_libraries() if "trainfast" in path]


@pytest.mark.slow
def test_torch_that_flushes_by_request_has_no_culprit():
    pytest.importorskip("torch")
    assert run_script("""
        import torch
        torch.set_flush_denormal(True)
        from trainfast.diagnosis.process import look
        print(look().flush_to_zero, look().fast_math)
    """) == ["True ()"]


def test_mixed_tf32_interfaces_of_torch_are_found():
    torch = pytest.importorskip("torch")
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("torch before 2.9 has one interface")
    before, after = run_script("""
        import torch
        from trainfast.diagnosis.process import look
        torch.backends.cuda.matmul.allow_tf32 = True
        print(look().tf32_mixed)
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        print(look().tf32_mixed)
    """)
    assert before == "None"
    assert after == "torch.backends.cuda.matmul.allow_tf32"


def test_deprecated_names_of_the_main_module_are_found():
    pytest.importorskip("torch")
    assert run_script("""
        from torch.cuda.amp import autocast
        import torch
        scaler = torch.cuda.amp.GradScaler(enabled=False)
        from trainfast.diagnosis.process import look
        print(*look().deprecated)
        del autocast, scaler
        print(*look().deprecated)
    """) == ["torch.cuda.amp.autocast torch.cuda.amp.GradScaler", ""]
