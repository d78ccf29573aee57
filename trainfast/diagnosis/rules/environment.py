"""Rules about environment variables, and about what a process has switched on."""

from trainfast.diagnosis.process import DEPRECATED
from trainfast.diagnosis.rules.rule import Case, Rule

_NO_READER = {
    "TORCH_CUDNN_V8_API_ENABLED": (2, 0),
    "TORCH_CUDNN_BENCHMARK": (0, 0),
}
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_NEW, _OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
_LEGACY_TF32 = (
    "torch.backends.cuda.matmul.allow_tf32",
    "torch.backends.cudnn.allow_tf32",
)


def _no_effect(case: Case) -> str | None:
    torch = case.machine.torch_version
    found = [
        name
        for name, since in _NO_READER.items()
        if name in case.variables and torch and torch >= since
    ]
    if not found:
        return None
    return f"torch {case.machine.torch} does not read {', '.join(found)}"


def _launch_blocking(case: Case) -> str | None:
    value = case.variables.get("CUDA_LAUNCH_BLOCKING", "0")
    return f"CUDA_LAUNCH_BLOCKING={value}" if value not in ("", "0") else None


def _allocator(case: Case) -> str | None:
    new, old = (case.variables.get(name) for name in (_NEW, _OLD))
    torch = case.machine.torch_version
    if new is not None and old is not None:
        return None if new == old else f"{_NEW}={new} and {_OLD}={old} differ"
    if new is not None and torch and torch < (2, 11):
        return f"{_NEW} is set; torch {case.machine.torch} may ignore it"
    return None


def _too_many_threads(case: Case) -> str | None:
    cores = case.machine.usable_cores
    found = [
        f"{name}={case.variables[name]}"
        for name in _THREADS
        if case.variables.get(name, "").isdecimal()
        and int(case.variables[name]) > cores
    ]
    return f"{', '.join(found)} on {cores} usable cores" if found else None


def _flush_to_zero(case: Case) -> str | None:
    running = case.machine.running
    if not running.flush_to_zero:
        return None
    by = ", ".join(running.fast_math) or "a library that is loaded"
    return f"subnormal numbers are 0 in this thread, switched by {by}"


def _mixed_tf32(case: Case) -> str | None:
    refused = case.machine.running.tf32_mixed
    if refused:
        return f"reading {refused} raises: fp32_precision was set beside it"
    torch = case.machine.torch_version
    for script in case.scripts if torch and torch >= (2, 9) else ():
        legacy = [name for name in script.assigned if name in _LEGACY_TF32]
        new = [name for name in script.assigned if name.endswith(".fp32_precision")]
        if legacy and new:
            lines = f"lines {script.assigned[legacy[0]]} and {script.assigned[new[0]]}"
            return f"{script.path}, {lines}: {legacy[0]} and {new[0]} are both set"
    return None


def _deprecated(case: Case) -> str | None:
    torch = case.machine.torch_version
    places = [(name, "this process") for name in case.machine.running.deprecated]
    for script in case.scripts:
        places += [(n, f"{script.path}:{line}") for n, line in script.names.items()]
    found = {
        name: f"{place}: {name} is now {DEPRECATED[name][1]}"
        for name, place in reversed(places)
        if name in DEPRECATED and torch and torch >= DEPRECATED[name][0]
    }
    return "; ".join(found[name] for name in sorted(found)) or None


RULES = (
    Rule(
        "variable-without-effect",
        _no_effect,
        "remove it: the cuDNN v8 API is the default, and cuDNN's benchmark mode is "
        "torch.backends.cudnn.benchmark = True",
        "3.9",
        "github.com/pytorch/pytorch/pull/91117; docs.pytorch.org: CUDA Environment "
        "Variables",
    ),
    Rule(
        "launch-blocking",
        _launch_blocking,
        "unset it: every kernel launch waits for its kernel; it is for debugging",
        "3.9 3.15",
        "CUDA Programming Guide, CUDA Environment Variables",
    ),
    Rule(
        "allocator-variable",
        _allocator,
        f"set {_OLD} alone: every torch reads it; {_NEW} works from torch 2.11 on",
        "3.9",
        "github.com/pytorch/pytorch/issues/183387; c10/cuda/CUDAAllocatorConfig.h",
    ),
    Rule(
        "too-many-threads",
        _too_many_threads,
        "set it to the usable cores at most, less those that workers use",
        "3.9",
        "PyTorch Performance Tuning Guide, CPU specific optimizations",
    ),
    Rule(
        "flush-to-zero",
        _flush_to_zero,
        "update or do without that library: it was linked with -ffast-math; "
        "torch.set_flush_denormal(False) undoes it for the calling thread",
        "3.7",
        "github.com/llvm/llvm-project/issues/57589",
    ),
    Rule(
        "tf32-mixed",
        _mixed_tf32,
        'use one interface: torch.set_float32_matmul_precision("high"), and neither '
        "allow_tf32 nor fp32_precision",
        "0.7 1.4",
        "docs.pytorch.org: CUDA semantics, TensorFloat-32; "
        "github.com/pytorch/pytorch/issues/179445",
    ),
    Rule(
        "deprecated-amp",
        _deprecated,
        "use the name that is given; trainfast.GradScaler takes GradScaler's place",
        "2.3",
        "torch/cuda/amp/autocast_mode.py; github.com/pytorch/pytorch/issues/130659",
    ),
)
