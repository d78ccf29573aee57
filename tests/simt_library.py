"""The SIMT library by itself, through ctypes: its backend as csrc/tfast.h declares it,
and what the twin of the driver counts."""

import ctypes

import numpy as np

from tests.arrays import DTYPES

ABI = 13  # TFAST_ABI
F32, F64, F16, BF16 = range(4)  # tfast_dtype
NUMBERS = {"float32": F32, "float64": F64, "float16": F16, "bfloat16": BF16}
FAIL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p)
POINTER = ctypes.c_void_p


class Slot(ctypes.Structure):
    _fields_ = [
        *[(name, POINTER) for name in ("param", "grad", "exp_avg", "exp_avg_sq")],
        ("max_exp_avg_sq", POINTER),
        ("step", POINTER),
        ("numel", ctypes.c_int64),
        *[(f"{name}_dtype", ctypes.c_uint8) for name in ("param", "grad", "state")],
        ("scales", POINTER),
    ]


class Extra(ctypes.Structure):
    _fields_ = [
        *[(name, POINTER) for name in ("ema", "copy", "tail")],
        *[(name, ctypes.c_int64) for name in ("place", "row", "row_stride")],
        ("index", ctypes.c_uint32),
        *[(name, ctypes.c_uint8) for name in ("rounding", "ema_dtype", "copy_dtype")],
    ]


class Workspace(ctypes.Structure):
    _fields_ = [("backend", POINTER), ("data", POINTER)]


class Args(ctypes.Structure):
    _fields_ = [
        ("slots", ctypes.POINTER(Slot)),
        ("extras", ctypes.POINTER(Extra)),
        ("n_slots", ctypes.c_int64),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("workspace", ctypes.POINTER(Workspace)),
        ("step", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        *[(name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps")],
        *[(name, ctypes.c_double) for name in ("weight_decay", "ema_decay")],
        ("maximize", ctypes.c_bool),
        ("decoupled_weight_decay", ctypes.c_bool),
        *[(name, ctypes.c_bool) for name in ("write_back_grads", "zero_grad")],
        *[(name, POINTER) for name in ("lr_device", "grad_scale", "found_inf")],
        *[(name, POINTER) for name in ("clip_coef", "stream")],
    ]


class AmpTensor(ctypes.Structure):
    _fields_ = [
        ("data", POINTER),
        ("numel", ctypes.c_int64),
        ("dtype", ctypes.c_uint8),
    ]


RESULTS = ("found_inf", "total_norm", "total_norm_f64", "clip_coef")


class AmpGradsArgs(ctypes.Structure):
    _fields_ = [
        ("tensors", ctypes.POINTER(AmpTensor)),
        ("n_tensors", ctypes.c_int64),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("workspace", ctypes.POINTER(Workspace)),
        *[(name, POINTER) for name in RESULTS],
        *[(name, ctypes.c_double) for name in ("norm_type", "max_norm", "clip_value")],
        ("rewrite", ctypes.c_int),
        *[(name, POINTER) for name in ("grad_scale", "factor", "stream")],
    ]


class AmpUpdateArgs(ctypes.Structure):
    _fields_ = [
        *[(name, POINTER) for name in ("scale", "growth_tracker")],
        ("hysteresis_tracker", POINTER),
        ("found_infs", POINTER * 16),
        *[(name, ctypes.c_int32) for name in ("n_found_infs", "growth_interval")],
        ("hysteresis", ctypes.c_int32),
        *[(name, ctypes.c_double) for name in ("growth_factor", "backoff_factor")],
        *[(name, ctypes.c_double) for name in ("min_scale", "max_scale")],
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("stream", POINTER),
    ]


class AttentionRows(ctypes.Structure):
    _fields_ = [
        ("data", POINTER),
        *[(name, ctypes.c_int64) for name in ("batch", "head", "row")],
    ]


class AttentionTerm(ctypes.Structure):
    _fields_ = [
        ("data", POINTER),
        ("stride", ctypes.c_int64 * 4),
        ("dtype", ctypes.c_uint8),
    ]


class AttentionArgs(ctypes.Structure):
    _fields_ = [
        *[(name, AttentionRows) for name in ("q", "k", "v", "out")],
        ("lse", POINTER),
        *[(name, ctypes.c_int64) for name in ("lse_batch", "lse_head")],
        *[(name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads")],
        *[(name, ctypes.c_int64) for name in ("n_q", "n_k", "dim", "dim_v")],
        *[(name, POINTER) for name in ("cu_seqlens_q", "cu_seqlens_k")],
        *[(name, ctypes.c_int64) for name in ("total_q", "total_k")],
        ("kv_lens", POINTER),
        *[(name, AttentionTerm) for name in ("mask", "bias")],
        ("alibi_slopes", POINTER),
        ("alibi_batch", ctypes.c_int64),
        ("sinks", POINTER),
        *[(name, ctypes.c_bool) for name in ("is_causal", "bottom_right")],
        *[(name, ctypes.c_int64) for name in ("window_left", "window_right")],
        *[(name, ctypes.c_double) for name in ("scale", "softcap", "dropout_p")],
        ("seed", ctypes.c_int64),
        ("seed_at", POINTER),
        ("dout", AttentionRows),
        ("dlse", POINTER),
        *[(name, AttentionRows) for name in ("dq", "dk", "dv")],
        ("dbias", POINTER),
        ("dbias_stride", ctypes.c_int64 * 4),
        *[(name, POINTER) for name in ("dalibi", "dsinks", "scratch")],
        ("scratch_bytes", ctypes.c_int64),
        ("dtype", ctypes.c_uint8),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("stream", POINTER),
    ]


class Backend(ctypes.Structure):
    _fields_ = [
        ("abi", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("device", ctypes.c_int32),
        ("unusable", ctypes.CFUNCTYPE(ctypes.c_char_p)),
        ("workspace_clear", ctypes.CFUNCTYPE(None, POINTER)),
        ("adamw", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Args))),
        ("adamw_prepare", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Args))),
        ("amp_grads", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(AmpGradsArgs))),
        ("amp_update", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(AmpUpdateArgs))),
        ("attention", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(AttentionArgs))),
        ("attention_backward", ctypes.CFUNCTYPE(ctypes.c_int, POINTER)),
        (
            "attention_scratch",
            ctypes.CFUNCTYPE(
                ctypes.c_int, ctypes.POINTER(ctypes.c_int64), POINTER, ctypes.c_bool
            ),
        ),
        ("gemm", POINTER),
        ("neighbours_scratch", POINTER),
        ("neighbours_count", POINTER),
        ("trajectory_scratch", POINTER),
        ("trajectory", POINTER),
    ]


class Simt:
    """The library: its backend, and what it counts."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.library.tfast_simt_copies.restype = ctypes.c_int64
        self.failures = []
        self.fail = FAIL(self.note_failure)  # must outlive the library's use of it
        self.exchange_fail = self.library.tfast_simt_exchange_fail
        self.exchange_fail.restype = POINTER
        self.exchange_fail.argtypes = [POINTER]
        self.others_fail = self.exchange_fail(None)  # the core's, if it has opened it
        self.library.tfast_library_open.restype = ctypes.POINTER(Backend)
        self.opened = self.library.tfast_library_open(ABI, self.fail)
        self.backend = self.opened.contents

    def close(self):
        """The core's errors are its own again."""
        now = self.exchange_fail(self.others_fail)
        if now != ctypes.cast(self.fail, POINTER).value:
            self.exchange_fail(now)  # the core's, which has opened it since

    def note_failure(self, status, text):
        self.failures.append((status, text.decode()))
        return status

    def counts(self):
        """What was counted since the last call."""
        three = (ctypes.c_int64 * 3)()
        self.library.tfast_simt_counts(three)
        names = ("syncs", "allocations", "launches")
        counts = dict(zip(names, three), copies=self.library.tfast_simt_copies())
        self.library.tfast_simt_reset()
        return counts


WARM = {"syncs": 0, "allocations": 0, "launches": 1, "copies": 0}


class Tensors:
    """One slot's arrays, each `offset` elements from an aligned address."""

    def __init__(self, rng, numel, dtypes, *, offsets=(0,) * 5, amsgrad=False, step=0):
        names = [dtypes[0], dtypes[1], dtypes[2], dtypes[2], dtypes[2]]
        factors = [1, 1, 0.1, 0.01, 0.01]
        values = [rng.standard_normal(numel) * factor for factor in factors]
        values[3:] = np.abs(values[3:])
        self.arrays = [
            aligned(value, DTYPES[name], offset)
            for value, name, offset in zip(values, names, offsets)
        ]
        self.step = np.array(step, np.float32)
        pointers = [array.ctypes.data for array in self.arrays]
        pointers[4] = pointers[4] if amsgrad else None
        numbers = [NUMBERS[name] for name in dtypes]
        self.slot = Slot(*pointers, self.step.ctypes.data, numel, *numbers)
        self.amsgrad = amsgrad

    def copies(self):
        return [array.copy() for array in self.arrays]


def aligned(values, dtype, offset):
    whole = np.zeros(len(values) + offset + 64, dtype)
    skew = -whole.ctypes.data // dtype.itemsize % (64 // dtype.itemsize) + offset
    array = whole[skew : skew + len(values)]
    array[...] = values.astype(dtype)
    return array


class Step:
    """A list of slots and the options of their steps."""

    def __init__(self, simt, tensors, *, extras=None, **options):
        self.simt, self.tensors = simt, tensors
        self.slots = (Slot * len(tensors))(*[t.slot for t in tensors])
        self.workspace = Workspace()
        self.extras = extras and (Extra * len(tensors))(*extras)
        self.keep = options  # the arrays among them must stay
        args = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
        args |= {"weight_decay": 0.1, "decoupled_weight_decay": True}
        args |= {
            name: value.ctypes.data if isinstance(value, np.ndarray) else value
            for name, value in options.items()
        }
        self.args = Args(
            slots=self.slots,
            extras=self.extras,
            n_slots=len(tensors),
            device_type=1,
            workspace=ctypes.pointer(self.workspace),
            **args,
        )

    def __call__(self):
        return self.simt.backend.adamw(ctypes.byref(self.args))

    def clear(self):
        if self.workspace.data:
            self.simt.backend.workspace_clear(self.workspace.data)
        self.workspace.data = None


READ, MULTIPLY, CLAMP = range(3)  # tfast_amp_rewrite


class Pass:
    """One tfast_amp_grads() over arrays; options that are arrays go by address."""

    def __init__(self, simt, arrays, *, workspace=None, **options):
        self.simt, self.arrays = simt, arrays
        self.tensors = (AmpTensor * len(arrays))(
            *[(a.ctypes.data, a.size, NUMBERS[a.dtype.name]) for a in arrays]
        )
        self.workspace = workspace or Workspace()
        self.keep = options  # the arrays among them must stay
        self.args = AmpGradsArgs(
            tensors=self.tensors,
            n_tensors=len(arrays),
            device_type=1,
            workspace=ctypes.pointer(self.workspace),
            **{
                name: value.ctypes.data if isinstance(value, np.ndarray) else value
                for name, value in {"norm_type": 2.0, **options}.items()
            },
        )

    def __call__(self):
        return self.simt.backend.amp_grads(ctypes.byref(self.args))

    clear = Step.clear


class Capture:
    """What is launched inside is recorded, and run by replay()."""

    def __init__(self, simt):
        self.simt = simt

    def __enter__(self):
        self.simt.library.tfast_simt_capture_begin()
        return self

    def __exit__(self, *_):
        self.simt.library.tfast_simt_capture_end()

    def replay(self):
        self.simt.library.tfast_simt_replay()
