"""The graph cache's loops (csrc/simd/graph_loops.h, crc32c.h), compiled alone for
each instruction set that this machine has."""

import ctypes
import os
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which(os.environ.get("CC", "cc").split()[0])
FLAGS = ["-std=c11", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
SANITIZE = ["-fsanitize=undefined", "-fno-sanitize-recover=all"]
AVX2 = ["-mssse3", "-msse4.2", "-mavx2", "-mfma", "-mf16c", "-mbmi2", "-mpclmul"]
AVX512 = [*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl"))]
SETS = {
    "portable": ([], set()),
    "sse42": (["-msse4.2"], {"sse4_2"}),
    "avx2": (AVX2, {"avx2", "pclmulqdq"}),
    "avx512": (AVX512, {"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
}
SOURCE = """
#include "simd/graph_loops.h"
const tfast_graph_kernels *kernels(void);
const tfast_graph_kernels *kernels(void) { return &graph_kernels; }
int folds(void);
#ifdef CRC_AVX512_H
int folds(void) { return crc_can_fold(); }
#else
int folds(void) { return 0; }
#endif
"""
STORED = dict(u1=2, u2=3, u4=4, i1=5, i2=6, i4=7)  # GRAPH_AS_U8 and so on
SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 255, 256, 257, 5000]
POINTER, INT, INT64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


class Kernels(ctypes.Structure):
    _fields_ = [
        ("crc32c", ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32, POINTER, INT64)),
        ("widen", ctypes.CFUNCTYPE(None, POINTER, INT, POINTER, INT, INT64, INT64)),
        ("add", ctypes.CFUNCTYPE(None, POINTER, POINTER, INT, INT64, INT64)),
        (
            "range",
            ctypes.CFUNCTYPE(None, POINTER, INT, INT, INT64, POINTER, POINTER),
        ),
        ("narrow", ctypes.CFUNCTYPE(None, POINTER, INT, POINTER, INT, INT64)),
        ("fill", ctypes.CFUNCTYPE(None, POINTER, INT64, INT64)),
    ]


def features():
    if platform.machine() != "x86_64":
        return set()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next(line for line in lines if line.startswith("flags")).split())


def build(folder, name):
    flags, needed = SETS[name]
    if not COMPILER:
        pytest.skip("needs a C compiler")
    if not needed <= features():
        pytest.skip(f"this CPU has no {name}")
    source, target = folder / f"{name}.c", folder / f"{name}.so"
    source.write_text(SOURCE)
    files = [str(source), str(ROOT / "csrc/cpuid.c"), "-o", str(target)]
    optimise = ["-O2", "-ftree-vectorize"]
    command = [COMPILER, *FLAGS, *SANITIZE, *optimise, *flags, f"-I{ROOT / 'csrc'}"]
    done = subprocess.run([*command, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="module", params=SETS)
def library(request, tmp_path_factory):
    return build(tmp_path_factory.mktemp("kernels"), request.param)


@pytest.fixture(scope="module")
def kernels(library):
    library.kernels.restype = ctypes.POINTER(Kernels)
    return library.kernels().contents


def misaligned(dtype, n, elements=1):
    """An array framed by canaries, aligned to its elements only."""
    size = np.dtype(dtype).itemsize
    whole = np.full(n * size + 128, 0xA5, np.uint8)
    start = -whole.ctypes.data % 64 + elements * size
    return whole, whole[start : start + n * size].view(dtype)


def check_canaries(whole, array):
    start = array.ctypes.data - whole.ctypes.data
    assert (whole[:start] == 0xA5).all()
    assert (whole[start + array.nbytes :] == 0xA5).all()


def edge_values(rng, dtype, n):
    info = np.iinfo(dtype)
    values = rng.integers(info.min, info.max, n, dtype, endpoint=True)
    edges = np.array([info.min, info.max, 0, 1], dtype)[:n]
    values[: len(edges)] = edges
    return values


# ---- crc32c


def bitwise_crc(crc, data):
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_crc_of_known_messages(kernels):
    """RFC 3720, B.4."""
    known = {
        b"": 0,
        b"123456789": 0xE3069283,
        bytes(32): 0x8A9136AA,
        b"\xff" * 32: 0x62A8AB43,
        bytes(range(32)): 0x46DD794E,
        bytes(reversed(range(32))): 0x113FDB5C,
    }
    for message, crc in known.items():
        assert kernels.crc32c(0, message, len(message)) == crc


def test_crc_of_every_short_length_and_alignment(kernels):
    data = np.random.default_rng(1).integers(0, 256, 400, np.uint8)
    for alignment in range(9):
        message = data[alignment:].tobytes()
        crc = 0
        for n in range(301):
            found = kernels.crc32c(0, data.ctypes.data + alignment, n)
            assert found == crc, (alignment, n)
            crc = bitwise_crc(crc, message[n : n + 1])


def test_crc_of_long_messages(kernels):
    data = np.random.default_rng(2).integers(0, 256, 70_000, np.uint8)
    message = data.tobytes()
    lengths = [511, 512, 513, 575, 1023, 1535, 2700, 6144, 6145, 12_288, 55_664, 69_997]
    crc, done = 0xDEADBEEF, 0
    for n in lengths:
        crc, done = bitwise_crc(crc, message[done:n]), n
        assert kernels.crc32c(0xDEADBEEF, data.ctypes.data, n) == crc, n


def test_crc_goes_on_where_it_ended(kernels):
    data = np.random.default_rng(3).integers(0, 256, 5000, np.uint8)
    whole = kernels.crc32c(0, data.ctypes.data, 5000)
    for cut in [0, 1, 8, 255, 256, 2700, 4999, 5000]:
        first = kernels.crc32c(0, data.ctypes.data, cut)
        assert kernels.crc32c(first, data.ctypes.data + cut, 5000 - cut) == whole


def test_crc_finds_every_flipped_bit(kernels):
    data = np.random.default_rng(4).integers(0, 256, 600, np.uint8)
    whole = kernels.crc32c(0, data.ctypes.data, 600)
    for bit in range(0, 4800, 7):
        data[bit // 8] ^= 1 << bit % 8
        assert kernels.crc32c(0, data.ctypes.data, 600) != whole
        data[bit // 8] ^= 1 << bit % 8


def test_folding_is_used_where_the_cpu_can(library, request):
    wanted = request.node.callspec.params["library"] == "avx512"
    assert library.folds() == (wanted and "vpclmulqdq" in features())


# ---- Integers

WIDENINGS = [
    (stored, out)
    for stored in STORED
    for out in ("u2", "u4", "u8", "i2", "i4", "i8")
    if int(stored[1]) < int(out[1]) and (stored[0] == "u" or out[0] == "i")
]


@pytest.mark.parametrize(("stored", "out"), WIDENINGS)
def test_widen_and_narrow_are_exact(kernels, stored, out):
    rng = np.random.default_rng(5)
    for n in SIZES:
        _, source = misaligned(stored, n)
        source[:] = edge_values(rng, stored, n)
        whole, wide = misaligned(out, n)
        for add in (0, 1, 12345, -3):
            kernels.widen(
                wide.ctypes.data,
                wide.itemsize,
                source.ctypes.data,
                STORED[stored],
                n,
                add,
            )
            with np.errstate(over="ignore"):
                expected = source.astype(out) + np.array(add).astype(out)
            np.testing.assert_array_equal(wide, expected)
            check_canaries(whole, wide)
        wide[:] = source
        whole, back = misaligned(stored, n)
        kernels.narrow(
            back.ctypes.data, STORED[stored], wide.ctypes.data, wide.itemsize, n
        )
        np.testing.assert_array_equal(back, source)
        check_canaries(whole, back)


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"])
def test_add_wraps_as_numpy_does(kernels, dtype):
    rng = np.random.default_rng(6)
    for n in SIZES:
        source = edge_values(rng, dtype, n)
        whole, out = misaligned(dtype, n)
        for add in (0, 7, 2**40 + 5, -1):
            kernels.add(out.ctypes.data, source.ctypes.data, out.itemsize, n, add)
            expected = source + np.array(add).astype(dtype)
            np.testing.assert_array_equal(out, expected)
            check_canaries(whole, out)


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"])
def test_range_finds_both_ends(kernels, dtype):
    rng = np.random.default_rng(7)
    info = np.iinfo(dtype)
    low, high = ctypes.c_int64(), ctypes.c_int64()
    for n in SIZES[1:]:
        values = rng.integers(0, 100, n).astype(dtype)
        for at in {0, n // 2, n - 1}:
            for extreme in (info.min, info.max, 50):
                values[at], before = extreme, values[at]
                kernels.range(
                    values.ctypes.data,
                    values.itemsize,
                    info.min < 0,
                    n,
                    ctypes.byref(low),
                    ctypes.byref(high),
                )
                ends = [
                    min(int(end), 2**63 - 1) for end in (values.min(), values.max())
                ]
                assert [low.value, high.value] == ends
                values[at] = before


def test_range_of_only_huge_values_is_the_largest_int64(kernels):
    values = np.array([2**63, 2**64 - 1], "u8")
    low, high = ctypes.c_int64(), ctypes.c_int64()
    kernels.range(values.ctypes.data, 8, 0, 2, ctypes.byref(low), ctypes.byref(high))
    assert (low.value, high.value) == (2**63 - 1, 2**63 - 1)


def test_fill_writes_the_value_and_nothing_else(kernels):
    for n in SIZES:
        whole, out = misaligned("i8", n)
        kernels.fill(out.ctypes.data, n, -(2**40))
        assert (out == -(2**40)).all()
        check_canaries(whole, out)
