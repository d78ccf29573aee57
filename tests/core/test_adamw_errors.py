"""Bad input to AdamW: the type, the message, and that nothing has changed."""

import array
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import trainfast
from tests.arrays import Slot, lists
from tests.fake_device import OnDevice
from trainfast import _core

HYPER = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)


@pytest.fixture
def slots(backend, device, rng):
    return [Slot(rng, (4, 5), device=device) for _ in range(2)]


def assert_refused(slots, error, message, *positional, **options):
    before = [s.bits() for s in slots]
    with pytest.raises(error, match=message):
        trainfast.numpy.adamw_step(*positional, **{"step": 1, **HYPER, **options})
    assert [s.bits() for s in slots] == before


@pytest.mark.parametrize("column", ["params", "grads", "exp_avgs", "exp_avg_sqs"])
def test_lists_of_different_length_are_refused(slots, column):
    positional, _ = lists(slots)
    at = ["params", "grads", "exp_avgs", "exp_avg_sqs"].index(column)
    positional[at] = positional[at][:1]
    name = "grads" if column == "params" else column
    assert_refused(slots, ValueError, rf"{name} must hold \d arrays", *positional)
    positional, _ = lists(slots)
    assert_refused(
        slots,
        ValueError,
        "max_exp_avg_sqs must hold 2 arrays",
        *positional,
        max_exp_avg_sqs=[],
    )
    assert_refused(slots, ValueError, "step must hold 2", *positional, step=[])


@pytest.mark.parametrize(
    "at, name", [(1, "grads"), (2, "exp_avgs"), (3, "exp_avg_sqs")]
)
def test_shapes_that_differ_are_refused(slots, rng, device, at, name):
    other = Slot(rng, (4, 6), device=device)
    flat = Slot(rng, (20,), device=device)
    for wrong, shape in ((other, r"\(4, 6\)"), (flat, r"\(20,\)")):
        positional, _ = lists(slots)
        positional[at][1] = wrong.param.array
        message = rf"{name}\[1\] must have shape \(4, 5\) as params\[1\], got {shape}"
        assert_refused(slots, ValueError, message, *positional)


SCALARS = [
    ("lr", -1.0, "lr must be finite and >= 0, got -1"),
    ("lr", float("nan"), "lr must be finite and >= 0, got nan"),
    ("lr", float("inf"), "lr must be finite"),
    ("betas", (1.0, 0.9), r"betas\[0\] must be in \[0, 1\), got 1"),
    ("betas", (-0.1, 0.9), r"betas\[0\] must be in"),
    ("betas", (0.9, 1.5), r"betas\[1\] must be in"),
    ("betas", (0.9, float("nan")), r"betas\[1\] must be in"),
    ("eps", -1e-8, "eps must be finite and >= 0"),
    ("eps", float("nan"), "eps must be finite and >= 0"),
    ("weight_decay", -0.1, "weight_decay must be finite and >= 0, got -0.1"),
    ("weight_decay", float("nan"), "weight_decay must be"),
    ("step", 0, "step must be at least 1, got 0"),
    ("step", -3, "step must be at least 1, got -3"),
]


@pytest.mark.parametrize("name, value, message", SCALARS)
def test_scalars_out_of_range_are_refused(slots, name, value, message):
    positional, _ = lists(slots)
    assert_refused(slots, ValueError, message, *positional, **{name: value})


def test_scalar_out_of_range_is_named_where_the_device_cannot_be_used():
    lists_on_it = [[OnDevice(np.zeros(4, np.float32))] for _ in range(4)]
    with pytest.raises(ValueError, match="lr must be finite and >= 0, got -1"):
        trainfast.numpy.adamw_step(*lists_on_it, **{"step": 1, **HYPER, "lr": -1.0})


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_step_arrays_out_of_range_are_refused(backend, device, rng, value):
    if device == "cuda":
        pytest.skip("reading a counter on the device would synchronise")
    slots = [Slot(rng, (4,), step=s) for s in (1, value)]
    positional, keywords = lists(slots)
    assert_refused(slots, ValueError, r"step\[1\] must be in", *positional, **keywords)


def test_step_arrays_of_another_kind_are_refused(slots):
    positional, _ = lists(slots)
    for bad in (np.zeros(2, np.float32), np.zeros((), np.float64)):
        steps = [np.zeros((), np.float32), bad]
        if not isinstance(slots[0].param.array, np.ndarray):
            return
        assert_refused(
            slots,
            ValueError,
            r"step\[1\] must hold one float32, got",
            *positional,
            step=steps,
        )


@pytest.mark.parametrize("dtype", [np.int32, np.complex64, np.bool_, np.longdouble])
def test_other_dtypes_are_not_implemented(dtype):
    a = [np.zeros(4, dtype) for _ in range(4)]
    with pytest.raises(
        NotImplementedError, match=r"params\[0\] must be float64, float3"
    ):
        trainfast.numpy.adamw_step([a[0]], [a[1]], [a[2]], [a[3]], step=1, **HYPER)


def four():
    return [[np.ones(6, np.float32)] for _ in range(4)]


def assert_four_refused(arrays, error, message, **options):
    before = [a[0].copy() for a in arrays if isinstance(a[0], np.ndarray)]
    with pytest.raises(error, match=message):
        trainfast.numpy.adamw_step(*arrays, **{"step": 1, **HYPER, **options})
    after = [a[0] for a in arrays if isinstance(a[0], np.ndarray)]
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    "at, name", [(0, "params"), (2, "exp_avgs"), (3, "exp_avg_sqs")]
)
def test_read_only_outputs_are_refused_but_gradients_may_be(at, name):
    arrays = four()
    arrays[at][0].flags.writeable = False
    message = rf"{name}\[0\] must be writable"
    assert_four_refused(arrays, ValueError, message)
    arrays = four()
    arrays[1][0].flags.writeable = False
    trainfast.numpy.adamw_step(*arrays, step=1, **HYPER)
    message = r"grads\[0\] must be writable"
    for option in ("write_back_grads", "zero_grad"):
        assert_four_refused(arrays, ValueError, message, **{option: True})


def test_swapped_byte_order_is_refused():
    arrays = four()
    arrays[1][0] = arrays[1][0].astype(">f4")
    assert_four_refused(arrays, ValueError, r"grads\[0\] must be in native byte order")


def test_misaligned_elements_are_refused():
    arrays = four()
    arrays[0][0] = np.zeros(25, np.uint8)[1:].view(np.float32)
    message = r"params\[0\] must be aligned to 4 bytes"
    assert_four_refused(arrays, _core.PlacementError, message)


@pytest.mark.parametrize("at, name", [(0, "params"), (1, "grads"), (2, "exp_avgs")])
def test_released_buffers_are_refused(at, name):
    arrays = [[a[0], a[0].copy()] for a in four()]
    arrays[at][1] = memoryview(bytearray(24)).cast("f")
    arrays[at][1].release()
    message = rf"{name}\[1\] must have data, got a buffer that was released"
    assert_four_refused(arrays, ValueError, message)


def test_a_refused_call_holds_no_buffer():
    """bytearray refuses to grow while somebody holds its memory."""
    memory = [bytearray(24) for _ in range(4)] + [bytearray(28)]
    views = [memoryview(m).cast("f") for m in memory]
    columns = [[view, b[0]] for view, b in zip(views, four())]
    for at, wrong, error, message in (
        (3, "text", TypeError, r"exp_avg_sqs\[1\] must be an array"),
        (1, views[4], ValueError, r"grads\[1\] must have shape"),
    ):
        columns[at][1] = wrong
        with pytest.raises(error, match=message):
            trainfast.numpy.adamw_step(*columns, step=1, **HYPER)
        columns[at][1] = four()[0][0]
    for view, m in zip(views, memory, strict=True):
        view.release()
        m.append(0)
        assert not any(m)


def test_lazily_negated_gradients_are_refused():
    """Their memory holds other values than they say, and the strides give them away."""
    import torch

    arrays = [torch.zeros(4) for _ in range(4)]
    arrays[1] = torch.ones(4, dtype=torch.complex64).conj().imag
    assert arrays[1].is_neg()
    with pytest.raises(NotImplementedError, match=r"grads\[0\] must not be a lazily"):
        trainfast.numpy.adamw_step(*([array] for array in arrays), step=1, **HYPER)


def test_gaps_are_not_implemented_in_parameters_and_copied_in_gradients():
    arrays = four()
    arrays[0][0] = np.zeros(12, np.float32)[::2]
    assert_four_refused(arrays, NotImplementedError, r"params\[0\] must be dense")
    arrays = four()
    arrays[2][0] = np.zeros(12, np.float32)[::2]
    assert_four_refused(arrays, ValueError, r"exp_avgs\[0\] must have the strides of")
    strided, plain = four(), four()
    values = np.arange(12, dtype=np.float32)
    strided[1][0], plain[1][0] = values[::2], values[::2].copy()
    trainfast.numpy.adamw_step(*strided, step=1, **HYPER)
    trainfast.numpy.adamw_step(*plain, step=1, **HYPER)
    np.testing.assert_array_equal(strided[0], plain[0])
    negative = four()
    negative[1][0] = values[::-2]
    trainfast.numpy.adamw_step(*negative, step=1, **HYPER)
    assert np.isfinite(negative[0][0]).all()


def test_a_gradient_with_gaps_is_written_back():
    arrays, values = four(), np.arange(12, dtype=np.float32)
    arrays[1][0] = values[::2]
    options = dict(HYPER, grad_scale=np.float32([2.0]), write_back_grads=True)
    trainfast.numpy.adamw_step(*arrays, step=1, **options)
    np.testing.assert_array_equal(values, [0, 1, 1, 3, 2, 5, 3, 7, 4, 9, 5, 11])
    trainfast.numpy.adamw_step(*arrays, step=2, **HYPER, zero_grad=True)
    np.testing.assert_array_equal(values, [0, 1, 0, 3, 0, 5, 0, 7, 0, 9, 0, 11])


def test_overlapping_outputs_are_refused():
    memory = np.ones(40, np.float32)
    arrays = four()
    arrays[0][0], arrays[2][0] = memory[:6], memory[5:11]
    message = r"(params|exp_avgs)\[0\] must not overlap (params|exp_avgs)\[0\]"
    assert_four_refused(arrays, _core.PlacementError, message)
    arrays = [[a[0], a[0].copy()] for a in four()]
    arrays[0] = [memory[:6], memory[:6]]
    message = r"params\[\d\] must not overlap params"
    assert_four_refused(arrays, _core.PlacementError, message)
    arrays = four()
    arrays[1][0] = arrays[0][0]
    assert_four_refused(arrays, _core.PlacementError, "must not overlap")
    shared = np.ones(6, np.float32)
    arrays = [[a[0], a[0].copy()] for a in four()]
    arrays[1] = [shared, shared]  # two gradients may share memory: they are only read
    trainfast.numpy.adamw_step(*arrays, step=1, **HYPER)
    for option in ("zero_grad", "write_back_grads"):
        message = r"grads\[1\] must not overlap grads\[0\]"
        assert_four_refused(arrays, _core.PlacementError, message, **{option: True})
    step = np.zeros((), np.float32)
    arrays = [[a[0], a[0].copy()] for a in four()]
    assert_four_refused(
        arrays, _core.PlacementError, "step.* overlap step", step=[step, step]
    )


def test_what_is_no_array_is_refused():
    arrays = four()
    for thing in ([1.0, 2.0], None, 3, "text", object()):
        arrays[1] = [thing]
        assert_four_refused(arrays, TypeError, r"grads\[0\] must be an array")
    arrays[1] = np.ones(6, np.float32)
    assert_four_refused(arrays, TypeError, "grads must be a list of arrays")
    arrays = four()
    with pytest.raises(TypeError, match="not iterable"):
        trainfast.numpy.adamw_step(arrays[0], 5, *arrays[2:], step=1, **HYPER)
    for kind in (np.ma.MaskedArray, type("Masked", (np.ma.MaskedArray,), {})):
        arrays = four()
        arrays[0][0] = np.ones(6, np.float32).view(kind)
        assert_four_refused(arrays, TypeError, "masked")


def test_states_of_two_dtypes_are_refused():
    arrays = four()
    arrays[3][0] = arrays[3][0].astype(np.float64)
    message = r"exp_avg_sqs\[0\] must be float32 as exp_avgs\[0\], got float64"
    assert_four_refused(arrays, ValueError, message)


@pytest.mark.parametrize("name", ["lr", "grad_scale", "found_inf"])
def test_device_scalars_of_another_kind_are_refused(name):
    for bad in (np.ones(2, np.float32), np.float64([1.0])):
        message = f"{name} must hold one float32"
        assert_four_refused(four(), ValueError, message, **{name: bad})


def test_cpu_and_cuda_in_one_slot_are_refused():
    class Elsewhere:
        """A DLPack producer that says it is on a GPU."""

        def __init__(self, values):
            import ctypes

            self.values = values
            self.shape = (ctypes.c_int64 * 1)(values.size)
            pointer = values.ctypes.data

            class Tensor(ctypes.Structure):
                _fields_ = [
                    ("data", ctypes.c_void_p),
                    ("device", ctypes.c_int32 * 2),
                    ("ndim", ctypes.c_int32),
                    ("dtype", ctypes.c_uint8 * 4),
                    ("shape", ctypes.c_void_p),
                    ("strides", ctypes.c_void_p),
                    ("offset", ctypes.c_uint64),
                    ("context", ctypes.c_void_p),
                    ("deleter", ctypes.c_void_p),
                ]

            self.tensor = Tensor(
                pointer,
                (ctypes.c_int32 * 2)(2, 0),
                1,
                (ctypes.c_uint8 * 4)(2, 32, 1, 0),
                ctypes.addressof(self.shape),
                None,
                0,
                None,
                None,
            )
            new = ctypes.pythonapi.PyCapsule_New
            new.restype = ctypes.py_object
            new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
            self.name = b"dltensor"
            self.capsule = new(ctypes.addressof(self.tensor), self.name, None)

        def __dlpack__(self):
            return self.capsule

    arrays = four()
    arrays[1][0] = Elsewhere(np.ones(6, np.float32))
    message = r"grads\[0\] must be on cpu as params\[0\], got cuda:0"
    assert_four_refused(arrays, ValueError, message)
    arrays = [[a[0], a[0].copy()] for a in four()]
    arrays[0][1] = Elsewhere(np.ones(6, np.float32))
    message = r"params\[1\] must be on the device of params\[0\]"
    assert_four_refused(arrays, ValueError, message)
    if not next(b for b in trainfast.backends() if b["name"] == "cuda")["usable"]:
        arrays = [[Elsewhere(np.ones(6, np.float32))] for _ in range(4)]
        assert_four_refused(arrays, NotImplementedError, "CUDA arrays cannot be used")


def test_buffers_and_other_producers_work():
    class OnlyDlpack:
        def __init__(self, values):
            self.values = values

        def __dlpack__(self, **options):
            return self.values.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.values.__dlpack_device__()

    class OldDlpack(OnlyDlpack):
        def __dlpack__(self, stream=None):
            return self.values.__dlpack__()

    want = four()
    trainfast.numpy.adamw_step(*want, step=1, **HYPER)
    makers = [
        OnlyDlpack,
        OldDlpack,
        lambda a: array.array("f", a),
        lambda a: memoryview(bytearray(a.tobytes())).cast("f"),
    ]
    for make in makers:
        made = [[make(a[0])] for a in four()]
        trainfast.numpy.adamw_step(*made, step=1, **HYPER)
        result = getattr(made[0][0], "values", made[0][0])
        np.testing.assert_array_equal(np.asarray(result), want[0][0])
    read_only = four()
    values = np.ones(6, np.float32)
    values.flags.writeable = False
    read_only[0][0] = OnlyDlpack(values)
    with pytest.raises((ValueError, NotImplementedError)):
        trainfast.numpy.adamw_step(*read_only, step=1, **HYPER)
    read_only[0][0] = memoryview(values)
    with pytest.raises(ValueError, match="writable"):
        trainfast.numpy.adamw_step(*read_only, step=1, **HYPER)


def test_bytes_as_gradients_and_wrong_formats():
    arrays = four()
    arrays[1][0] = array.array("i", range(6))
    assert_four_refused(arrays, NotImplementedError, "got int32")


def test_a_workspace_is_for_one_thread():
    workspace = _core.Workspace()
    arrays = [[np.ones(4_000_000, np.float32)] for _ in range(4)]
    errors, refused = [], []

    def work():
        for _ in range(20):
            try:
                trainfast.numpy.adamw_step(
                    *arrays, step=1, workspace=workspace, **HYPER
                )
            except RuntimeError as error:
                refused.append(str(error))
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert all("two threads at once" in r for r in refused)
    with pytest.raises(TypeError, match="workspace must be a Workspace"):
        trainfast.numpy.adamw_step(*four(), step=1, workspace=3, **HYPER)


def test_a_failed_step_is_not_trusted_by_the_next_one():
    """The overlap check is skipped only for what has passed it."""
    workspace = _core.Workspace()
    memory = np.ones(12, np.float32)
    arrays = four()
    arrays[0][0], arrays[2][0] = memory[:6], memory[5:11]
    for _ in range(3):
        with pytest.raises(ValueError, match="overlap"):
            trainfast.numpy.adamw_step(*arrays, step=1, workspace=workspace, **HYPER)


def test_interrupted_step_is_whole(rng):
    """Ctrl-C in a long step: the step ends, then KeyboardInterrupt is raised."""
    n = 30_000_000
    arrays = [[np.zeros(n, np.float32)] for _ in range(4)]
    arrays[1][0][:] = 1
    step = [np.zeros((), np.float32)]
    trainfast.numpy.adamw_step(*arrays, step=step, **HYPER)

    def interrupt():
        time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        while True:
            trainfast.numpy.adamw_step(*arrays, step=step, **HYPER)
    thread.join()
    for a in (arrays[0][0], arrays[2][0], arrays[3][0]):
        assert (a == a[0]).all()
    m, beta = arrays[2][0][0], np.float32(1)
    for _ in range(int(step[0])):
        beta *= np.float32(0.9)
    assert m == pytest.approx(1 - beta, rel=1e-4)


def test_use_after_fork_works():
    code = """
import os, sys, numpy as np
import torch
import trainfast
a = [[np.ones(100_000, np.float32)] for _ in range(4)]
trainfast.numpy.adamw_step(*a, step=1, lr=0.1)
torch.ones(1000, 1000) @ torch.ones(1000, 1000)
pid = os.fork()
if pid == 0:
    b = [[np.ones(100_000, np.float32)] for _ in range(4)]
    trainfast.numpy.adamw_step(*b, step=1, lr=0.1)
    os._exit(0 if (b[0][0] == a[0][0]).all() else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=240)
    assert done.returncode == 0


def test_out_of_memory_raises_and_changes_nothing():
    testcapi = pytest.importorskip("_testcapi")
    arrays = [[np.ones(6, np.float32) for _ in range(20)] for _ in range(4)]
    before = [a.copy() for column in arrays for a in column]
    raised = 0
    for first in range(3000):
        testcapi.set_nomemory(first, 0)
        try:
            _core.adamw(
                *arrays, None, 1, _core.Workspace(), lr=0.1, beta1=0.9, beta2=0.99,
                eps=1e-8, weight_decay=0.0, maximize=False, decoupled_weight_decay=True,
            )  # fmt: skip
        except MemoryError:
            testcapi.remove_mem_hooks()
            raised += 1
        else:
            break
        finally:
            testcapi.remove_mem_hooks()
        now = [a for column in arrays for a in column]
        assert all((a == b).all() for a, b in zip(before, now, strict=True))
    assert raised > 5
    assert first < 2999
