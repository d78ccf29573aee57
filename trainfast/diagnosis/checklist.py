"""The guides' checklists and decision trees: each step with its state here."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from trainfast.diagnosis.rules.rule import Case, Finding

Done = Callable[[Case], bool | None]


class Step(NamedTuple):
    """One step of a checklist or decision tree.

    Attributes:
        when: "before training", "after training", or the symptom it is for.
        text: what to do.
        how: the command or setting.
        rows: rows of the guides.
        rules: the rules that find it undone.
        done: whether the facts show it done.
    """

    when: str
    text: str
    how: str
    rows: str
    rules: tuple[str, ...] = ()
    done: Done = lambda case: None


class State(NamedTuple):
    """A step, and "done", the rule that finds it undone, or "" for not known."""

    when: str
    text: str
    state: str
    how: str
    rows: str


def states(case: Case, found: Iterable[Finding]) -> list[State]:
    """The state of each step, given what the rules found."""
    names = {finding.id for finding in found}
    rows = []
    for step in STEPS:
        undone = [name for name in step.rules if name in names]
        state = undone[0] if undone else "done" if step.done(case) else ""
        how = step.how.format(smaller=_smaller(case))
        rows.append(State(step.when, step.text, state, how, step.rows))
    return rows


def _smaller(case: Case) -> str:
    """Half the batch, and accumulation steps that keep the effective batch."""
    batch = case.settings.number("batch_size") or 0
    steps = case.settings.number("accumulate") or 1
    if batch < 2:
        return "half the batch, twice the accumulation steps"
    half = batch // 2
    return f"{batch} x {steps} becomes {half} x {-(-batch * steps // half)}"


def _has(name: str) -> Done:
    """Whether the configuration has the setting."""
    return lambda case: case.settings.find(name) is not None


def _on(name: str) -> Done:
    return lambda case: case.settings.on(name)


def _mixed(case: Case) -> bool | None:
    precision = case.settings.precision()
    return precision is not None and precision[0] != "float32"


def _workers(case: Case) -> bool | None:
    return (case.settings.number("workers") or 0) > 0


def _seen(case: Case) -> bool | None:
    return case.gpu is not None and case.gpu.memory_used is not None


def _ssd(case: Case) -> bool | None:
    return case.machine.rotating is False


_PRECISION = ("mixed-precision-off", "bfloat16-emulated", "scaler-off")
_PINNED, _KEPT = ("pin-memory-off",), ("workers-restart", "workers-options")
_WORKERS = ("workers-exceed-cores", "workers-zero", "cores-limited")
_COMPILE = ("torch-too-old", "driver-too-old", "compile-unavailable")
_PROBE = "trainfast diagnose --probe train.py"
_WATCH = "trainfast diagnose in a second terminal"
_CACHE = "trainfast cache build"

# Each group's steps in the guides' order: text, how, rows, rules, done.
_GROUPS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "before training": (
        ("GPU memory is free", "nvidia-smi", "2.16", ("gpu-memory-taken",), _seen),
        ("data are cached", _CACHE, "0.14 0.15", ("workers-zero",), _has("cache")),
        ("mixed precision", "torch.autocast", "0.14 2.16", _PRECISION, _mixed),
        ("pinned memory", "pin_memory", "0.14 2.16", _PINNED, _on("pin_memory")),
        ("cuDNN benchmark mode, if shapes repeat", "cudnn.benchmark", "0.14 1.6"),
        ("cache and data on an SSD", "", "0.14", ("rotating-disk",), _ssd),
        ("the number of workers is measured", _PROBE, "2.16", _WORKERS),
        ("the batch size is measured", _PROBE, "1.20 2.16", ("batch-far-from-guide",)),
    ),
    "while training": (
        ("GPU utilisation above 80 %", _WATCH, "1.16 2.17 3.20", ("gpu-underused",)),
        ("40 to 60 % of GPU memory", _WATCH, "4.7", ("gpu-memory-unused",)),
        ("below 85 degrees C", _WATCH, "4.7", ("gpu-hot", "gpu-throttled")),
    ),
    "after training": (
        ("settings are recorded", "trainfast diagnose --markdown", "2.16"),
    ),
    "GPU utilisation is low": (
        ("1. cache the data", _CACHE, "0.15", (), _has("cache")),
        ("2. raise the batch size", _PROBE, "0.15 2.13 3.20"),
        ("3. workers; 0 with a cache", _PROBE, "0.15 2.13", _WORKERS, _workers),
        (
            "4. keep workers alive",
            "persistent_workers",
            "2.13",
            _KEPT,
            _on("persistent_workers"),
        ),
        ("5. prefetch, pin memory", "pin_memory", "2.13", _PINNED, _on("pin_memory")),
        ("6. mixed precision", "torch.autocast", "2.13 3.20", _PRECISION, _mixed),
    ),
    "the CPU is the bottleneck": (
        ("1. more workers, within the cores", _PROBE, "2.14", _WORKERS, _workers),
        ("2. preprocess once, and cache", _CACHE, "2.14", (), _has("cache")),
        ("3. augment less, decode images faster", _PROBE, "2.14"),
    ),
    "CUDA is out of memory": (
        ("1. smaller batches, more accumulation", "{smaller}", "0.16 1.18 2.12 4.8"),
        ("2. mixed precision", "torch.autocast", "2.12 4.8", _PRECISION, _mixed),
        ("3. recompute activations", "torch.utils.checkpoint", "3.19 4.8"),
        ("4. smaller images, fewer modes, a narrower model", "", "0.16 2.12 4.8"),
    ),
    "memory grows": (
        ("1. log loss.item(), keep no loss tensor", "", "2.15"),
        ("2. call backward in each step, or detach()", "", "2.15"),
        ("3. delete what is not used", "empty_cache() frees no live tensor", "2.15"),
    ),
    "torch.compile fails": (
        ("1. update torch and the driver", "pip install -U torch", "3.21", _COMPILE),
        ("2. train without it", "use_compile: false", "1.19 3.21"),
    ),
}
STEPS = tuple(Step(when, *step) for when, steps in _GROUPS.items() for step in steps)
