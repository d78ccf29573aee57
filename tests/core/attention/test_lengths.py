"""Attention of packed items with a max_seqlen far above the longest item: the same
bits for the same work. The backend that counts is a stand-in."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.attention_calls import scratch_on
from tests.fake_device import run
from trainfast import _core

CSRC = Path(__file__).parents[3] / "csrc"
LOOSE = [41, 131_072, 2**31, 2**60, 2**63 - 1]
AT_Q, AT_K = np.array([0, 3, 3, 40, 44]), np.array([0, 40, 41, 50, 90])


def both_ways(rng, heads, most_q, most_k, **options):
    """The bits of out, lse and all gradients."""
    q, dout = (rng.standard_normal((44, heads, 16)).astype("f") for _ in range(2))
    k, v = (rng.standard_normal((90, 1, 16)).astype("f") for _ in range(2))
    out, dq, dk, dv = (np.empty_like(x) for x in (q, q, k, v))
    lse = np.empty((heads, 44), np.float32)
    options |= {"scale": 0.25, "scratch": scratch_on("cpu"), "cu_seqlens_q": AT_Q}
    options |= {"cu_seqlens_k": AT_K, "max_seqlen_q": most_q, "max_seqlen_k": most_k}
    _core.attention(q, k, v, out, lse, **options)
    gradients = (dq, dk, dv, None, None, None)
    _core.attention_backward(dout, q, k, v, out, lse, None, *gradients, **options)
    return [x.tobytes() for x in (out, lse, dq, dk, dv)]


@pytest.mark.parametrize("most", LOOSE)
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "window_left": 2**61}])
def test_any_bound_above_the_items_gives_the_same_bits(backend, most, options):
    tight = both_ways(np.random.default_rng(0), 2, 37, 40, **options)
    assert both_ways(np.random.default_rng(0), 2, most, most, **options) == tight


def test_gradient_of_a_bias_is_written_up_to_the_bound(backend, rng):
    """Places that no item reaches are 0."""
    q, dout, out = (rng.standard_normal((44, 2, 16)).astype("f") for _ in range(3))
    k, v = (rng.standard_normal((90, 1, 16)).astype("f") for _ in range(2))
    bias = rng.standard_normal((1, 2, 60, 95)).astype("f")
    lse, dbias = np.empty((2, 44), np.float32), np.full_like(bias, 7)
    options = {"scale": 0.25, "scratch": scratch_on("cpu"), "bias": bias}
    options |= {"cu_seqlens_q": AT_Q, "cu_seqlens_k": AT_K}
    options |= {"max_seqlen_q": 60, "max_seqlen_k": 95}
    _core.attention(q, k, v, out, lse, **options)
    gradients = (None, None, None, dbias, None, None)
    _core.attention_backward(dout, q, k, v, out, lse, None, *gradients, **options)
    assert not dbias[:, :, 37:].any() and not dbias[:, :, :, 40:].any()
    assert dbias[:, :, :37, :40].any() and np.isfinite(dbias).all()


def test_more_rows_than_can_be_counted_are_refused():
    q = np.ones((3, 16, 1), np.float32)
    k = np.broadcast_to(np.float32(1), (2**60, 1, 1))
    ends = {"cu_seqlens_q": np.array([0, 1, 3])}
    ends |= {"cu_seqlens_k": np.array([0, 2**59, 2**60])}
    with pytest.raises(ValueError, match=r"batch \* heads \* rows must be at most"):
        _core.attention(q, k, k, np.empty_like(q), None, scale=1.0, **ends)


# ---- What a backend gets -------------------------------------------------------------

# Forward and backward write the bounds that they were given.
STAND_IN = r"""
#include "tfast.h"

static const char *
unusable(void)
{
    return NULL;
}

static tfast_status
forward(const tfast_attention_args *args)
{
    ((float *)args->out.data)[0] = (float)args->n_q;
    ((float *)args->out.data)[1] = (float)args->n_k;
    return TFAST_OK;
}

static tfast_status
backward(const tfast_attention_args *args)
{
    ((float *)args->dq.data)[0] = (float)args->n_q;
    ((float *)args->dq.data)[1] = (float)args->n_k;
    return TFAST_OK;
}

static const tfast_backend backend = {
    .abi = TFAST_ABI,
    .name = NAME,
    .device = DEVICE,
    .unusable = unusable,
    .attention = forward,
    .attention_backward = backward,
};

const tfast_backend *
tfast_library_open(uint32_t abi, tfast_fail_function fail)
{
    (void)fail;
    return abi == TFAST_ABI ? &backend : NULL;
}
"""
COUNTED = """
import trainfast
from trainfast import _core

def array(x):
    return OnDevice(x) if ON_DEVICE else x

def bounds(most_q, most_k):
    q, kv = (np.zeros((n, 2, 8), np.float32) for n in (44, 90))
    given = [array(x) for x in (q, kv, kv)]
    out, dq, lse = (np.zeros_like(q), np.zeros_like(q), np.zeros((2, 44), np.float32))
    ends = {"cu_seqlens_q": array(np.array([0, 3, 3, 40, 44])),
            "cu_seqlens_k": array(np.array([0, 40, 41, 50, 90]))}
    most = {"max_seqlen_q": most_q, "max_seqlen_k": most_k, "scale": 1.0}
    _core.attention(*given, array(out), None, **ends, **most)
    _core.attention_backward(
        array(out), *given, array(out), array(lse), None, array(dq),
        *[None] * 5, **ends, **most)
    assert (out.flat[:2] == dq.flat[:2]).all()
    return tuple(int(n) for n in out.flat[:2])
"""


@pytest.mark.parametrize("device", ["TFAST_CPU", "TFAST_CUDA"])
def test_bounds_of_the_work_are_the_items_or_all_rows(tmp_path, device):
    """The longest items on the CPU; on a GPU, where nobody looks, all rows together."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("a C compiler must be on PATH")
    source, library = tmp_path / "stand_in.c", tmp_path / "stand_in.so"
    source.write_text(STAND_IN)
    name = "simt" if device == "TFAST_CPU" else "cuda"
    command = [compiler, "-std=c11", "-shared", "-fPIC", f"-I{CSRC}"]
    command += [f"-DDEVICE={device}", f'-DNAME="{name}"', "-o", library, source]
    subprocess.run(command, check=True)
    where, all_rows = (False, (37, 40)) if name == "simt" else (True, (44, 90))
    named = {"TRAINFAST_SIMT_LIBRARY": str(library), "TRAINFAST_BACKEND": name}
    done = run(
        f"ON_DEVICE = {where}\n{COUNTED}\n"
        f"assert bounds(37, 40) == (37, 40), bounds(37, 40)\n"
        f"for most in {[n for n in LOOSE if n > 90]}:\n"
        f"    assert bounds(most, most) == {all_rows}, bounds(most, most)\n",
        library=library,
        **(named if name == "simt" else {}),
    )
    assert done.code == 0, done.err


@pytest.mark.skipif(
    not os.environ.get("TRAINFAST_SIMT_LIBRARY"), reason="no SIMT library"
)
def test_any_bound_gives_the_same_bits_where_lengths_lie_on_a_gpu():
    done = run(f"""
import trainfast
from trainfast import _core

rng = np.random.default_rng(0)
q, dout = (rng.standard_normal((44, 2, 16)).astype("f") for _ in range(2))
k, v = (rng.standard_normal((90, 1, 16)).astype("f") for _ in range(2))
ends = {{"cu_seqlens_q": OnDevice(np.array([0, 3, 3, 40, 44])),
        "cu_seqlens_k": OnDevice(np.array([0, 40, 41, 50, 90]))}}
scratch = lambda n: OnDevice(np.empty(n, np.float32))

def both_ways(most):
    made = [np.empty_like(x) for x in (q, q, k, v)]
    out, dq, dk, dv = (OnDevice(x) for x in made)
    lse = OnDevice(np.empty((2, 44), np.float32))
    given = [OnDevice(x) for x in (q, k, v)]
    options = dict(ends, scale=0.25, max_seqlen_q=most, max_seqlen_k=most,
                   scratch=scratch)
    _core.attention(*given, out, lse, **options)
    _core.attention_backward(OnDevice(dout), *given, out, lse, None, dq, dk, dv,
                             None, None, None, **options)
    return [x.tobytes() for x in made]

tight = both_ways(40)
for most in {LOOSE}:
    assert both_ways(most) == tight, most
""")
    assert done.code == 0, done.err
