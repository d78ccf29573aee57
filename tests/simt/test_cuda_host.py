"""The host side of cuda/ as a driver sees it, on the SIMT library: which device and
streams a call uses and leaves, what it does while a stream captures, and what it says
where the driver refuses."""

import ctypes
import os

import numpy as np
import pytest

from tests.fake_device import run
from tests.simt_library import Capture, Pass, Step, Tensors

pytestmark = pytest.mark.skipif(
    not os.environ.get("TRAINFAST_SIMT_LIBRARY"), reason="no SIMT library"
)

STEPS = """
import trainfast
from trainfast import _core

simt = ctypes.CDLL(os.environ["TRAINFAST_CUDA_LIBRARY"])
simt.tfast_simt_stream.restype = ctypes.c_void_p
one, count = np.ones(1, np.float32), np.ones(1, np.int32)

class Steps:
    def __init__(self, index):
        self.workspace, self.index = _core.Workspace(), index
        self.arrays = [np.full(300, 0.5, np.float32) for _ in range(4)]

    def __call__(self, stream=0):
        lists = [[OnDevice(a, self.index)] for a in self.arrays]
        options = dict(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0)
        options |= dict(maximize=False, decoupled_weight_decay=True)
        _core.adamw(*lists, None, 1, self.workspace, lr=0.1, stream=stream, **options)

def fails(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


def lines(code, **environment):
    done = run(STEPS + code, **environment)
    assert done.code == 0, done.err
    return done.out.splitlines()


# ---- Devices and streams -------------------------------------------------------------


def test_call_makes_no_context_on_another_gpu():
    code = """
steps = Steps(1)
steps()
assert steps.arrays[0][0] != 0.5
print(simt.tfast_simt_contexts(), simt.tfast_simt_current())
del steps
print(simt.tfast_simt_contexts(), simt.tfast_simt_current())
"""
    assert lines(code) == ["2 -1", "2 -1"]


def test_call_leaves_the_current_gpu_as_it_was():
    code = """
calls = [Steps(0), Steps(1)]
for current in (-1, 0, 1):
    for call in calls * 2:
        simt.tfast_simt_set_current(current)
        call()
        assert simt.tfast_simt_current() == current
        fails(lambda: Steps(7)())
        assert simt.tfast_simt_current() == current
print(*[round(float(call.arrays[0][0]), 3) for call in calls])
"""
    first, second = lines(code)[0].split()
    assert first == second


def test_call_runs_on_the_gpu_of_its_arrays_and_stream():
    code = """
for current in (0, 1):
    simt.tfast_simt_set_current(current)
    print(fails(lambda: Steps(1)(simt.tfast_simt_stream(1))))
    print(fails(lambda: Steps(1)(simt.tfast_simt_stream(0))))
"""
    right, wrong = "None", "RuntimeError: cuMemcpyHtoDAsync: "
    said = lines(code)
    assert said[::2] == [right] * 2
    assert all(
        s.startswith(wrong) and s.endswith("invalid resource handle")
        for s in said[1::2]
    )


def test_frozen_parameter_does_not_say_where_the_step_runs(monkeypatch):
    import torch

    from trainfast.torch import AdamW
    from trainfast.torch.optim import fused_step

    asked = []
    monkeypatch.setattr(fused_step, "_current_stream", lambda p: asked.append(p) or 0)

    frozen = torch.nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)
    param = torch.nn.Parameter(torch.ones(4))
    param.grad = torch.full((4,), 2.0)
    optimizer = AdamW([frozen, param], lr=torch.tensor(0.5), max_grad_norm=1.0)
    for _ in range(2):
        optimizer.step()
    assert optimizer.grad_norm == 4
    assert torch.all(param < 0.1)
    assert {p.device.type for p in asked} == {"cpu"}


# ---- Captures ------------------------------------------------------------------------

FIRST_CALLS = {
    "adamw": "Steps(0)()",
    "amp_grads": """
_core.amp_grads([OnDevice(np.ones(9))], keep[0], total_norm_f64=OnDevice(np.ones(1)))
""",
    "amp_update": """
_core.amp_update(OnDevice(one), OnDevice(count), [OnDevice(one.copy())],
                 growth_factor=2.0, backoff_factor=0.5, growth_interval=9)
""",
    "attention": """
trainfast.numpy.attention(*[OnDevice(np.ones((1, 1, 3, 8), "f")) for _ in range(3)])
""",
    "attention by tensor cores": """
trainfast.numpy.attention(*[OnDevice(np.ones((1, 1, 64, 64), "e")) for _ in range(3)])
""",
}


@pytest.mark.parametrize("name", FIRST_CALLS)
def test_kernel_may_be_launched_first_in_a_capture(name):
    code = f"""
keep = [_core.Workspace()]
simt.tfast_simt_capture_begin()
{FIRST_CALLS[name]}
simt.tfast_simt_capture_end()
print("captured")
"""
    assert lines(code) == ["captured"]


def test_capture_without_a_workspace_is_refused(simt, rng):
    tensors = [Tensors(rng, 300, ["float32"] * 3)]
    norm = np.zeros(1)
    calls = [Pass(simt, tensors[0].arrays, total_norm_f64=norm), Step(simt, tensors)]
    for call in calls:
        call.args.workspace = None
        simt.failures.clear()
        with Capture(simt) as graph:
            assert call() == 1  # TFAST_EINVAL
        assert simt.failures[0][1].startswith("workspace must be given while")
        graph.replay()  # of nothing
    assert tensors[0].step == 0 and norm == 0
    assert [call() for call in calls] == [0, 0]
    assert tensors[0].step == 1 and norm > 0


def test_captured_clipping_outlives_its_thread():
    code = """
import threading, torch
from trainfast.torch.optim.clip import measure

grads = [torch.full((4,), 2.0)]
def capture():
    simt.tfast_simt_capture_begin()
    kept.append(measure(grads, max_norm=9.0))  # all that it writes
    simt.tfast_simt_capture_end()
kept = []
thread = threading.Thread(target=capture)
thread.start()
thread.join()
simt.tfast_simt_replay()
print(kept[0].total_norm.item())
"""
    library = os.environ["TRAINFAST_SIMT_LIBRARY"]
    said = lines(code, TRAINFAST_BACKEND="simt", TRAINFAST_SIMT_LIBRARY=library)
    assert said == ["4.0"]


# ---- Clipping on several streams -----------------------------------------------------


def test_clipping_on_another_stream_has_a_table_of_its_own(simt, monkeypatch):
    import torch

    import trainfast
    from trainfast.torch.optim import clip

    def norm(stream):
        monkeypatch.setattr(clip, "current_stream", lambda device: stream)
        assert clip.get_total_norm(grads) == 8
        return simt.counts()["copies"]

    grads = [torch.full((16,), 2.0)]
    simt.library.tfast_simt_stream.restype = ctypes.c_void_p
    other = simt.library.tfast_simt_stream(0)
    trainfast.use_backend("simt")
    monkeypatch.setattr(clip, "_idle", {})
    simt.counts()
    copies = [norm(stream) for stream in (0, 0, other, 0, other)]
    trainfast.use_backend(None)
    assert copies == [1, 0, 1, 0, 0]


def test_step_on_another_stream_has_a_table_of_its_own(simt, rng):
    """Its upload is in that stream's order, and writes no table that another reads."""
    simt.library.tfast_simt_stream.restype = ctypes.c_void_p
    other = simt.library.tfast_simt_stream(0)
    step = Step(simt, [Tensors(rng, 300, ("float32",) * 3)])
    copies = []
    simt.counts()
    for stream in (None, None, other, None, other):
        step.args.stream = stream
        step()
        copies.append(simt.counts()["copies"])
    step.clear()
    assert copies == [1, 0, 1, 0, 0]


# ---- What the driver refuses ---------------------------------------------------------


def test_refused_launch_or_module_is_named():
    update = FIRST_CALLS["amp_update"].strip()
    code = f"""
load, launch = simt.tfast_simt_fail_loads, simt.tfast_simt_fail_launches
for fail, error in [(load, 209), (load, 222), (launch, 400)]:
    fail(error)
    print(fails(lambda: {update}))
    fail(0)
print(fails(lambda: {update}))
"""
    assert lines(code) == [
        "RuntimeError: cuModuleLoadData: no kernel image is available for execution on "
        "the device",
        "RuntimeError: cuModuleLoadData: this library has no code for the GPU, and the "
        "driver does not read its PTX; install driver 575 or newer, or build trainfast "
        "on this machine with TRAINFAST_CUDA=1",
        "RuntimeError: launch of amp_update: invalid resource handle",
        "None",
    ]


@pytest.mark.parametrize(
    "device, message",
    [
        ("70", "the GPU must be sm_75 or newer, got sm_70"),
        (
            "90",
            "this library has no code for the GPU, an sm_90, only for sm_80 and older; "
            "in trainfast's sources, TRAINFAST_CUDA_ARCHS=90 pip install . builds one "
            "that has",
        ),
    ],
)
def test_gpu_without_code_says_what_helps(device, message):
    code = f"print(fails(lambda: {FIRST_CALLS['amp_update'].strip()}))"
    said = lines(code, TRAINFAST_SIMT_DEVICE=device)
    assert said == ["NotImplementedError: " + message]


@pytest.mark.parametrize("device", ["75", "80", "86", "89"])
def test_gpu_takes_the_code_of_its_major_version(device):
    code = f"print(fails(lambda: {FIRST_CALLS['attention by tensor cores'].strip()}))"
    assert lines(code, TRAINFAST_SIMT_DEVICE=device) == ["None"]


def test_out_of_memory_is_in_torchs_words():
    code = """
steps = Steps(0)
simt.tfast_simt_fail_allocations(0)
print(fails(steps))
simt.tfast_simt_fail_allocations(-1)
print(fails(steps))
"""
    said, after = lines(code)
    assert said.startswith("RuntimeError: CUDA out of memory. cuMemAlloc: ")
    assert after == "None"


def test_forked_child_is_told_to_be_spawned():
    code = """
steps = Steps(0)
steps()
if os.fork() == 0:
    print(fails(steps), flush=True)
    del steps
    os._exit(0)
os.wait()
steps()
"""
    assert lines(code) == [
        "RuntimeError: cuCtxGetCurrent: CUDA cannot be used in a forked child of a "
        "process that has used it; start it by spawn"
    ]


def test_old_gpu_leaves_a_patched_script_to_torch():
    """As on a P100: nothing breaks, and stats() says why."""
    code = """
import warnings
import torch
warnings.simplefilter("ignore")
trainfast.use_backend("simt")
trainfast.patch()
q = torch.randn(2, 8, 256, 64, requires_grad=True)
optimizer = torch.optim.AdamW([q], max_grad_norm=1.0)
scaler = torch.amp.GradScaler("cpu")
for _ in range(2):
    out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    scaler.scale(out.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
print(trainfast.stats().calls)
for name in ("adamw", "attention"):
    reasons = trainfast.stats().fallbacks[name]
    print(name, all("sm_75 or newer, got sm_60" in reason for reason in reasons))
"""
    library = os.environ["TRAINFAST_SIMT_LIBRARY"]
    said = lines(code, TRAINFAST_SIMT_DEVICE="60", TRAINFAST_SIMT_LIBRARY=library)
    assert said == ["{}", "adamw True", "attention True"]
