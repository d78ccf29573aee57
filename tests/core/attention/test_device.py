"""Attention of arrays on a GPU, on a fake one (fake_device.py): the core's and the
adapters' side of it, which the CPU's calls do not reach."""

import os

import numpy as np
import pytest

from tests.fake_device import run
from trainfast import sequence_lengths

pytestmark = pytest.mark.skipif(
    not os.environ.get("TRAINFAST_SIMT_LIBRARY"), reason="no SIMT library"
)

CALLS = """
import trainfast

rng = np.random.default_rng(0)
def normal(*shape):
    return rng.standard_normal(shape).astype("f")

q, k, v = (normal(1, 2, n, 8) for n in (5, 7, 7))
packed = [normal(n, 2, 8) for n in (5, 7, 7)]

def call(q, k, v, **options):
    options = {n: OnDevice(x) if isinstance(x, np.ndarray) else x
               for n, x in options.items()}
    given = [OnDevice(x) for x in (q, k, v)]
    out = OnDevice(np.full_like(q, 7))
    made = trainfast.numpy.attention(*given, out=out, return_lse=True, **options)
    ones = OnDevice(np.ones_like(q))
    grads = trainfast.numpy.attention_backward(ones, *given, *made, **options)
    return [x.array for x in (*made, *grads[:3])]

def same(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
"""


def good(code, **environment):
    done = run(CALLS + code, **environment)
    assert done.code == 0, done.err
    return done.out.split()


def refused(code, message, **environment):
    done = run(CALLS + code, **environment)
    assert done.code == 1 and message in done.err.splitlines()[-1], done.err


# ---- Lengths -------------------------------------------------------------------------

ENDS = """
at_q, at_k = np.array([0, 2, 2**40]), np.array([0, 4, 2**50])
mine = call(*packed, cu_seqlens_q=at_q, cu_seqlens_k=at_k)
"""


def test_lengths_on_the_device_are_clamped_and_counted_as_cudas():
    out = good(
        ENDS
        + """
at_q[-1], at_k[-1] = 5, 7
same(mine, call(*packed, cu_seqlens_q=at_q, cu_seqlens_k=at_k))
same(call(q, k, v, kv_lens=np.array([2**40])), call(q, k, v))
print(*trainfast.stats().calls["attention"].items())
"""
    )
    assert out == ["('cuda',", "8)"]


@pytest.mark.parametrize(
    "environment",
    [
        {"TRAINFAST_CHECK_LENGTHS": ""},
        {"TRAINFAST_CHECK_LENGTHS": "0"},
        {"TRAINFAST_DEBUG": "1"},  # setup.py's, of a build for debugging
    ],
    ids=str,
)
def test_lengths_on_the_device_are_not_looked_at_unless_asked(environment):
    good(ENDS, **environment)


CHECKED = [
    (ENDS, "ValueError: cu_seqlens_q must end within the 5 rows, got 1099511627776"),
    (
        "call(*packed, cu_seqlens_q=np.array([0, 5]), cu_seqlens_k=np.array([1, 7]))",
        "ValueError: cu_seqlens_k must start at 0, got 1",
    ),
    ("call(q, k, v, kv_lens=np.array([8]))", "ValueError: kv_lens[0] must be 0 to 7"),
    (
        "call(*(x.swapaxes(1, 2).copy() for x in (q, k, v)), layout='bshd',"
        "kv_lens=np.array([-1]))",
        "ValueError: kv_lens[0] must be 0 to 7, its item's keys, got -1",
    ),
]


@pytest.mark.parametrize("code, message", CHECKED)
def test_lengths_on_the_device_are_checked_when_asked(code, message):
    refused(code, message, TRAINFAST_CHECK_LENGTHS="1")


def test_right_lengths_pass_the_check():
    good(
        """
call(*packed, cu_seqlens_q=np.array([0, 2, 5]), cu_seqlens_k=np.array([0, 4, 7]))
call(q, k, v, kv_lens=np.array([3]))
call(q, k, v)
""",
        TRAINFAST_CHECK_LENGTHS="1",
    )


def test_the_check_is_the_cores():
    ends = np.array([0, 3, 2])
    with pytest.raises(ValueError, match="cu_seqlens_q must not decrease, got 2 after"):
        sequence_lengths.check_lengths(
            (3, 2, 8), (3, 2, 8), cu_seqlens_q=ends, cu_seqlens_k=ends, kv_lens=None
        )
    ends = np.array([0, 1, 3])
    with pytest.raises(ValueError, match="max_seqlen_k must be at least the longest"):
        sequence_lengths.check_lengths(
            *((3, 2, 8), (3, 2, 8)),
            cu_seqlens_q=ends,
            cu_seqlens_k=ends,
            kv_lens=None,
            max_seqlen_q=2,
            max_seqlen_k=1,
        )


# ---- Where arrays are ----------------------------------------------------------------


def test_arrays_on_different_gpus_are_refused():
    for name in ("k", "v", "out", "mask"):
        refused(
            f"""
given = dict(q=q, k=k, v=v, out=q.copy(), mask=np.ones((5, 7), bool))
given = {{n: OnDevice(x, index=n == {name!r}) for n, x in given.items()}}
trainfast.numpy.attention(**given)
""",
            f"ValueError: {name} must be on cuda:0 as q, got cuda:1",
        )


def test_arrays_on_the_cpu_beside_a_gpu_are_refused():
    refused(
        "trainfast.numpy.attention(OnDevice(q), OnDevice(k), v, out=OnDevice(q))",
        "ValueError: v must be on cuda:0 as q, got cpu",
    )
    refused(
        "trainfast.numpy.attention(q, k, v, kv_lens=OnDevice(np.array([3])))",
        "ValueError: kv_lens must be on cpu as q, got cuda:0",
    )


def test_a_gpu_that_the_driver_does_not_know_is_its_error():
    refused(
        """
given = [OnDevice(x, 7) for x in (q, k, v, q.copy())]
trainfast.numpy.attention(*given[:3], out=given[3])
""",
        "RuntimeError: cuDeviceGet: invalid device ordinal",
    )


def test_a_forced_cpu_backend_refuses_arrays_on_a_gpu():
    refused(
        "call(q, k, v)",
        "NotImplementedError: arrays on a CUDA device, but backend scalar is forced",
        TRAINFAST_BACKEND="scalar",
    )


# ---- What the driver refuses ---------------------------------------------------------

FAILING = """
simt = ctypes.CDLL(os.environ["TRAINFAST_CUDA_LIBRARY"])
out = call(q, k, v)
def fail():
    simt.tfast_simt_fail_launches({error})
    call(q.astype("{dtype}"), k.astype("{dtype}"), v.astype("{dtype}"))
"""


def test_a_gpu_that_is_too_old_is_named():
    message = "NotImplementedError: the GPU must be sm_75 or newer, got sm_61"
    refused("call(q, k, v)", message, TRAINFAST_SIMT_DEVICE="61")


def test_a_launch_that_fails_says_why():
    """As into a stream of another device, or one that has been destroyed."""
    code = FAILING.format(error=400, dtype="f") + "fail()"
    refused(
        code, "RuntimeError: launch of plain_forward_float: invalid resource handle"
    )


def test_a_launch_of_tensor_cores_that_fails_says_why():
    code = FAILING.format(error=400, dtype="e") + "fail()"
    refused(code, "RuntimeError: launch of forward_80_mma_f16_32_0: invalid")


def test_a_launch_that_failed_leaves_the_next_call_alone():
    good(
        FAILING.format(error=400, dtype="f")
        + """
try:
    fail()
except RuntimeError:
    simt.tfast_simt_fail_launches(0)
same(out, call(q, k, v))
"""
    )
