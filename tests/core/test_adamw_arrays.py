"""Which arrays AdamW takes from other libraries, and arrays of over 2**31 elements."""

import ctypes
import mmap
import os

import ml_dtypes
import numpy as np
import pytest

import trainfast
from tests.fake_device import pointer_of
from trainfast import _core

torch = pytest.importorskip("torch")
HYPER = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)

# ---- What torch exports, and what it only seems to -----------------------------------


def quantized():
    return torch.quantize_per_tensor(torch.ones(6), 1.0, 0, torch.qint8)


NOT_TAKEN = {
    "quantized": quantized,
    "mkldnn": lambda: torch.ones(6).to_mkldnn(),
    "meta": lambda: torch.ones(6, device="meta"),
    "sparse": lambda: torch.ones(6).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(6)]),
    "conjugated": lambda: torch.ones(6, dtype=torch.complex64).conj(),
    "float8": lambda: torch.ones(6).to(torch.float8_e4m3fn),
    "int32": lambda: torch.ones(6, dtype=torch.int32),
    "subclass": lambda: torch.ones(6).as_subclass(type("Mine", (torch.Tensor,), {})),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("at, name", [(0, "params"), (1, "grads"), (3, "exp_avg_sqs")])
@pytest.mark.parametrize("kind", NOT_TAKEN)
def test_tensors_without_plain_memory_are_not_implemented(kind, at, name):
    columns = [[torch.ones(6), torch.ones(6)] for _ in range(4)]
    columns[at][1] = NOT_TAKEN[kind]()
    with pytest.raises(NotImplementedError, match=rf"{name}\[1\] must "):
        trainfast.numpy.adamw_step(*columns, step=1, **HYPER)
    assert all((column[0] == 1).all() for column in columns)


def test_strides_of_dimensions_of_size_1_mean_nothing():
    def step(strides):
        arrays = [torch.empty_strided((1, 6, 1), s).fill_(1.0) for s in strides]
        arrays[1] *= torch.arange(6.0).reshape(1, 6, 1)
        trainfast.numpy.adamw_step(*([a] for a in arrays), step=1, **HYPER)
        return arrays[0].flatten()

    plain = step([(6, 1, 1)] * 4)
    odd = step([(7, 1, 3), (99, 1, 5), (1, 1, 1), (0, 1, 0)])
    assert torch.equal(plain, odd) and len(plain.unique()) > 1


def test_inference_tensors_are_stepped():
    with torch.inference_mode():
        columns = [[torch.ones(6)] for _ in range(4)]
    trainfast.numpy.adamw_step(*columns, step=1, **HYPER)
    assert not (columns[0][0] == 1).any()


# ---- JAX's arrays --------------------------------------------------------------------


def test_arrays_of_jax_are_gradients_and_never_outputs():
    jnp = pytest.importorskip("jax.numpy")
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        values = np.linspace(-1, 1, 6).astype(dtype)
        params = [np.ones(6, np.float32) for _ in range(2)]
        for param, grad in zip(params, (values, jnp.asarray(values)), strict=True):
            optimizer = trainfast.numpy.AdamW([param], max_grad_norm=0.5)
            assert trainfast.numpy.LossScaler(8.0).step(optimizer, [grad])
        np.testing.assert_array_equal(*params)
        assert (params[0] != 1).all()
    ones = jnp.ones(6)
    plain = [[np.ones(6, np.float32)] for _ in range(4)]
    for at, name in [(0, "params"), (2, "exp_avgs"), (3, "exp_avg_sqs")]:
        columns = [*plain[:at], [ones], *plain[at + 1 :]]
        with pytest.raises(ValueError, match=rf"{name}\[0\] must be writable"):
            trainfast.numpy.adamw_step(*columns, step=1, **HYPER)
    param = np.ones(6, np.float32)
    for option in ("zero_grad", "write_back_grads"):
        with pytest.raises(ValueError, match=r"grads\[0\] must be writable"):
            trainfast.numpy.AdamW([param], **{option: True}).step([ones])
    with pytest.raises(ValueError, match=r"grads\[0\] must be writable"):
        trainfast.numpy.LossScaler(8.0).unscale_(trainfast.numpy.AdamW([param]), [ones])
    assert (ones == 1).all() and (param == 1).all()
    assert all((column[0] == 1).all() for column in plain)


# ---- A type of objects without a body ------------------------------------------------


def test_objects_that_are_only_a_header_are_not_read_beyond_it(rng):
    # Of torch's tensors the word behind the header is read, for prefetching. Only the
    # address sanitizer sees it if that happens here.
    arrays, capsules = {}, {}

    @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    def view(address, out):
        dl_tensor_bytes = 48
        ctypes.memmove(out, pointer_of(capsules[address], b"dltensor"), dl_tensor_bytes)
        return 0

    # DLPackExchangeAPI: version 1.0, four pointers that are not used, this function
    api = (ctypes.c_void_p * 7)(1, 0, 0, 0, 0, ctypes.cast(view, ctypes.c_void_p).value)
    make_capsule = ctypes.pythonapi.PyCapsule_New
    make_capsule.restype = ctypes.py_object
    make_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = make_capsule(ctypes.addressof(api), b"dlpack_exchange_api", None)
    header = type("Header", (), {"__slots__": (), "__dlpack_c_exchange_api__": capsule})
    assert header.__basicsize__ == object.__basicsize__
    columns = [[header() for _ in range(3)] for _ in range(4)]
    for column in columns:
        for each in column:
            arrays[id(each)] = rng.random(6, dtype="f")
            capsules[id(each)] = arrays[id(each)].__dlpack__()
    plain = [[arrays[id(each)].copy() for each in column] for column in columns]
    for step in (1, 2):
        trainfast.numpy.adamw_step(*columns, step=step, **HYPER)
        trainfast.numpy.adamw_step(*plain, step=step, **HYPER)
    for column, expected in zip(columns, plain, strict=True):
        for each, right in zip(column, expected, strict=True):
            np.testing.assert_array_equal(arrays[id(each)], right)


# ---- Long arrays ---------------------------------------------------------------------

BODY, TAIL, WINDOW = 2**31, 6000, 2**25  # elements of two bytes
FIXED, NORESERVE = 0x10, 0x4000  # Linux's flags of mmap() that Python does not name


class Long:
    """BODY elements that lie in the same WINDOW of memory again and again, and TAIL
    elements with memory of their own behind them."""

    def __init__(self):
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.mmap.restype = ctypes.c_void_p
        self.libc.mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            *[ctypes.c_int] * 3,
        ]
        self.libc.mmap.argtypes += [ctypes.c_int64]
        self.libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.bytes = 2 * (BODY + TAIL)
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
        self.base = self.map(None, self.bytes, private, -1)
        window = os.memfd_create("window")
        os.truncate(window, 2 * WINDOW)
        for at in range(self.base, self.base + 2 * BODY, 2 * WINDOW):
            self.map(at, 2 * WINDOW, mmap.MAP_SHARED | FIXED, window)
        os.close(window)
        memory = (ctypes.c_uint16 * (BODY + TAIL)).from_address(self.base)
        self.array = np.frombuffer(memory, np.uint16).view(ml_dtypes.bfloat16)
        self.window, self.tail = self.array[:WINDOW], self.array[BODY:]

    def map(self, at, n_bytes, flags, file):
        read_write = mmap.PROT_READ | mmap.PROT_WRITE
        found = self.libc.mmap(at, n_bytes, read_write, flags, file, 0)
        if found in (None, ctypes.c_void_p(-1).value):
            pytest.skip(f"needs address space: {os.strerror(ctypes.get_errno())}")
        return found

    def close(self):
        del self.array, self.window, self.tail
        self.libc.munmap(self.base, self.bytes)


@pytest.mark.slow
@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="needs address space"
)
def test_arrays_of_more_than_2_to_the_31_elements(rng):
    arrays = [Long() for _ in range(4)]
    param, grad, *_ = arrays
    param.window[...] = 1  # where nothing else is: stays so without weight decay
    for array in (param, grad):
        array.tail[...] = rng.standard_normal(TAIL)
    alone = [a.tail.copy() for a in arrays]
    norms = [np.zeros(1, np.float32) for _ in range(2)]
    flag = np.zeros(1, np.float32)
    for grads, norm in ((grad.array, norms[0]), (alone[1], norms[1])):
        _core.amp_grads([grads], _core.Workspace(), total_norm=norm, found_inf=flag)
        assert flag == 0
    trainfast.numpy.adamw_step(*([a.array] for a in arrays), step=1, **HYPER)
    trainfast.numpy.adamw_step(*([a] for a in alone), step=1, **HYPER)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    for long, short in zip(arrays, alone, strict=True):
        assert long.tail.tobytes() == short.tobytes()
        assert (long.window == (1 if long is param else 0)).all()
    grad.tail[-1] = np.inf
    _core.amp_grads([grad.array], _core.Workspace(), found_inf=flag)
    assert flag == 1
    for array in arrays:
        array.close()
