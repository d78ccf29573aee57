"""Bad input to attention: each gets its own error, by type and message, and nothing is
written."""

import re

import numpy as np
import pytest

import trainfast
from tests.attention_calls import Problem
from trainfast import _core

pytestmark = pytest.mark.usefixtures("host_only")


@pytest.fixture
def host_only(device):
    if device == "cuda":
        pytest.skip("NumPy arrays")


def f32(*shape):
    return np.ones(shape, np.float32)


def inputs(**changes):
    """q, k, v and options that are right, but for the changes."""
    return {"q": f32(2, 4, 7, 8), "k": f32(2, 2, 9, 8), "v": f32(2, 2, 9, 5)} | changes


def refused(error, message, **changes):
    """Both directions refuse with this type and message, and write nothing."""
    given = inputs(**changes)
    q, k, v = (given.pop(name) for name in "qkv")
    out = np.full((2, 4, 7, 5), 7, np.float32)
    lse = np.full((2, 4, 7), 7, np.float32)
    with pytest.raises(error, match=re.escape(message)):
        trainfast.numpy.attention(q, k, v, out=out, **given)
    assert (out == 7).all()
    with pytest.raises(error, match=re.escape(message)):
        trainfast.numpy.attention_backward(out, q, k, v, out, lse, **given)
    assert (out == 7).all()


# ---- Shapes --------------------------------------------------------------------------

SHAPES = [
    ({"q": f32(4, 7, 8)}, "q must have dimensions [batch, heads, rows, dim], got"),
    ({"k": f32(9, 8)}, "k must have dimensions [batch, heads, rows, dim], got"),
    ({"v": f32(1, 2, 2, 9, 5)}, "v must have dimensions [batch, heads, rows, dim]"),
    ({"k": f32(3, 2, 9, 8)}, "k must have q's batch of 2 in dimension 0, got"),
    ({"v": f32(1, 2, 9, 8)}, "v must have q's batch of 2 in dimension 0, got"),
    (
        {"k": f32(2, 3, 9, 8), "v": f32(2, 3, 9, 5)},
        "k must have heads that divide q's 4, got shape (2, 3, 9, 8)",
    ),
    (
        {"k": f32(2, 0, 9, 8), "v": f32(2, 0, 9, 5)},
        "k must have heads that divide q's 4, got shape (2, 0, 9, 8)",
    ),
    ({"k": f32(2, 2, 9, 7)}, "k must have q's dim of 8 in dimension 3, got"),
    ({"v": f32(2, 1, 9, 5)}, "v must have k's heads of 2 in dimension 1, got"),
    ({"v": f32(2, 2, 8, 5)}, "v must have k's rows of 9 in dimension 2, got"),
    ({"q": f32(2, 4, 7, 0), "k": f32(2, 2, 9, 0)}, "q's dim must be 1 to 256, got 0"),
    (
        {"q": f32(2, 4, 7, 257), "k": f32(2, 2, 9, 257)},
        "q's dim must be 1 to 256, got 257",
    ),
]


@pytest.mark.parametrize("changes, message", SHAPES)
def test_shapes_that_do_not_fit_are_refused(changes, message):
    refused(ValueError, message, **changes)


def test_heads_of_keys_without_one_of_queries_are_refused():
    q, k = f32(2, 0, 7, 8), f32(2, 3, 9, 8)
    message = "q must have heads where k has 3, got 0"
    with pytest.raises(ValueError, match=message):
        trainfast.numpy.attention(q, k, k)
    with pytest.raises(ValueError, match=message):
        trainfast.numpy.attention_backward(q, q, k, k, q, f32(2, 0, 7))


@pytest.mark.parametrize("dim_v", [0, 257])
def test_value_dims_out_of_range_are_refused(dim_v):
    given = inputs(v=f32(2, 2, 9, dim_v))
    with pytest.raises(ValueError, match=f"v's dim must be 1 to 256, got {dim_v}"):
        trainfast.numpy.attention(**given)


def test_a_layout_decides_what_the_dimensions_mean():
    refused(ValueError, "k must have heads that divide", layout="bshd")
    refused(
        ValueError, "layout must be 'bhsd', 'bshd' or 'thd', got 'nhd'", layout="nhd"
    )
    refused(ValueError, "layout 'thd' needs cu_seqlens_q", layout="thd")


# ---- Terms ---------------------------------------------------------------------------

TERMS = [
    ((7, 8), "1 or 9 (keys) in dimension -1, got shape (7, 8)"),
    ((6, 9), "1 or 7 (queries) in dimension -2, got shape (6, 9)"),
    ((2, 7, 9), "1 or 4 (heads) in dimension -3, got shape (2, 7, 9)"),
    ((3, 1, 7, 9), "1 or 2 (batch) in dimension -4, got shape (3, 1, 7, 9)"),
    ((0,), "1 or 9 (keys) in dimension -1, got shape (0,)"),
]


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize("shape, message", TERMS)
def test_terms_that_do_not_broadcast_name_the_dimension(name, shape, message):
    message = f"{name} must broadcast to the scores: {message}"
    refused(ValueError, message, **{name: f32(*shape)})


def test_terms_of_more_than_four_dimensions_are_refused():
    refused(ValueError, "bias must have at most 4 dimensions", bias=f32(1, 1, 1, 1, 9))


@pytest.mark.parametrize("dtype", ["uint8", "int64", "complex64", "int32"])
def test_masks_of_other_dtypes_are_refused(dtype):
    message = "mask must be bool, float64, float32, float16 or bfloat16, got "
    refused(NotImplementedError, message + dtype, mask=np.ones((7, 9), dtype))


def test_a_bias_must_be_of_floats():
    message = "bias must be float64, float32, float16 or bfloat16, got bool"
    refused(NotImplementedError, message, bias=np.ones((7, 9), bool))


# ---- Numbers -------------------------------------------------------------------------

NUMBERS = [
    (
        {"causal_align": "left"},
        "causal_align must be 'upper_left' or 'lower_right', got",
    ),
    (
        {"window_size": (-1, 3)},
        "window_size must be None or >= 0 on a side, got (-1, 3)",
    ),
    (
        {"window_size": (1, -3)},
        "window_size must be None or >= 0 on a side, got (1, -3)",
    ),
    (
        {"window_size": (1, 2, 3)},
        "window_size must be (left, right) or None, got (1, 2, 3)",
    ),
    ({"window_size": 3}, "window_size must be (left, right) or None, got 3"),
    ({"scale": np.nan}, "scale must be finite, got nan"),
    ({"scale": np.inf}, "scale must be finite, got inf"),
    ({"softcap": -1.0}, "softcap must be finite and >= 0, got -1"),
    ({"softcap": np.inf}, "softcap must be finite and >= 0, got inf"),
    ({"softcap": np.nan}, "softcap must be finite and >= 0, got nan"),
    ({"dropout_p": 1.0, "seed": 1}, "dropout_p must be in [0, 1), got 1"),
    ({"dropout_p": -0.1, "seed": 1}, "dropout_p must be in [0, 1), got -0.1"),
    ({"dropout_p": np.nan, "seed": 1}, "dropout_p must be in [0, 1), got nan"),
    ({"dropout_p": 1 - 1e-6, "seed": 1}, "dropout_p must be at most 65535 / 65536"),
    ({"dropout_p": 0.1}, "seed must be given with dropout_p > 0, got None"),
    ({"dropout_p": 0.1, "seed": 2**63}, "seed must fit into 64 bits with sign, got 92"),
    ({"seed": np.zeros(2, np.int64)}, "seed must hold one int64, got 2 elements"),
    ({"alibi_slopes": f32(3)}, "alibi_slopes must have q's 4 heads, or [batch, heads]"),
    ({"alibi_slopes": f32(3, 4)}, "alibi_slopes must have q's 4 heads, or [batch"),
    ({"alibi_slopes": f32(4, 2)}, "alibi_slopes must have q's 4 heads, or [batch"),
    ({"sinks": f32(2)}, "sinks must have q's 4 heads, got shape (2,)"),
    ({"sinks": f32(1, 4)}, "sinks must have q's 4 heads, got shape (1, 4)"),
]


@pytest.mark.parametrize("changes, message", NUMBERS)
def test_numbers_out_of_range_are_refused(changes, message):
    refused(ValueError, message, **changes)


@pytest.mark.parametrize("window", [(1.5, 2), ("a", None)])
def test_windows_must_be_integers(window):
    refused(
        TypeError,
        "window_size must be None or an integer on a side",
        window_size=window,
    )


def test_a_seed_must_be_an_integer():
    message = "seed must be int64, got float64"
    refused(NotImplementedError, message, seed=np.zeros(1), dropout_p=0.5)
    refused(TypeError, "seed must be an array", seed=0.5, dropout_p=0.5)


# ---- Lengths -------------------------------------------------------------------------


def packed(at_q, at_k, **changes):
    given = {"q": f32(10, 4, 8), "k": f32(12, 2, 8), "v": f32(12, 2, 5)}
    return given | {"cu_seqlens_q": at_q, "cu_seqlens_k": at_k} | changes


GOOD_Q, GOOD_K = [0, 4, 10], [0, 5, 12]
PACKED = [
    (packed([1, 4, 10], GOOD_K), "cu_seqlens_q must start at 0, got 1"),
    (packed(GOOD_Q, [-1, 5, 12]), "cu_seqlens_k must start at 0, got -1"),
    (packed([0, 6, 4], GOOD_K), "cu_seqlens_q must not decrease, got 4 after 6"),
    (packed([0, -4, 10], GOOD_K), "cu_seqlens_q must not decrease, got -4 after 0"),
    (packed(GOOD_Q, [0, 5, 13]), "cu_seqlens_k must end within the 12 rows, got 13"),
    (packed([0, 2**62, -(2**62)], GOOD_K), "cu_seqlens_q must not decrease"),
    (packed(GOOD_Q, [0, 12]), "cu_seqlens_k must have shape (3,), got shape (2,)"),
    (packed(GOOD_Q, None), "cu_seqlens_q and cu_seqlens_k must be given together"),
    (packed([], []), "cu_seqlens_q must have one dimension of batch + 1 lengths"),
    (packed([GOOD_Q], [GOOD_K]), "cu_seqlens_q must have one dimension of batch + 1"),
    (
        packed(np.array(GOOD_Q, "f"), GOOD_K),
        "cu_seqlens_q must be int32 or int64, got float32",
    ),
    (
        packed(GOOD_Q, np.array(GOOD_K, np.int16)),
        "cu_seqlens_k must be int32 or int64, got int16",
    ),
    (
        packed(GOOD_Q, GOOD_K, q=f32(1, 10, 4, 8)),
        "q must have dimensions [rows, heads, dim] with cu_seqlens",
    ),
    (
        packed(GOOD_Q, GOOD_K, kv_lens=[5, 8]),
        "kv_lens[1] must be 0 to 7, its item's keys, got 8",
    ),
]


@pytest.mark.parametrize("given, message", PACKED)
def test_lengths_of_packed_items_are_checked(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        trainfast.numpy.attention(**given)


def test_the_longest_item_must_not_be_longer_than_said():
    q, k, v = f32(10, 4, 8), f32(12, 2, 8), f32(12, 2, 5)
    at_q, at_k = np.array(GOOD_Q), np.array(GOOD_K)
    with pytest.raises(ValueError, match="max_seqlen_k must be at least the longest"):
        _core.attention(
            *(q, k, v, f32(10, 4, 5), None),
            scale=1.0,
            cu_seqlens_q=at_q,
            cu_seqlens_k=at_k,
            max_seqlen_k=6,
        )


LENGTHS = [
    ([9, 10], "kv_lens[1] must be 0 to 9, its item's keys, got 10"),
    ([-1, 3], "kv_lens[0] must be 0 to 9, its item's keys, got -1"),
    ([3], "kv_lens must have shape (2,), got shape (1,)"),
    ([[3], [4]], "kv_lens must have shape (2,), got shape (2, 1)"),
    ([3.0, 4.0], "kv_lens must be int32 or int64, got float64"),
]


@pytest.mark.parametrize("kv_lens, message", LENGTHS)
def test_lengths_of_keys_are_checked(kv_lens, message):
    refused(ValueError, message, kv_lens=kv_lens)


# ---- Arrays --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_dtypes_must_be_the_same(name):
    right = inputs()
    wrong = right[name].astype(np.float16)
    other = "float32, got float16" if name != "q" else "float16, got float32"
    with pytest.raises(ValueError, match=f"must be {other}"):
        trainfast.numpy.attention(**(right | {name: wrong}))


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool"])
def test_other_dtypes_are_not_implemented(dtype):
    with pytest.raises(NotImplementedError, match=f"q must be float64.*got {dtype}"):
        trainfast.numpy.attention(**inputs(q=np.ones((2, 4, 7, 8), dtype)))


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "sinks", "cu_seqlens_q"])
def test_what_is_no_array_is_refused(name):
    with pytest.raises(TypeError, match=f"{name} must be an array"):
        trainfast.numpy.attention(**inputs(**{name: object()}))


def test_masked_arrays_are_refused():
    with pytest.raises(TypeError, match="q must not be a masked array"):
        trainfast.numpy.attention(**inputs(q=np.ma.ones((2, 4, 7, 8), "f")))


def test_a_library_without_new_arrays_of_a_dtype_that_numpy_has_not_needs_out():
    class Bare:
        def __init__(self, array):
            self.array, self.shape, self.dtype = array, array.shape, object()

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

    given = inputs()
    with pytest.raises(TypeError, match="out must be given for arrays of Bare"):
        trainfast.numpy.attention(**(given | {"q": Bare(given["q"])}))


OUTS = [
    (f32(2, 4, 7, 6), "out must have shape (2, 4, 7, 5), got shape (2, 4, 7, 6)"),
    (f32(4, 7, 5), "out must have shape (2, 4, 7, 5), got shape (4, 7, 5)"),
    (f32(2, 4, 7, 5).astype(np.float64), "out must be float32, got float64"),
    (np.broadcast_to(f32(5), (2, 4, 7, 5)), "out must be writable"),
    (
        np.lib.stride_tricks.as_strided(f32(99), (2, 4, 7, 5), (0, 80, 12, 4)),
        "out must not overlap itself",
    ),
]


@pytest.mark.parametrize("out, message", OUTS)
def test_outputs_that_do_not_fit_are_refused(out, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        trainfast.numpy.attention(**inputs(), out=out)


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "bias"])
def test_out_must_not_overlap_inputs(rng, name):
    pool = rng.standard_normal(1000).astype("f")
    given = {n: f32(1, 2, 5, 8) for n in "qkv"} | {name: pool[79:159]}
    shape = (1, 2, 5, 8) if name in "qkv" else (1, 2, 5, 5)
    given[name] = pool[79 : 79 + np.prod(shape)].reshape(shape)
    out = pool[:80].reshape(1, 2, 5, 8)
    with pytest.raises(ValueError, match=f"out must not overlap {name}"):
        trainfast.numpy.attention(**given, out=out)
    pool_before = pool.copy()
    given[name] = pool[80 : 80 + np.prod(shape)].reshape(shape)
    trainfast.numpy.attention(**given, out=out)
    np.testing.assert_array_equal(pool[80:], pool_before[80:])


def test_out_without_unit_stride_is_refused():
    out = np.zeros((2, 4, 5, 7), "f").swapaxes(2, 3)
    with pytest.raises(NotImplementedError, match="out must have stride 1"):
        trainfast.numpy.attention(**inputs(), out=out)


# ---- Backward ------------------------------------------------------------------------


def backward(*, out=None, dout=None, lse=None, **options):
    given = inputs()
    shape = (2, 4, 7, 5)
    return trainfast.numpy.attention_backward(
        f32(*shape) if dout is None else dout,
        *(given["q"], given["k"], given["v"]),
        f32(*shape) if out is None else out,
        f32(2, 4, 7) if lse is None else lse,
        **options,
    )


BACKWARD = [
    ({"out": f32(2, 4, 7, 4)}, "out must have shape (2, 4, 7, 5), got shape"),
    ({"dout": f32(2, 4, 6, 5)}, "dout must have shape (2, 4, 7, 5), got shape"),
    ({"dout": f32(2, 4, 7, 5).astype("e")}, "dout must be float32, got float16"),
    ({"lse": f32(2, 4, 9)}, "lse must have shape (2, 4, 7), got shape (2, 4, 9)"),
    ({"lse": f32(8, 7)}, "lse must have shape (2, 4, 7), got shape (8, 7)"),
    ({"lse": f32(2, 4, 7).astype("d")}, "lse must be float32, got float64"),
    ({"dlse": f32(2, 4, 1)}, "dlse must have shape (2, 4, 7), got shape (2, 4, 1)"),
    ({"dlse": f32(2, 4, 7).astype("e")}, "dlse must be float32, got float16"),
    ({"wanted": ["w"]}, "wanted must be of ('q', 'k', 'v', 'bias', 'alibi_slopes'"),
    ({"wanted": ["bias"]}, "bias must be given where its gradient is wanted"),
    ({"wanted": ["sinks"]}, "sinks must be given where its gradient is wanted"),
]


@pytest.mark.parametrize("changes, message", BACKWARD)
def test_what_backward_gets_is_checked(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        backward(**changes)


@pytest.mark.parametrize("name", ["out", "lse", "dout"])
def test_backward_needs_what_forward_left(name):
    given = {"dout": f32(2, 4, 7, 5), "out": f32(2, 4, 7, 5), "lse": f32(2, 4, 7)}
    given[name] = None
    gradients = [None] * 6
    q, k, v = inputs().values()
    with pytest.raises(TypeError, match="dout, out and lse must be arrays, got None"):
        _core.attention_backward(
            *(given["dout"], q, k, v, given["out"], given["lse"], None),
            *gradients,
            scale=1.0,
        )


def core_backward(problem, **gradients):
    names = ("dq", "dk", "dv", "dbias", "dalibi", "dsinks")
    shape = problem.dout.shape
    _core.attention_backward(
        *(problem.dout, problem.q, problem.k, problem.v),
        *(np.zeros(shape, "f"), np.zeros(shape[:-1], "f"), None),
        *(gradients.get(name) for name in names),
        **problem.options,
    )


GRADIENTS = [
    ({"dbias": f32(33, 49)}, "dbias must have shape (1, 49), got shape (33, 49)"),
    ({"dbias": f32(1, 49).astype("e")}, "dbias must be float32, got float16"),
    ({"dsinks": f32(4, 1)}, "dsinks must have shape (4,), got shape (4, 1)"),
    ({"dalibi": f32(4)}, "dalibi must be None without alibi_slopes"),
    ({"dq": f32(2, 4, 33, 15)}, "dq must have shape (2, 4, 33, 16), got shape"),
    ({"dk": f32(2, 4, 33, 16)}, "dk must have shape (2, 4, 49, 16), got shape"),
    ({"dsinks": f32(8)[::2]}, "dalibi and dsinks must be dense, in C order"),
]


@pytest.mark.parametrize("gradients, message", GRADIENTS)
def test_arrays_for_gradients_are_checked(rng, gradients, message):
    problem = Problem(rng, bias=f32(1, 49), sinks=f32(4))
    with pytest.raises(ValueError, match=re.escape(message)):
        core_backward(problem, **gradients)


def test_gradients_must_not_overlap(rng):
    problem = Problem(rng, bias=f32(1, 49), sinks=f32(4))
    for name in ("q", "k", "v"):
        with pytest.raises(ValueError, match=f"d{name} must not overlap {name}"):
            core_backward(problem, **{f"d{name}": getattr(problem, name)})
    both = np.zeros_like(problem.k)
    with pytest.raises(ValueError, match="dv must not overlap dk"):
        core_backward(problem, dk=both, dv=both)
    with pytest.raises(ValueError, match="dsinks must not overlap sinks"):
        core_backward(problem, dsinks=problem.options["sinks"])


# ---- The core's own ------------------------------------------------------------------


def test_the_core_needs_a_scale():
    given = inputs()
    with pytest.raises(ValueError, match="scale must be finite, got nan"):
        _core.attention(*given.values(), f32(2, 4, 7, 5), None)
    with pytest.raises(TypeError, match=r"unexpected keyword|invalid keyword"):
        _core.attention(*given.values(), f32(2, 4, 7, 5), None, scale=1.0, masks=None)
    with pytest.raises(TypeError, match="exactly 5 arguments"):
        _core.attention(*given.values(), scale=1.0)


@pytest.mark.parametrize(
    "name, what",
    [
        ("scale", "a number"),
        ("softcap", "a number"),
        ("dropout_p", "a number"),
        ("window_left", "an integer"),
        ("window_right", "an integer"),
        ("max_seqlen_q", "an integer"),
        ("max_seqlen_k", "an integer"),
    ],
)
def test_the_core_names_what_is_no_number(name, what):
    arrays = (*inputs().values(), f32(2, 4, 7, 5), None)
    for bad in ("1", None, [1]):
        message = f"{name} must be {what}, got {bad!r}"
        with pytest.raises(TypeError, match=re.escape(message)):
            _core.attention(*arrays, **{"scale": 1.0, name: bad})
    with pytest.raises(ValueError, match=f"{name} must fit into .*, got 1000"):
        _core.attention(*arrays, **{"scale": 1.0, name: 10**400})
