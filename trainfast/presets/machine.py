"""The facts about a machine that presets depend on."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DEVICES = ("cuda", "mps", "cpu")


@dataclass(frozen=True)
class Machine:
    """A machine, or what is known of one.

    Attributes:
        device: "cuda", "mps" or "cpu".
        ram: GB of memory in multiples of 4, as the system keeps some of what is built
            in.
        cores: that the process may use.
        vram: GB of the smallest GPU, None if it is not known.
        capability: the lowest compute capability, None if it is not known.
    """

    device: str
    ram: int
    cores: int
    vram: int | None = None
    capability: float | None = None


def machine_of(
    gpus: Sequence[dict[str, Any]],
    ram_bytes: int,
    cores: int,
    device: str | None = None,
) -> Machine:
    """The machine with these parts.

    Args:
        gpus: with "memory", such as "15360 MiB", and "capability", such as "7.5".
        ram_bytes: of memory.
        cores: that the process may use.
        device: what to train on; None: "cuda" where there is a GPU, else "cpu".
    """
    device = device or ("cuda" if gpus else "cpu")
    ram = max(4, 4 * round(ram_bytes / 2**30 / 4))
    if device != "cuda":
        return Machine(device, ram, cores)
    memory = [_number(gpu["memory"]) for gpu in gpus]
    capability = [_number(gpu["capability"]) for gpu in gpus]
    sizes = [round(size / 1024) for size in memory if size is not None]
    known = [number for number in capability if number is not None]
    return Machine(
        device, ram, cores, min(sizes, default=None), min(known, default=None)
    )


def _number(text: str) -> float | None:
    found = re.match(r"\d+(\.\d+)?", text)
    return float(found[0]) if found else None
