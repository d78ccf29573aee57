"""Attention at the ends of what it takes: numbers, arrays of other libraries, and what
else a caller may get wrong."""

import re
from importlib.util import find_spec

import numpy as np
import pytest

import trainfast
from tests.attention_calls import Problem, to_float64

needs_torch = pytest.mark.skipif(not find_spec("torch"), reason="needs torch")


@pytest.fixture
def host_only(device):
    if device == "cuda":
        pytest.skip("NumPy arrays")


def ones(*shape):
    return np.ones(shape, np.float32)


def refused(error, message, **options):
    """Both directions refuse."""
    q, lse = ones(1, 2, 5, 8), ones(1, 2, 5)
    with pytest.raises(error, match=re.escape(message)):
        trainfast.numpy.attention(q, q, q, **options)
    with pytest.raises(error, match=re.escape(message)):
        trainfast.numpy.attention_backward(q, q, q, q, q, lse, **options)


# ---- Numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("scale", [0.0, 1e-42, -1e-25, 1e-19])
def test_sinks_have_their_gradient_at_any_scale(rng, device, dtype, scale):
    wide = np.float64 if dtype == "float64" else np.float32
    for shape in ((2, 4, 33, 49, 16), (1, 4, 2, 300, 16)):
        sinks = rng.standard_normal(4).astype(wide)
        problem = Problem(
            rng, shape, dtype=dtype, device=device, scale=scale, sinks=sinks
        )
        problem.check()
        assert to_float64(problem.backward().dsinks).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_softcaps_agree_with_the_reference_at_both_ends(rng, device, dtype):
    for softcap in (1e-37, 1e-20, 1e20, 1e37):
        Problem(rng, dtype=dtype, device=device, softcap=softcap).check()


RANGES = [
    ({"scale": 1.1e37}, "scale must be -1e+37 to 1e+37, got 1.1e+37"),
    ({"scale": -1e300}, "scale must be -1e+37 to 1e+37, got -1e+300"),
    ({"softcap": 1e38}, "softcap must be 0, or 1e-37 to 1e+37, got 1e+38"),
    ({"softcap": 1e-38}, "softcap must be 0, or 1e-37 to 1e+37, got 1e-38"),
    (
        {"scale": 1e20, "softcap": 1e-20},
        "scale / softcap must be -1e+37 to 1e+37, got 1e+20 / 1e-20",
    ),
]


@pytest.mark.usefixtures("host_only")
@pytest.mark.parametrize("options, message", RANGES)
def test_numbers_that_kernels_cannot_hold_are_refused(options, message):
    refused(ValueError, message, **options)
    q = np.ones((1, 2, 5, 8))
    assert (trainfast.numpy.attention(q, q, q, **options) == 1).all()


NO_NUMBERS = [
    ({"dropout_p": "much"}, TypeError, "dropout_p must be a number, got 'much'"),
    ({"dropout_p": None}, TypeError, "dropout_p must be a number, got None"),
    ({"dropout_p": np.ones(2)}, TypeError, "dropout_p must be a number, got array"),
    ({"stream": "0"}, TypeError, "stream must be an integer, got '0'"),
    ({"stream": 0.5}, TypeError, "stream must be an integer, got 0.5"),
    ({"stream": -1}, ValueError, "stream must fit into 64 bits without sign, got -1"),
]


@pytest.mark.usefixtures("host_only")
@pytest.mark.parametrize("options, error, message", NO_NUMBERS)
def test_errors_name_what_is_no_number(options, error, message):
    refused(error, message, **options)


@pytest.mark.usefixtures("host_only")
@pytest.mark.parametrize("name", ["scale", "window_size", "stream"])
def test_ctrl_c_in_a_conversion_is_no_wrong_number(name):
    class Pressed:
        def __float__(self):
            raise KeyboardInterrupt("pressed")

        __index__ = __float__

    value = (Pressed(), 1) if name == "window_size" else Pressed()
    refused(KeyboardInterrupt, "pressed", **{name: value})


@pytest.mark.usefixtures("host_only")
@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_numbers_for_heads_are_real(name):
    for bad in ([1j, 2], np.ones(2, bool), ["a", "b"], np.ones(2, object)):
        message = f"{name} must be of floats or integers, got {np.asarray(bad).dtype}"
        refused(NotImplementedError, message, **{name: bad})
    refused(ValueError, f"{name} must hold numbers, got [[1], 2]", **{name: [[1], 2]})
    if find_spec("torch"):
        import torch

        bad = torch.ones(2, dtype=torch.complex64)
        refused(NotImplementedError, "integers, got complex64", **{name: bad})


@pytest.mark.usefixtures("host_only")
def test_wanted_may_be_read_only_once(rng):
    problem = Problem(rng)
    arrays = (problem.dout, problem.q, problem.k, problem.v, *problem.forward())
    found = trainfast.numpy.attention_backward(*arrays, wanted=iter(["v", "q"]))
    assert [x is not None for x in found] == [True, False, True, False, False, False]


# ---- Arrays of other libraries -------------------------------------------------------


class Bare:
    """An array of a library that has nothing but DLPack, a shape and a dtype."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Frozen(Bare):
    """As an array of JAX: it cannot be written, nor converted to int64."""

    __module__ = "jaxlib.like"

    def __array_namespace__(self):
        raise AssertionError("its arrays are of no use")

    def __array__(self, dtype=None, copy=None):
        return self.array

    def astype(self, dtype):
        return Frozen(self.array.astype("int32" if dtype == "int64" else dtype))


@pytest.mark.usefixtures("host_only")
@pytest.mark.parametrize("kind", [Frozen, Bare])
@pytest.mark.parametrize("packed", [False, True])
def test_libraries_that_make_no_arrays_get_those_of_numpy(rng, kind, packed):
    ends = {"cu_seqlens_q": np.int32([0, 9]), "cu_seqlens_k": np.int32([0, 7])}
    options = ends if packed else {"kv_lens": np.int32([7])}
    options["sinks"] = rng.standard_normal(2).astype("f")
    problem = Problem(rng, (1, 2, 9, 7, 8), **options)
    expected = (*problem.forward(), *problem.backward())
    for name in ("q", "k", "v", "dout", "dlse"):
        setattr(problem, name, kind(getattr(problem, name)))
    problem.options |= {name: kind(x) for name, x in options.items()}
    for mine, theirs in zip((*problem.forward(), *problem.backward()), expected):
        assert type(mine) is type(theirs)
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.usefixtures("host_only")
def test_arrays_of_jax_are_taken(rng):
    jnp = pytest.importorskip("jax.numpy")
    for dtype in ("float32", "bfloat16"):
        problem = Problem(rng, (1, 2, 9, 7, 8), dtype=dtype)
        problem.options["kv_lens"] = np.int32([5])
        expected = (*problem.forward(), *problem.backward()[:3])
        for name in ("q", "k", "v", "dout"):
            setattr(problem, name, jnp.asarray(getattr(problem, name)))
        problem.options["kv_lens"] = jnp.asarray([5])
        for mine, theirs in zip((*problem.forward(), *problem.backward()), expected):
            assert type(mine) is np.ndarray
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.usefixtures("host_only")
@needs_torch
def test_tensors_that_no_kernel_reads_are_named():
    import torch

    q = torch.ones(1, 2, 5, 8)
    for bad in (q.to_sparse(), q.to("meta"), q.to_mkldnn()):
        with pytest.raises(NotImplementedError, match=r"^q must be "):
            trainfast.numpy.attention(bad, q, q)
    only_dlpack = Bare(q.bfloat16())
    del only_dlpack.shape
    with pytest.raises(NotImplementedError, match=r"^k must be an array that NumPy"):
        trainfast.numpy.attention(q.bfloat16(), only_dlpack, q.bfloat16())


@pytest.mark.usefixtures("host_only")
@needs_torch
@pytest.mark.parametrize("name", ["out", "lse", "dlse"])
def test_nothing_is_written_or_read_behind_the_back_of_autograd(name):
    import torch

    q, lse = torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5)
    given = {"out": q.clone(), "lse": lse, "dlse": lse.clone()}
    given[name].requires_grad_()
    before = given["out"]._version

    def call():
        if name == "out":
            return trainfast.numpy.attention(q, q, q, out=given["out"])
        return trainfast.numpy.attention_backward(q, q, q, q, **given)

    with pytest.raises(ValueError, match=f"^{name} must not require a gradient"):
        call()
    assert given["out"]._version == before
    with torch.no_grad():
        call()
