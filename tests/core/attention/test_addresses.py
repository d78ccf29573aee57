"""Attention of arrays at odd addresses and with odd strides: off alignment,
overlapping, backwards, and further apart than 32 bits count."""

import ctypes
import mmap
import subprocess
import sys

import numpy as np
import pytest

import trainfast
from tests.arrays import DTYPES
from tests.attention_calls import Problem, scratch_on
from tests.conftest import USABLE
from trainfast import _core

ROWS = ("q", "k", "v", "dout")


PATHS = [(name, "") for name in USABLE if name not in ("cuda", "simt")]
PATHS += [("simt", ptx) for ptx in ("75", "80") if "simt" in USABLE]


@pytest.fixture(params=PATHS, ids="".join)
def path(request, monkeypatch):
    """Each backend of NumPy arrays, the SIMT runner with either set of instructions."""
    name, ptx = request.param
    if ptx:
        monkeypatch.setenv("TRAINFAST_SIMT_PTX", ptx)
    trainfast.use_backend(name)
    trainfast.reset_stats()
    yield
    trainfast.use_backend(None)


def check(rng, change, dtype="float32", names=ROWS, **options):
    problem = Problem(rng, (2, 2, 35, 41, 24), dtype=dtype, is_causal=True, **options)
    for name in names:
        array = getattr(problem, name)
        changed = change(array)
        assert changed.shape == array.shape and changed.dtype == array.dtype
        setattr(problem, name, changed)
    problem.check()


def copied():
    return trainfast.stats().fallbacks.get("attention", {})


# ---- Addresses -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [1, 3, 4])
def test_arrays_off_alignment_are_taken_as_they_are(rng, path, dtype, elements):
    def change(array):
        room = np.empty(array.size + 16, array.dtype)
        skew = -room.ctypes.data // array.itemsize % (16 // array.itemsize)
        start = skew + elements
        view = room[start : start + array.size].reshape(array.shape)
        view[...] = array
        return view

    check(rng, change, dtype)
    assert copied() == {}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("gap", [1, 2, 5])
def test_rows_off_alignment_are_taken_as_they_are(rng, path, dtype, gap):
    def change(array):
        room = np.empty((*array.shape[:-1], array.shape[-1] + gap), array.dtype)
        room[..., gap:] = array
        return room[..., gap:]

    check(rng, change, dtype)
    assert copied() == {}


ENDING = """
import ctypes, itertools, mmap, sys
import numpy as np
import trainfast

protect = ctypes.CDLL(None, use_errno=True).mprotect
page = mmap.PAGESIZE

def at_the_end(shape, dtype):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = mmap.mmap(-1, (size // page + 2) * page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(room))
    end = (size // page + 1) * page
    assert protect(ctypes.c_void_p(begin + end), ctypes.c_size_t(page), 0) == 0
    array = np.frombuffer(room, dtype, int(np.prod(shape)), end - size)
    array[:] = np.linspace(-1, 1, array.size)
    return array.reshape(shape)

trainfast.use_backend(sys.argv[1])
dims = [(1, 1), (2, 2), (8, 8), (33, 17)]
sizes = [(1, 1), (2, 8), (3, 24), (20, 24), (4, 97)]
for dtype, (n_q, n_k), (d, e) in itertools.product("fde", sizes, dims):
    q, k = at_the_end((1, 2, n_q, d), dtype), at_the_end((1, 2, n_k, d), dtype)
    v, dout = at_the_end((1, 2, n_k, e), dtype), at_the_end((1, 2, n_q, e), dtype)
    out, lse = trainfast.numpy.attention(q, k, v, return_lse=True)
    trainfast.numpy.attention_backward(dout, q, k, v, out, lse)
print("done")
"""


@pytest.mark.parametrize("name", [x for x in USABLE if x not in ("cuda", "simt")])
def test_nothing_is_read_past_the_end_of_arrays(name):
    command = [sys.executable, "-c", ENDING, name]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


# ---- Strides -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("step", [0, 1, 7])
def test_inputs_may_overlap_themselves(rng, path, dtype, step):
    """Rows `step` elements apart, each of 24."""

    def change(array):
        strides = [array.itemsize * s for s in (0, 40, step, 1)]
        whole = rng.standard_normal(400).astype(array.dtype)
        return np.lib.stride_tricks.as_strided(whole, array.shape, strides)

    check(rng, change, dtype)
    assert copied() == {}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("axis", range(4))
def test_arrays_that_run_backwards_are_copied(rng, path, dtype, axis):
    check(rng, lambda x: np.flip(np.flip(x, axis).copy(), axis), dtype, ["k", "dout"])
    assert copied() == {"an array without stride 1 was copied": 3}


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_the_core_refuses_arrays_that_run_backwards(rng, path, name):
    arrays = {n: np.ones((1, 2, 5, 8), np.float32) for n in ("q", "k", "v", "out")}
    arrays[name] = arrays[name][:, :, ::-1]
    message = f"{name} must have no negative strides, got shape"
    with pytest.raises(NotImplementedError, match=message):
        _core.attention(*arrays.values(), None, scale=1.0)
    assert (arrays["out"] == 1).all()


# ---- Sizes ---------------------------------------------------------------------------

APART = 2**27  # elements between two rows, of which 16 have passed 2^31


def far_apart(shape, dtype):
    """An array whose rows lie far apart, in memory that is there once it is touched."""
    _, heads, rows, _ = shape
    size = shape[0] * heads * rows * APART * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        room = mmap.mmap(-1, size, flags=flags)
    except OSError as error:
        pytest.skip(f"{size >> 30} GiB of address space: {error}")
    strides = (heads * rows * APART, rows * APART, APART, 1)
    strides = [s * dtype.itemsize for s in strides]
    return np.ndarray(shape, dtype, room, strides=strides)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_arrays_of_more_than_2_to_the_31_elements_are_addressed(rng, path, dtype):
    near = Problem(rng, (1, 2, 18, 21, 24), dtype=dtype, is_causal=True)
    arrays = {name: getattr(near, name) for name in ROWS}
    gradients = [np.zeros_like(arrays[name]) for name in "qkv"]
    out, lse = np.zeros_like(near.dout), np.zeros(near.dlse.shape, near.wide)
    found = []
    for moved in (lambda x: x, lambda x: far_apart(x.shape, x.dtype)):
        given = {name: moved(array) for name, array in arrays.items()}
        for name, array in arrays.items():
            given[name][...] = array
        made = [moved(x) for x in (out, *gradients)]
        options = {"scale": 0.2, "is_causal": True, "scratch": scratch_on("cpu")}
        q, k, v, dout = given.values()
        _core.attention(q, k, v, made[0], lse, **options)
        _core.attention_backward(
            *(dout, q, k, v, made[0], lse, None, *made[1:], *[None] * 3), **options
        )
        found.append([x.copy() for x in (*made, lse)])
    for mine, theirs in zip(*found):
        np.testing.assert_allclose(
            mine.astype("d"),
            theirs.astype("d"),
            atol=2e-6 if dtype == "float32" else 0.01,
        )
    assert abs(found[1][0].astype("d")).max() > 0.1


def test_a_mask_of_more_than_2_to_the_31_elements_is_addressed(rng, path):
    problem = Problem(rng, (1, 2, 18, 21, 24), dtype="float16")
    mask = far_apart((1, 2, 18, 21), np.dtype(bool))
    mask[...] = rng.random(mask.shape) < 0.7
    problem.options["mask"] = mask
    bias = far_apart((1, 2, 18, 21), np.dtype(np.float16))
    bias[...] = rng.standard_normal(bias.shape)
    problem.options["bias"] = bias
    expected = problem.expected()
    problem.check_forward(expected=expected)


# ---- Grids ---------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_works_past_the_largest_grid_are_done_too(rng, simt, dtype, blocks):
    """All but tensor cores' kernels, which take no call with more blocks than a grid
    may have."""
    bias = rng.standard_normal((2, 1, 70, 90))
    slopes, sinks = rng.random((2, 2, 4))
    options = dict(bias=bias, alibi_slopes=slopes, sinks=sinks[0], is_causal=True)
    problem = Problem(rng, (2, 4, 70, 90, 16), dtype=dtype, kv_heads=2, **options)
    trainfast.use_backend("simt")
    found = []
    for order, most in enumerate((0, blocks, blocks, blocks)):
        simt.library.tfast_simt_seed(ctypes.c_uint64(order))
        simt.library.tfast_simt_most_blocks(most)
        made = (*problem.forward(), *problem.backward())
        found.append([x.tobytes() for x in made])
    simt.library.tfast_simt_most_blocks(0)
    simt.library.tfast_simt_seed(ctypes.c_uint64(0))
    trainfast.use_backend(None)
    assert found[1:] == found[:1] * 3
