"""Patches torch, sets its switches, and says what is on."""

from importlib import import_module
from typing import Any

_LINES = {
    "adamw": "Using fused AdamW and Adam",
    "amp": "Using trainfast's GradScaler",
    "attention": "Using trainfast's attention",
    "clip": "Using fused gradient clipping",
    "pyg": "Using trainfast's collate function of PyG",
}


def turn_on(
    names: list[str] | None,
    precision: str | None,
    cudnn_benchmark: bool | None,
    tf32: bool,
    leaks: bool = False,
) -> tuple[list[str], list[str]]:
    """What was turned on, a line each, and what was not, with the reason.

    Args:
        names: for `trainfast.patch`; None patches nothing.
        precision: of `torch.set_float32_matmul_precision`; None leaves torch's.
        cudnn_benchmark: of `torch.backends.cudnn.benchmark`; None leaves torch's.
        tf32: whether every GPU has TF32.
        leaks: whether to watch for memory that grows with every step.
    """
    on, notes = [], []
    if names is not None:
        try:
            report = import_module("trainfast.patching").patch(*names)
        except ImportError as error:
            notes.append(f"nothing is patched: {error}")
        else:
            patched = dict.fromkeys(change.name for change in report.changes)
            on += [_LINES[name] for name in patched]
            notes += [f"{each.old} stays: {each.reason}" for each in report.skipped]
            notes += report.notes
    if precision is not None or cudnn_benchmark is not None:
        try:
            switches: Any = import_module("trainfast.torch.switches")
        except ImportError as error:
            notes.append(f"torch's switches are left as they are: {error}")
        else:
            more = switches.set_switches(precision, cudnn_benchmark, tf32)
            on += more[0]
            notes += more[1]
    if leaks:
        try:
            watch: Any = import_module("trainfast.torch.leaks.watch")
        except ImportError as error:
            notes.append(f"leaks are not watched for: {error}")
        else:
            watch.start()
            on.append("Watching for memory that grows with every step")
    return on, notes
