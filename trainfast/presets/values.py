"""The values of the presets, each with its reason. None of these is measured."""

from typing import Any, NamedTuple

from trainfast.presets.machine import Machine

PROFILES = ("production", "debug", "ci")
_BATCH = {"cuda": 524288, "mps": 65536, "cpu": 32768}
_LARGEST_RAM, _LARGEST_VRAM = 32, 24  # GB beyond which batches do not grow
_TRITON = 7.0  # compute capability that torch.compile needs
_TF32 = 8.0


class Value(NamedTuple):
    """A setting by its dotted name, and why it has this value."""

    key: str
    value: bool | int | float | str | list[str]
    reason: str
    measured: bool = False


def preset(machine: Machine, profile: str | None = None) -> list[Value]:
    """The settings for a machine.

    Args:
        machine: what to train on.
        profile: "production", "debug" or "ci"; None: by the hardware alone.

    Raises:
        ValueError: "production" without a CUDA device.
    """
    if profile == "ci":
        return _ci()
    if profile == "debug":
        return _debug(machine)
    if profile == "production":
        if machine.device != "cuda":
            raise ValueError(
                f"production is a profile of CUDA GPUs, got {machine.device}; leave "
                "--profile out, or pass --device cuda to write it for another machine"
            )
        return _production(machine)
    return [*_by_device(machine), *_by_vram(machine), *_variables(machine, 4, 128)]


def progressive(machine: Machine) -> list[list[Value]]:
    """Three configurations of rising memory: batch, then model, then decoder."""
    batch = Value("batch_size", 32, "4 times a small batch of 8")
    larger = [
        Value("d_model", 128, "twice the embedding"),
        Value("num_layers", 6, "twice the layers"),
    ]
    decoder = "nvidia/segformer-b2-finetuned-ade-512-512"
    steps = [
        [batch, Value("d_model", 64, "kept"), Value("num_layers", 3, "kept")],
        [batch, *larger],
        [batch, *larger, Value("model_name", decoder, "27M instead of 3.7M weights")],
    ]
    return [
        [first._replace(reason=f"{first.reason}; {_need(machine, need)}"), *others]
        for (first, *others), need in zip(steps, (6, 10, 14))
    ]


def _need(machine: Machine, need: int) -> str:
    text = f"the step takes about {need} GB"
    if machine.vram is not None and need > machine.vram:
        text += f", more than the GPU's {machine.vram} GB"
    return text


def _by_device(machine: Machine) -> list[Value]:
    device = machine.device
    by_ram = _batch_by_ram(machine.ram)
    limit = f"{machine.ram} GB of RAM" if by_ram < _BATCH[device] else f"on {device}"
    serial = device == "cpu"
    compiles, why = _compile(machine)
    values = [
        Value("device", device, "what was found or asked for"),
        Value(
            "vectorization",
            "serial" if serial else "multiprocessing",
            "processes take the cores from training" if serial else f"on {device}",
        ),
        Value("trainer.batch_size", min(by_ram, _BATCH[device]), limit),
        Value("trainer.compile", compiles, why),
    ]
    if compiles:
        reason = "CUDA graphs for small steps"
        values.append(Value("trainer.compile_mode", "reduce-overhead", reason))
    mixed = device == "cuda"
    reason = (
        "tensor cores, half the activations" if mixed else "float16 AMP is for CUDA"
    )
    values.append(Value("trainer.use_mixed_precision", mixed, reason))
    if mixed:
        values.append(Value("trainer.grad_scaler_enabled", True, "float16 underflows"))
    return values


def _batch_by_ram(ram: int) -> int:
    """32K at 8 GB and 512K from 32 GB on; a power of two, growing as ram squared."""
    exact = 32768 * (min(ram, _LARGEST_RAM) / 8) ** 2
    return 1 << (int(exact).bit_length() - 1)


def _compile(machine: Machine) -> tuple[bool, str]:
    if machine.device == "cpu":
        return False, "compiling takes long on a CPU"
    if machine.capability is not None and machine.capability < _TRITON:
        return False, f"needs capability {_TRITON}, the GPU has {machine.capability}"
    return True, "the first epoch is slower"


def _by_vram(machine: Machine) -> list[Value]:
    """Of a transformer: 96 at 12 GB, 128 at 16 GB, 192 at 24 GB."""
    if machine.device != "cuda":
        return []
    values = []
    if machine.vram is not None:
        batch = 8 * max(1, min(machine.vram, _LARGEST_VRAM))
        reason = f"8 for each GB; the GPU has {machine.vram}"
        values.append(Value("training.batch_size", batch, reason))
    workers = max(1, min(4, machine.cores // 2))
    values += [
        Value("training.use_compile", *_compile(machine)),
        Value("training.gradient_clip", 1.0, "0 switches it off"),
        Value("training.log_interval", 100, "each line waits for the GPU"),
        Value("training.num_workers", workers, f"half of {machine.cores} cores, 4 max"),
        Value("training.persistent_workers", True, "no restart at each epoch"),
        Value("training.prefetch_factor", 2, "batches ahead of each worker"),
        Value("training.pin_memory", True, "copies to the GPU overlap with work"),
        Value("cudnn_benchmark", True, "pays if shapes repeat"),
    ]
    if machine.capability is not None and machine.capability >= _TF32:
        reason = f"TF32 at capability {machine.capability}; rounds inputs to 10 bits"
        values.append(Value("float32_matmul_precision", "high", reason))
    return values


def _variables(machine: Machine, threads: int, split: int) -> list[Value]:
    if machine.device != "cuda":
        return []  # a CPU needs all its threads
    count, reason = str(min(threads, machine.cores)), "leaves cores to the loader"
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    allocator = f"max_split_size_mb:{split},garbage_collection_threshold:0.8"
    return [
        *(Value(f"env_vars.{name}", count, reason) for name in names),
        Value("env_vars.PYTORCH_CUDA_ALLOC_CONF", allocator, "less fragmentation"),
    ]


def _production(machine: Machine) -> list[Value]:
    """The device's values with a larger batch where the memory is a large GPU's."""
    large = machine.ram >= _LARGEST_RAM and (machine.vram or 0) >= _LARGEST_VRAM
    workers = max(1, min(8, machine.cores))
    values = {v.key: v for v in [*_by_device(machine), *_by_vram(machine)]}
    if large:
        reason = f"{machine.vram} GB of GPU memory, {machine.ram} GB of RAM"
        values["trainer.batch_size"] = Value("trainer.batch_size", 1 << 20, reason)
    batch = int(values["trainer.batch_size"].value)  # type: ignore[arg-type]
    reason = "a slice of the batch"
    for value in (
        Value("trainer.minibatch_size", min(32768, batch), reason),
        Value("trainer.num_workers", workers, f"{machine.cores} cores, 8 max"),
    ):
        values[value.key] = value
    return [*values.values(), *_variables(machine, 8, 256)]


def _debug(machine: Machine) -> list[Value]:
    batch = min(8192, _batch_by_ram(machine.ram))
    values = [
        Value("device", machine.device, "what was found or asked for"),
        Value("vectorization", "serial", "one process to debug"),
        Value("trainer.batch_size", batch, "short steps"),
        Value("trainer.compile", False, "tracebacks lead to the model's lines"),
        Value("trainer.use_mixed_precision", False, "no overflows to tell apart"),
    ]
    if machine.device == "cuda":
        reason = "errors appear at the call that made them; slow"
        values.append(Value("env_vars.CUDA_LAUNCH_BLOCKING", "1", reason))
    return values


def _ci() -> list[Value]:
    return [
        Value("device", "cpu", "a test machine may have no GPU"),
        Value("vectorization", "serial", "one process"),
        Value("trainer.batch_size", 1024, "short tests"),
        Value("trainer.compile", False, "compiling takes longer than the test"),
        Value("trainer.profiler.interval_epochs", 0, "no profiling"),
    ]


def nested(values: list[Value]) -> dict[str, Any]:
    """The settings as sections: "a.b" is b in the section a."""
    found: dict[str, Any] = {}
    for value in values:
        *sections, name = value.key.split(".")
        inner = found
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return found
