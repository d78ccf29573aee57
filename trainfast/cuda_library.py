"""Where the CUDA part is: a plain C library that the first CUDA array opens."""

import os

from trainfast import _core


def find_cuda_library() -> str:
    """TRAINFAST_CUDA_LIBRARY, or the library beside the extension module, built or
    not."""
    named = os.environ.get("TRAINFAST_CUDA_LIBRARY")
    folder = os.path.dirname(_core.__file__ or "")
    return named or os.path.join(folder, "libtrainfast_cuda.so")
