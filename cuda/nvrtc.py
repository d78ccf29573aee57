"""NVRTC, NVIDIA's compiler of device code in a library: where it is and when it is
needed. As a program it compiles one file, in a process of its own so that a crash of
NVRTC is an error message and its memory is given back:

    python cuda/nvrtc.py LIBRARY      prints its version and architectures as JSON
    python cuda/nvrtc.py LIBRARY JOB  compiles what the file JOB says: compile_job()

Nothing beyond the standard library is imported: the build backend asks requirements()
before anything is installed.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

NAME, VERSION = "nvidia-cuda-nvrtc-cu12", "12.9.86"
# Another 12.x makes code for the same drivers, but other code than what was tested.
WHEEL = f"{NAME}=={VERSION}"
IN_WHEEL = "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
# Machine code that an sdist carries, so that who installs it needs no NVRTC.
PREBUILT = Path("cuda/images/images.json")


def requirements():
    """What pip must install before a build, beyond pyproject.toml's list.

    Returns:
        NVRTC's wheel if TRAINFAST_CUDA=1, or if TRAINFAST_CUDA is auto and there is a
        GPU; nothing if TRAINFAST_NVRTC names a library or prebuilt images are used.
    """
    want = os.environ.get("TRAINFAST_CUDA") or "auto"
    wanted = want == "1" or (want == "auto" and has_gpu())
    named = os.environ.get("TRAINFAST_NVRTC")
    return [] if not wanted or named or uses_prebuilt() else [WHEEL]


def uses_prebuilt():
    """Whether the source tree carries images and no other architectures are wanted."""
    return PREBUILT.exists() and not os.environ.get("TRAINFAST_CUDA_ARCHS")


def has_gpu():
    """Whether an NVIDIA GPU is visible, even where nvidia-smi is not installed."""
    return os.path.exists("/dev/nvidiactl") or bool(gpu_archs())


def gpu_archs():
    """The architectures of the visible GPUs, such as [75, 90], each once."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True).stdout
    except OSError:
        return []
    found = re.findall(r"^(\d+)\.(\d)\s*$", said, re.MULTILINE)
    return sorted({int(major + minor) for major, minor in found})


def find():
    """The path of libnvrtc.so.12: what TRAINFAST_NVRTC names, or else the wheel's.

    Returns:
        The path, or None if neither is there.

    Raises:
        ValueError: TRAINFAST_NVRTC names no file.
    """
    named = os.environ.get("TRAINFAST_NVRTC")
    if named:
        if not os.path.isfile(named):
            raise ValueError(f"TRAINFAST_NVRTC must name libnvrtc.so.12, got {named!r}")
        return named
    for wheel in metadata.distributions(name=NAME):
        library = str(wheel.locate_file(IN_WHEEL))
        if wheel.version == VERSION and os.path.isfile(library):
            return library
    return None


# ---- The program ---------------------------------------------------------------------


def describe(nvrtc):
    """(version, architectures), such as ("12.9", [75, 80])."""
    major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    archs = (ctypes.c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(archs)
    return f"{major.value}.{minor.value}", sorted(archs)


def text_of(nvrtc, program, what):
    """The bytes that nvrtcGet<what> writes."""
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, data)
    return data.raw


def compile_job(nvrtc, job):
    """Compiles one source for one architecture.

    Args:
        nvrtc: The library.
        job: A dict of source (a path), options (a list), is_ptx, image (the path of the
            result) and names ({id: name expression} of the kernels to instantiate).

    Returns:
        A dict of log and names ({id: name in the image}).

    Raises:
        SystemExit: the source does not compile; with NVRTC's log.
    """
    source, program = Path(job["source"]), ctypes.c_void_p()
    create = nvrtc.nvrtcCreateProgram
    create(ctypes.byref(program), source.read_bytes(), job["source"].encode(), 0, 0, 0)
    expressions = {id: name.encode() for id, name in job["names"].items()}
    for expression in expressions.values():
        nvrtc.nvrtcAddNameExpression(program, expression)
    options = [option.encode() for option in job["options"]]
    array = (ctypes.c_char_p * len(options))(*options)
    status = nvrtc.nvrtcCompileProgram(program, len(options), array)
    log = text_of(nvrtc, program, "ProgramLog").rstrip(b"\0").decode()
    if status:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise SystemExit(f"{log}{nvrtc.nvrtcGetErrorString(status).decode()}")
    kind = "PTX" if job["is_ptx"] else "CUBIN"
    Path(job["image"]).write_bytes(text_of(nvrtc, program, kind))
    names, name = {}, ctypes.c_char_p()
    for id, expression in expressions.items():
        nvrtc.nvrtcGetLoweredName(program, expression, ctypes.byref(name))
        names[id] = name.value.decode()
    return {"names": names, "log": log}


def main(library, job=None):
    try:
        nvrtc = ctypes.CDLL(library)
    except OSError as error:
        raise SystemExit(f"NVRTC cannot be opened: {error}") from None
    if job is None:
        print(json.dumps(describe(nvrtc)))
        return
    done = compile_job(nvrtc, json.loads(Path(job).read_text()))
    # A name of its own until it is complete: it says that the image is, too.
    new = Path(job).with_suffix(".new")
    new.write_text(json.dumps(done, indent=1))
    new.replace(Path(job).with_suffix(".json"))


if __name__ == "__main__":
    main(*sys.argv[1:])
