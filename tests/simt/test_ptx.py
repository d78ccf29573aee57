"""The instructions of cuda/device/ptx.cuh give the words that ptx_vectors.txt keeps: by
their twins here, and on a GPU."""

import ctypes
import importlib.util
import json
import math
import re
import struct
import subprocess
import sys
from ctypes import byref, c_int, c_uint32, c_void_p

import pytest

from tests.simt import build

ROOT = build.ROOT
_spec = importlib.util.spec_from_file_location("nvrtc", ROOT / "cuda" / "nvrtc.py")
nvrtc = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(nvrtc)
SOURCE = build.HERE / "ptx_vectors.cu"
KEPT = (build.HERE / "ptx_vectors.txt").read_text()
WORDS, INPUT, MANY = 1 << 16, 1024, 448  # see the source


def test_twins_of_ptx_give_the_kept_vectors():
    try:
        program = build.program("plain", [SOURCE], build.BUILT / "ptx_vectors_plain")
    except build.NoCompiler as reason:
        pytest.skip(str(reason))
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, KEPT)


class Gpu:
    """The first GPU, by the driver's calls, with the kernels of the source."""

    def __init__(self, folder):
        try:
            self.driver = ctypes.CDLL("libcuda.so.1")
            self.call("cuInit", 0)
        except (OSError, RuntimeError) as reason:
            pytest.skip(f"needs a GPU: {reason}")
        library = nvrtc.find() or pytest.skip("needs NVRTC")
        self.arch = 10 * self.attribute(75) + self.attribute(76)
        context, self.module = c_void_p(), c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        image = compiled(library, folder, self.arch)
        self.call("cuModuleLoadData", byref(self.module), image)
        self.words, memory = (c_uint32 * WORDS)(), ctypes.c_uint64()
        self.call("cuMemAlloc_v2", byref(memory), ctypes.sizeof(self.words))
        self.memory = memory

    def call(self, name, *arguments):
        status = getattr(self.driver, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} gave {status}")

    def attribute(self, number):
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), number, 0)
        return value.value

    def run(self, name, n):
        """The words that a kernel makes."""
        function, size = c_void_p(), ctypes.c_size_t(ctypes.sizeof(self.words))
        kernel = f"of_{name}".encode()
        self.call("cuModuleGetFunction", byref(function), self.module, kernel)
        self.words[:] = [0] * WORDS
        self.words[INPUT : INPUT + 128] = range(128)
        self.call("cuMemcpyHtoD_v2", self.memory, self.words, size)
        blocks, threads = (n // 256, 256) if n > MANY else (1, 32)
        shape = [blocks, 1, 1, threads, 1, 1, 512]
        arguments = (c_void_p * 1)(ctypes.addressof(self.memory))
        self.call("cuLaunchKernel", function, *shape, None, arguments, None)
        self.call("cuMemcpyDtoH_v2", self.words, self.memory, size)
        return self.words[:n]


def compiled(library, folder, arch):
    """The source's machine code."""
    image, job = folder / "vectors.cubin", folder / "vectors.job"
    options = ["--std=c++17", "-fmad=false", "-default-device", f"-arch=sm_{arch}"]
    options += [f"-I{ROOT / name}" for name in ("cuda/device", "cuda", "csrc")]
    told = {"source": str(SOURCE), "options": options, "names": {}}
    job.write_text(json.dumps({**told, "is_ptx": False, "image": str(image)}))
    subprocess.run([sys.executable, nvrtc.__file__, library, job], check=True)
    return image.read_bytes()


def hash_of(words):
    """FNV-1a."""
    value = 0xCBF29CE484222325
    for word in words:
        value = (value ^ word) * 0x100000001B3 % 2**64
    return value


def worst_of_ex2(words):
    """In units in the last place."""
    worst = 0.0
    for i, word in enumerate(words):
        right = 2.0 ** (i / 256 - 120)
        (got,) = struct.unpack("f", struct.pack("I", word))
        unit = math.ldexp(1.0, math.frexp(right)[1] - 24)
        worst = max(worst, abs(got - right) / unit if right < 3e38 else 0)
    return worst


LINES = re.findall(r"(\w+) arch (\d+) (.*)", KEPT)


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    return Gpu(tmp_path_factory.mktemp("vectors"))


@pytest.mark.parametrize("name, arch, rest", LINES, ids=[name for name, *_ in LINES])
def test_ptx_gives_the_kept_vectors_on_the_gpu(gpu, name, arch, rest):
    if gpu.arch < int(arch):
        pytest.skip(f"needs sm_{arch}")
    if name == "ex2_approx":
        assert rest == "within 2 units yes" and worst_of_ex2(gpu.run(name, WORDS)) <= 2
    else:
        n = int(re.search(r"words (\d+)", rest)[1])
        assert rest == f"words {n} hash {hash_of(gpu.run(name, n)):016x}"


@pytest.mark.parametrize("arch", [75, 80])
def test_vectors_compile_for_a_gpu(tmp_path, arch):
    library = nvrtc.find() or pytest.skip("needs NVRTC")
    image = compiled(library, tmp_path, arch)
    names = {name for name, least, _ in LINES if int(least) <= arch}
    assert {f"of_{name}" for name in names} <= set(
        re.findall(r"of_\w+", image.decode("latin-1"))
    )
