"""Rules about the machine: its GPU, cores, memory, and how torch fits them."""

from trainfast.diagnosis.facts import version
from trainfast.diagnosis.rules.rule import Case, Rule

# The guides' profiles (row 0.11) in GB, and in cores.
MINIMUM = {"GPU memory": 4, "RAM": 16, "free disk": 10, "cores": 4}
RECOMMENDED = {"GPU memory": 8, "RAM": 32, "free disk": 20, "cores": 8}
_SHORT = 0.9  # a part of its memory is hidden: 16 GB of RAM show as 15.5

_COMPATIBILITY = "docs.nvidia.com/deploy/cuda-compatibility"
_SMI = "nvidia-smi --help-query-gpu"
# The first driver branch that runs code of a CUDA major version.
_DRIVERS = {11: 450, 12: 525, 13: 580}
# The lowest compute capability of torch's wheels from a CUDA version on.
_LOWEST = {(13, 0): (7, 5), (12, 8): (7, 0)}
_DOCKER_SHM = 1024  # MiB; Docker's default is 64
_HOT = 85  # degrees C
_RUNNING = 500  # MiB in use from which on a training run is taken to be there


def resources(case: Case) -> dict[str, float | None]:
    """What the profiles name, in GB and cores; None for what is not known."""
    machine = case.machine
    gpu = machine.gpus[0] if machine.gpus else None
    sizes = {
        "GPU memory": gpu.memory if gpu else None,
        "RAM": machine.memory,
        "free disk": machine.disk,
    }
    found = {k: None if v is None else v / 1024 for k, v in sizes.items()}
    return {**found, "cores": float(machine.usable_cores)}


def below(have: float | None, need: int, name: str) -> bool:
    """Whether a resource is known and short of what a profile needs."""
    slack = _SHORT if name in ("GPU memory", "RAM") else 1.0
    return have is not None and have < need * slack


def _below_minimum(case: Case) -> str | None:
    short = [
        f"{name} {have:.3g} of {MINIMUM[name]}{'' if name == 'cores' else ' GB'}"
        for name, have in resources(case).items()
        if have is not None and below(have, MINIMUM[name], name)
    ]
    return ", ".join(short) or None


def _torch_without_cuda(case: Case) -> str | None:
    machine = case.machine
    if case.gpu and machine.torch and not machine.torch_cuda:
        return f"torch {machine.torch} is a CPU build, beside a {case.gpu.name}"
    return None


def _driver_too_old(case: Case) -> str | None:
    built = version(case.machine.torch_cuda)
    branch = case.gpu.driver_branch if case.gpu else None
    need = _DRIVERS.get(built[0]) if built else None
    if case.gpu and need and branch and branch < need:
        cuda = case.machine.torch_cuda
        return f"driver {case.gpu.driver}; torch for CUDA {cuda} needs {need} or later"
    return None


def _gpu_too_old(case: Case) -> str | None:
    built = version(case.machine.torch_cuda)
    for first, lowest in _LOWEST.items():
        if built and built >= first:
            gpu = case.older_than(*lowest)
            if gpu:
                least = ".".join(map(str, lowest))
                cuda = case.machine.torch_cuda
                return f"{gpu}; torch for CUDA {cuda} starts at capability {least}"
            return None
    return None


def _torch_too_old(case: Case) -> str | None:
    torch = case.machine.torch_version
    if torch and torch < (2, 6):
        return f"torch {case.machine.torch} is older than 2.6"
    return None


def _cores_limited(case: Case) -> str | None:
    machine = case.machine
    if machine.usable_cores >= machine.cores:
        return None
    if machine.quota is not None and machine.quota < machine.affinity:
        limit = f"the control group's quota is {machine.quota:g}"
    else:
        limit = f"this process may run on {machine.affinity}"
    return f"os.cpu_count() says {machine.cores} cores, {limit}"


def _small_shm(case: Case) -> str | None:
    shm = case.machine.shm
    if shm is None or shm >= _DOCKER_SHM or case.settings.number("workers") == 0:
        return None
    return f"/dev/shm has {shm} MiB; DataLoader workers pass each batch through it"


def _narrow_pcie(case: Case) -> str | None:
    gpu = case.gpu
    if not (gpu and gpu.pcie_width and gpu.pcie_width_max):
        return None
    if gpu.pcie_width_max <= 4:
        return f"{gpu.name} is connected by {gpu.pcie_width_max} PCIe lanes at most"
    # An idle GPU may give lanes up; P0 to P2 are the states of work.
    if gpu.pstate in ("P0", "P1", "P2") and gpu.pcie_width < gpu.pcie_width_max:
        return f"{gpu.name} uses {gpu.pcie_width} of {gpu.pcie_width_max} PCIe lanes"
    return None


def _throttled(case: Case) -> str | None:
    if case.gpu and case.gpu.slowdowns:
        return f"{case.gpu.name} lowers its clocks: {', '.join(case.gpu.slowdowns)}"
    return None


def _hot(case: Case) -> str | None:
    gpu = case.gpu
    if gpu and gpu.temperature is not None and gpu.temperature >= _HOT:
        return f"{gpu.name} is at {gpu.temperature} degrees C, at or above {_HOT}"
    return None


def _usage(case: Case) -> tuple[str, int, int, int] | None:
    """Of a GPU in use: its name, MiB used, MiB in all, per cent of time in kernels."""
    gpu = case.gpu
    if not gpu or gpu.memory_used is None or gpu.utilization is None or not gpu.memory:
        return None
    if gpu.memory_used < _RUNNING:
        return None
    return gpu.name, gpu.memory_used, gpu.memory, gpu.utilization


def _memory_taken(case: Case) -> str | None:
    usage = None if case.machine.running.cuda else _usage(case)
    if usage and usage[3] < 5 and usage[1] > usage[2] / 4:
        name, used, total, busy = usage
        return f"{used} of {total} MiB of {name} are in use, at {busy} % utilisation"
    return None


def _underused(case: Case) -> str | None:
    usage = _usage(case)
    if usage and 5 <= usage[3] < 50:
        return f"{usage[0]} is in use, with a kernel running {usage[3]} % of the time"
    return None


def _memory_unused(case: Case) -> str | None:
    usage = _usage(case)
    if usage and usage[3] >= 50 and usage[1] < usage[2] / 4:
        name, used, total, _ = usage
        return f"training on {name} uses {used} of {total} MiB"
    return None


def _rotating(case: Case) -> str | None:
    return "this folder is on a rotating disk" if case.machine.rotating else None


RULES = (
    Rule(
        "below-minimum",
        _below_minimum,
        "few cores: a graph cache needs no workers; little memory: smaller batches and "
        "gradient accumulation; little disk: free some before a cache is built",
        "0.11",
        "the profile of docs/guides/graphs_rtx3050.md",
    ),
    Rule(
        "torch-without-cuda",
        _torch_without_cuda,
        "install torch from the index of your CUDA version: pytorch.org/get-started",
        "1.17",
        "torch/version.py",
    ),
    Rule(
        "driver-too-old",
        _driver_too_old,
        "update the driver, or install torch for the CUDA version of this driver",
        "3.21",
        f"{_COMPATIBILITY}/minor-version-compatibility.html",
    ),
    Rule(
        "gpu-too-old-for-torch",
        _gpu_too_old,
        "take another GPU (on Kaggle: T4 x2), or install torch for CUDA 12.6",
        "3.21",
        "github.com/Kaggle/docker-python/issues/1546; "
        "github.com/NVIDIA/cuDecomp/pull/97",
    ),
    Rule(
        "torch-too-old",
        _torch_too_old,
        "update torch: trainfast.torch supports 2.6 and later",
        "3.21",
        "docs/compatibility.md",
    ),
    Rule(
        "cores-limited",
        _cores_limited,
        "size by the smaller number: num_workers, torch.set_num_threads, "
        "OMP_NUM_THREADS",
        "1.17 2.11",
        "torch/utils/data/dataloader.py counts the affinity and no quota",
    ),
    Rule(
        "shm-small",
        _small_shm,
        "start the container with --ipc=host or --shm-size=8g; else num_workers: 0",
        "2.7",
        "github.com/pytorch/pytorch#docker-image",
    ),
    Rule(
        "pcie-narrow",
        _narrow_pcie,
        "move the card to a slot with more lanes; otherwise send less: uint8 images "
        "that the GPU converts, pin_memory, non_blocking copies",
        "",
        f"{_SMI}: pcie.link.width, reduced while the GPU is not in use",
    ),
    Rule(
        "gpu-throttled",
        _throttled,
        "clean or improve the cooling, and check the power supply's cables; a laptop "
        "needs its charger",
        "4.7",
        f"{_SMI}: clocks_event_reasons",
    ),
    Rule(
        "gpu-hot",
        _hot,
        "improve the cooling, or lower the limit: nvidia-smi -pl <watts>",
        "4.7",
        "the target of docs/guides/emberformer_rtx3090.md",
    ),
    Rule(
        "gpu-memory-taken",
        _memory_taken,
        "end the process that holds it (nvidia-smi lists them; a notebook keeps its "
        "memory until its kernel restarts)",
        "2.12 2.16",
        f"{_SMI}: memory.used, utilization.gpu",
    ),
    Rule(
        "gpu-underused",
        _underused,
        "find what the GPU waits for: trainfast diagnose --probe train.py",
        "0.15 1.16 2.13 2.17 3.20",
        f"{_SMI}: utilization.gpu",
    ),
    Rule(
        "gpu-memory-unused",
        _memory_unused,
        "raise the batch size (and the learning rate with it) while throughput grows",
        "1.20 4.1 4.7",
        "the targets of docs/guides/emberformer_rtx3090.md",
    ),
    Rule(
        "rotating-disk",
        _rotating,
        "put data and caches on an SSD, or into RAM if they fit",
        "0.14 1.17",
        "/sys/dev/block/*/queue/rotational",
    ),
)
