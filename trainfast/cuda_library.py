"""Where the CUDA part is: a plain C library that the first CUDA array opens."""

import ctypes
import os
import re

from trainfast import _core

# NVIDIA's rule: code of CUDA 12 runs on every driver of CUDA 12 that knows the GPU, but
# PTX only on drivers that know its version.
_FIRST, _BLACKWELL, _OF_PTX = 525, 570, 575


def find_cuda_library() -> str:
    """TRAINFAST_CUDA_LIBRARY, or the library beside the extension module, built or
    not."""
    named = os.environ.get("TRAINFAST_CUDA_LIBRARY")
    folder = os.path.dirname(_core.__file__ or "")
    return named or os.path.join(folder, "libtrainfast_cuda.so")


def library_code(path: str) -> str | None:
    """The machine code in a CUDA library, such as "sm_75, sm_90, PTX 80"; None where it
    cannot be opened."""
    try:
        library = ctypes.CDLL(path)
        return ctypes.string_at(ctypes.addressof(_symbol(library))).decode()
    except (OSError, ValueError):
        return None


def _symbol(library: ctypes.CDLL) -> ctypes.c_char:
    return ctypes.c_char.in_dll(library, "tfast_library_code")


def code_for(capability: int, library: str) -> tuple[str, int]:
    """What a GPU runs of a library's code, and the driver that it needs at least.

    Args:
        capability: the GPU's, times ten.
        library: as `library_code` has it.

    Returns:
        ("sm_80", 525), ("PTX 80", 575), or ("none", 0) for a GPU that is too old.
    """
    archs = [int(word) for word in re.findall(r"sm_(\d+)", library)]
    own = [a for a in archs if a // 10 == capability // 10 and a <= capability]
    if own:
        return f"sm_{max(own)}", _BLACKWELL if max(own) >= 100 else _FIRST
    ptx = [int(word) for word in re.findall(r"PTX (\d+)", library)]
    if ptx and min(ptx) <= capability:
        return f"PTX {min(ptx)}", _OF_PTX
    return "none", 0
