"""Machines as facts: a healthy one, and those that the guides are written for."""

from dataclasses import replace

from trainfast.diagnosis.facts import Gpu, Machine

RTX_4070 = Gpu(
    name="NVIDIA GeForce RTX 4070",
    capability=(8, 9),
    memory=12282,
    driver="580.65.06",
    memory_used=11,
    utilization=0,
    temperature=41,
    pstate="P8",
    pcie_width=8,  # idle
    pcie_width_max=16,
)
T4 = replace(
    RTX_4070,
    name="Tesla T4",
    capability=(7, 5),
    memory=15360,
    pcie_width=16,
)
RTX_3050 = replace(
    RTX_4070,
    name="NVIDIA GeForce RTX 3050 Laptop GPU",
    capability=(8, 6),
    memory=4096,
    pcie_width_max=8,
)
HEALTHY = Machine(
    python="3.12.3",
    processor="AMD Ryzen 7 5800X",
    torch="2.13.0+cu130",
    torch_cuda="13.0",
    gpus=(RTX_4070,),
    cores=16,
    affinity=16,
    memory=32 * 1000,  # firmware keeps some
    disk=200 << 10,
    rotating=False,
    shm=16 << 10,
)
# Kaggle's free notebook: T4, 4 cores, 30 GB.
KAGGLE = replace(HEALTHY, gpus=(T4,), cores=4, affinity=4, memory=30 << 10, shm=5 << 10)


def with_gpu(**facts):
    """The healthy machine with other facts about its GPU."""
    return replace(HEALTHY, gpus=(replace(RTX_4070, **facts),))
