"""The host side of cuda/ as a driver sees it, on the SIMT library: which device and
streams a call uses and leaves, what it does while a stream captures, and what it says
where CUDA refuses."""

import os

import pytest
from fake_device import run

pytestmark = pytest.mark.skipif(
    not os.environ.get("TRAINFAST_SIMT_LIBRARY"), reason="no SIMT library"
)

STEPS = """
import trainfast
from trainfast import _core

simt = ctypes.CDLL(os.environ["TRAINFAST_CUDA_LIBRARY"])
simt.tfast_simt_stream.restype = ctypes.c_void_p
one = np.ones(1, np.float32)

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
    right, wrong = "None", "RuntimeError: cudaMemcpyAsync("
    said = lines(code)
    assert said[::2] == [right] * 2
    assert all(
        s.startswith(wrong) and s.endswith("invalid resource handle")
        for s in said[1::2]
    )


# ---- Captures ------------------------------------------------------------------------

FIRST_CALLS = {
    "adamw": "Steps(0)()",
    "amp_grads": """
_core.amp_grads([OnDevice(np.ones(9))], keep[0], total_norm_f64=OnDevice(np.ones(1)))
""",
    "amp_update": """
_core.amp_update(OnDevice(one), OnDevice(one), [OnDevice(one)], growth_factor=2.0,
                 backoff_factor=0.5, growth_interval=9)
""",
    "attention": """
trainfast.attention(*[OnDevice(np.ones((1, 1, 3, 8), "f")) for _ in range(3)])
""",
    "attention by tensor cores": """
trainfast.attention(*[OnDevice(np.ones((1, 1, 64, 64), "e")) for _ in range(3)])
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
