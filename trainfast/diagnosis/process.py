"""What the running process has switched on: a notebook, or a script that asks.

torch is looked at only if the process has loaded it.
"""

import mmap
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# x86 code that GCC and Clang link into a library with -ffast-math: it loads the SSE
# control register, sets flush-to-zero and denormals-are-zero, and stores it again.
_FAST_MATH = re.compile(
    rb"\x0f\xae\x5c\x24.\x81\x4c\x24.\x40\x80\x00\x00\x0f\xae\x54\x24", re.DOTALL
)
# Names that torch has deprecated: since which version, and what takes their place.
DEPRECATED = {
    "torch.cuda.amp.autocast": ((2, 4), 'torch.amp.autocast("cuda")'),
    "torch.cuda.amp.GradScaler": ((2, 4), 'torch.amp.GradScaler("cuda")'),
    "torch.cuda.amp.custom_fwd": ((2, 4), "torch.amp.custom_fwd"),
    "torch.cuda.amp.custom_bwd": ((2, 4), "torch.amp.custom_bwd"),
    "torch.cpu.amp.autocast": ((2, 4), 'torch.amp.autocast("cpu")'),
    "torch.cpu.amp.GradScaler": ((2, 4), 'torch.amp.GradScaler("cpu")'),
}


@dataclass(frozen=True)
class Running:
    """State of the process.

    Attributes:
        flush_to_zero: whether this thread's subnormal numbers become 0.
        fast_math: the loaded libraries with the code that switches this on.
        cuda: whether torch has started CUDA here.
        tf32_mixed: the setting that torch refuses to read, because the legacy interface
            was mixed with `fp32_precision`.
        deprecated: names of DEPRECATED that the main module holds.
    """

    flush_to_zero: bool = False
    fast_math: tuple[str, ...] = ()
    cuda: bool = False
    tf32_mixed: str | None = None
    deprecated: tuple[str, ...] = ()


def look() -> Running:
    """Looks at this process; loads nothing."""
    flushed = sys.float_info.min / 2 == 0.0
    torch: Any = sys.modules.get("torch")
    return Running(
        flush_to_zero=flushed,
        fast_math=tuple(fast_math_libraries()) if flushed else (),
        cuda=hasattr(torch, "cuda") and torch.cuda.is_initialized(),
        tf32_mixed=_tf32_mixed(torch),
        deprecated=tuple(_deprecated(torch)),
    )


def fast_math_libraries(maps: str = "/proc/self/maps") -> list[str]:
    """The loaded libraries that were linked with -ffast-math, on x86.

    Args:
        maps: the process's memory map, for tests.
    """
    try:
        lines = Path(maps).read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if ".so" in line}
    return [path for path in sorted(paths) if _is_fast_math(path)]


def _is_fast_math(path: str) -> bool:
    try:
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _FAST_MATH.search(data) is not None
    except (OSError, ValueError):
        return False


def _tf32_mixed(torch: Any) -> str | None:
    if not hasattr(torch, "backends"):
        return None
    backends = {"cuda.matmul": torch.backends.cuda.matmul}
    backends["cudnn"] = torch.backends.cudnn
    with warnings.catch_warnings():  # newer versions warn of the legacy names
        warnings.simplefilter("ignore")
        for name, backend in backends.items():
            try:
                _ = backend.allow_tf32
            except RuntimeError:
                return f"torch.backends.{name}.allow_tf32"
    return None


def _deprecated(torch: Any) -> list[str]:
    held = list(vars(sys.modules.get("__main__", sys)).values())
    found = []
    for name in DEPRECATED if hasattr(torch, "__version__") else ():
        value: Any = torch
        for part in name.split(".")[1:]:
            value = getattr(value, part, None)
        if value is None:
            continue
        if any(item is value or type(item) is value for item in held):
            found.append(name)
    return found
