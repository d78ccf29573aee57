"""The scratch of attention's calls, which their callers allocate: what the core asks
for, and what it says of memory that will not do. The backend is a stand-in."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_device import run
from trainfast import _core

CSRC = Path(__file__).parents[3] / "csrc"
STAND_IN = r"""
#include "tfast.h"

static const char *
unusable(void)
{
    return NULL;
}

static tfast_status
scratch(int64_t *bytes, const tfast_attention_args *args, bool backward)
{
    *bytes = args->n_q == 1 ? 0 : backward ? 203 : 101;
    return TFAST_OK;
}

/* Writes all of its scratch, and one element of a result. */
static tfast_status
compute(const tfast_attention_args *args, float *result, int bytes)
{
    for (int i = 0; i < bytes && args->n_q > 1; i++) {
        ((char *)args->scratch)[i] = 1;
    }
    *result = (float)((uintptr_t)args->scratch % TFAST_SCRATCH_ALIGNMENT) + 3;
    return TFAST_OK;
}

static tfast_status
forward(const tfast_attention_args *args)
{
    return compute(args, args->out.data, 101);
}

static tfast_status
backward(const tfast_attention_args *args)
{
    return compute(args, args->dq.data, 203);
}

static const tfast_backend backend = {
    .abi = TFAST_ABI,
    .name = "simt",
    .device = TFAST_CPU,
    .unusable = unusable,
    .attention = forward,
    .attention_backward = backward,
    .attention_scratch = scratch,
};

const tfast_backend *
tfast_library_open(uint32_t abi, tfast_fail_function fail)
{
    (void)fail;
    return abi == TFAST_ABI ? &backend : NULL;
}
"""
CALLS = """
import trainfast
from trainfast import _core

asked = []
q = np.ones((1, 2, 5, 8), np.float32)
out, dq = np.full_like(q, 7), np.full_like(q, 7)
lse = np.zeros((1, 2, 5), np.float32)

def forward(scratch, q=q, out=out, **options):
    _core.attention(q, q, q, out, None, scale=1.0, scratch=scratch, **options)

def backward(scratch):
    gradients = (dq, None, None, None, None, None)
    given = (q, q, q, q, q, lse, None)
    _core.attention_backward(*given, *gradients, scale=1.0, scratch=scratch)

def take(n):
    asked.append(n)
    room = np.zeros(n + 64, np.float32)
    return room[-room.ctypes.data // 4 % 16 :][:n]
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("a C compiler must be on PATH")
    folder = tmp_path_factory.mktemp("stand_in")
    source, library = folder / "stand_in.c", folder / "stand_in.so"
    source.write_text(STAND_IN)
    command = [compiler, "-std=c11", "-shared", "-fPIC", f"-I{CSRC}"]
    subprocess.run([*command, "-o", library, source], check=True)
    return library


@pytest.fixture
def made(stand_in):
    def made(code):
        named = {"TRAINFAST_SIMT_LIBRARY": str(stand_in), "TRAINFAST_BACKEND": "simt"}
        return run(CALLS + code, library="none", **named)

    return made


@pytest.fixture
def refused(made):
    def refused(function, error, message):
        """By this error, in both directions, and nothing is written."""
        code = f"""
{function}
for call in (forward, backward):
    try:
        call(wrong)
    except {error} as found:
        assert {message!r} in str(found), found
    else:
        raise SystemExit("no error")
assert (out == 7).all() and (dq == 7).all() and (q == 1).all()
"""
        done = made(code)
        assert done.code == 0, done.err

    return refused


def test_what_a_call_needs_is_asked_for_once_in_float32(made):
    done = made("""
forward(take)
backward(take)
assert asked == [26, 51], asked
assert out[0, 0, 0, 0] == 3 and dq[0, 0, 0, 0] == 3
""")
    assert done.code == 0, done.err


def test_a_call_that_needs_none_asks_for_none(made):
    done = made("""
one = np.ones((1, 2, 1, 8), np.float32)
forward(take, one, one.copy())
forward(None, one, one.copy())
assert asked == []
""")
    assert done.code == 0, done.err


def test_arguments_are_checked_before_memory_is_asked_for(made):
    done = made("""
for options in ({"dropout_p": 2.0}, {"kv_lens": np.array([9])}, {"softcap": -1.0}):
    try:
        forward(take, **options)
    except ValueError as error:
        assert "scratch" not in str(error)
    else:
        raise SystemExit("no error")
assert asked == []
""")
    assert done.code == 0, done.err


def test_scratch_comes_from_the_callers_library(made):
    done = made("""
import torch

trainfast.numpy.attention(q, q, q)
x = torch.ones(1, 2, 5, 8)
trainfast.torch.attention(x, x, x)
sizes = []
empty = torch.empty
torch.empty = lambda *size, **options: sizes.append(size) or empty(*size, **options)
trainfast.torch.attention(x, x, x)
assert (26,) in sizes, sizes
""")
    assert done.code == 0, done.err


WRONG = {
    "none": ("wrong = None", "TypeError", "scratch must be a function where the call"),
    "no function": ("wrong = 5", "TypeError", "'int' object is not callable"),
    "returns None": (
        "wrong = lambda n: None",
        "TypeError",
        "scratch's array must be an array",
    ),
    "dtype": (
        "wrong = lambda n: take(n).astype('d')",
        "ValueError",
        "scratch's array must be float32, got float64",
    ),
    "int": (
        "wrong = lambda n: take(n).view('i')",
        "NotImplementedError",
        "scratch's array must be float64, float32, float16 or bfloat16, got int32",
    ),
    "short": (
        "wrong = lambda n: take(n - 1)",
        "ValueError",
        "scratch's array must have shape (",
    ),
    "dims": (
        "wrong = lambda n: take(n)[None]",
        "ValueError",
        "scratch's array must have shape (",
    ),
    "strides": (
        "wrong = lambda n: take(2 * n)[::2]",
        "ValueError",
        "scratch's array must be dense and aligned to 16 bytes, got shape",
    ),
    "alignment": (
        "wrong = lambda n: take(n + 1)[1:]",
        "ValueError",
        "scratch's array must be dense and aligned to 16 bytes, got shape",
    ),
    "read-only": (
        "def wrong(n):\n    a = take(n)\n    a.flags.writeable = False\n    return a",
        "ValueError",
        "scratch's array must be writable",
    ),
    "device": (
        "wrong = lambda n: OnDevice(take(n))",
        "ValueError",
        "scratch's array must be on cpu as q, got cuda:0",
    ),
    "out of memory": (
        "def wrong(n):\n    raise MemoryError('the allocator says no')",
        "MemoryError",
        "the allocator says no",
    ),
    "torch's out of memory": (
        "import torch\ndef wrong(n):\n    raise torch.OutOfMemoryError('CUDA says no')",
        "torch.OutOfMemoryError",
        "CUDA says no",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_memory_that_will_not_do_is_refused(refused, case):
    refused(*WRONG[case])


# A process of its own: without the core's look at scratch it ends in a fault of memory.
FORCED_MEANWHILE = """
import sys, threading
import numpy as np
import trainfast
from trainfast import _core

q, kv = np.ones((1, 2, 1, 16), np.float16), np.ones((1, 2, 400, 16), np.float16)
out, lse, end = np.empty_like(q), np.empty((1, 2, 1), np.float32), threading.Event()

def force():
    while not end.is_set():
        trainfast.use_backend("simt")
        trainfast.use_backend("scalar")

thread = threading.Thread(target=force)
thread.start()
sys.setswitchinterval(1e-6)
scratch = lambda n: np.empty(n, np.float32)
for _ in range(30000):
    try:
        _core.attention(q, kv, kv, out, lse, scale=0.2, scratch=scratch)
    except NotImplementedError as error:
        assert str(error).startswith("scratch must have the "), error
end.set()
thread.join()
"""


def test_a_backend_forced_by_another_thread_gets_its_scratch_or_refuses(simt):
    subprocess.run([sys.executable, "-c", FORCED_MEANWHILE], check=True)


# ---- The CPU's own backward ----------------------------------------------------------


def backward_scratch(heads, n, kind, threads, dim=64):
    """The bytes that a backward of the CPU asks its caller for."""
    import torch

    asked = []

    def take(n):
        asked.append(4 * n)
        return torch.empty(n)

    q, out = (torch.randn(1, heads, n, dim).to(kind) for _ in range(2))
    lse = torch.randn(1, heads, n)
    grads = [torch.empty_like(q) for _ in range(3)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _core.attention_backward(
            *(q, q, q, q, out, lse, None),
            *(*grads, None, None, None),
            scale=1e-3,
            scratch=take,
        )
    finally:
        torch.set_num_threads(before)
    return sum(asked)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 8, 64])
def test_backward_of_one_head_asks_for_few_copies_of_it(threads):
    """float32: up to 3 sums of dq beside the output's. bfloat16: up to 4, dk and dv."""
    torch = pytest.importorskip("torch")
    head, room = 4 * 3072 * 64, min(threads, 8) * (1 << 20)
    assert (
        3 * head < backward_scratch(1, 3072, torch.float32, threads) < 3 * head + room
    )
    copies = backward_scratch(1, 3072, torch.bfloat16, threads)
    assert 6 * head < copies < 6 * head + 2 * room


@pytest.mark.slow
def test_backward_of_many_heads_asks_for_dq_of_those_in_flight():
    torch = pytest.importorskip("torch")
    head = 4 * 2048 * 64
    assert backward_scratch(8, 2048, torch.float32, 2) < head
    assert backward_scratch(8, 2048, torch.bfloat16, 2) < 2 * head + (2 << 20)


def test_small_backward_asks_for_nothing():
    torch = pytest.importorskip("torch")
    assert backward_scratch(2, 64, torch.float32, 2) == 0
