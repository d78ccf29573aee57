"""GPUs that estimates are for: by name, by size, and this machine's."""

import pytest

from trainfast.memory import gpus
from trainfast.memory.gpus import MIB, gpu_of


@pytest.fixture
def machine(monkeypatch):
    """machine(*rows) has these GPUs: (name, capability, memory)."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def of(*rows):
        keys = ("name", "capability", "memory")
        found = [dict(zip(keys, row, strict=True)) for row in rows]
        monkeypatch.setattr(gpus, "gpus", lambda: found)

    return of


def test_without_a_gpu_it_is_a_t4(machine):
    machine()
    assert gpu_of(None) == gpu_of("T4")
    machine(("NVIDIA GB10", "12.1", "[N/A]"))
    assert gpu_of(None) == gpu_of("T4")


@pytest.mark.parametrize(
    "name, capability, mib, known",
    [
        ("Tesla T4", "7.5", 15360, "T4"),
        ("NVIDIA GeForce RTX 3050 Laptop GPU", "8.6", 4096, "RTX 3050 Laptop"),
        ("NVIDIA GeForce RTX 3050", "8.6", 8192, "RTX 3050"),
        ("NVIDIA A100-SXM4-40GB", "8.0", 40960, "A100"),
        ("NVIDIA A100 80GB PCIe", "8.0", 81920, "A100 80GB"),
        ("Tesla V100-SXM2-32GB", "7.0", 32768, "V100 32GB"),
        ("NVIDIA L40S", "8.9", 46068, "L40S"),
        ("NVIDIA L40", "8.9", 46068, None),  # no L4
        ("NVIDIA GeForce RTX 5070", "12.0", 12227, None),
    ],
)
def test_own_gpu_is_recognized(machine, name, capability, mib, known):
    machine((name, capability, f"{mib} MiB"))
    own = gpu_of(None)
    assert own.memory == mib * MIB
    assert own.capability == round(10 * float(capability))
    if known is None:
        assert own.name == name
    else:
        assert own == gpu_of(known)._replace(memory=mib * MIB)


def test_it_is_the_first_that_the_process_may_use(machine, monkeypatch):
    machine(("Tesla T4", "7.5", "15360 MiB"), ("NVIDIA L4", "8.9", "23034 MiB"))
    for visible, name in [("1", "L4"), ("1,0", "L4"), ("9", "L4"), ("GPU-a", "T4")]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpu_of(None).name == name
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    machine(("NVIDIA L4", "8.9", "23034 MiB"))
    assert gpu_of(None).name == "T4"  # none may be used
