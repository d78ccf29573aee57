"""Metrics of trajectories where they are on a GPU: on a fake one (fake_device.py),
which the SIMT runner serves, and on a real one where there is one."""

import os

import numpy as np
import pytest

import trainfast
from tests.fake_device import TENSORS, run
from trainfast.metrics.trajectory import METRICS

on_fake = pytest.mark.skipif(
    not os.environ.get("TRAINFAST_SIMT_LIBRARY"), reason="no SIMT library"
)

CALLS = (
    TENSORS
    + """
import trainfast
from trainfast.metrics.trajectory import METRICS

rng = np.random.default_rng(0)
pred = rng.standard_normal((70, 3, 20, 2)).astype("f")
target = rng.standard_normal((70, 20, 2)).astype("f")
mask, p = rng.random((70, 20)) < 0.7, rng.random((70, 3)).astype("f")
given = {"mask": mask, "probabilities": p}
simt = ctypes.CDLL(os.environ["TRAINFAST_CUDA_LIBRARY"])

def on_gpu(**more):
    kept = {name: Tensor(array) for name, array in given.items()}
    return trainfast.trajectory_metrics(Tensor(pred), Tensor(target), **kept, **more)
"""
)


def good(code):
    done = run(CALLS + code)
    assert done.code == 0, done.err
    return done.out.split()


@on_fake
@pytest.mark.parametrize("definition", ["seed", "av2", "nuscenes"])
def test_tensors_on_a_gpu_have_the_bits_of_the_cpu(definition):
    good(
        f"""
options = dict(definition={definition!r}, final="strict", top_k=2)
mine = on_gpu(**options)
assert mine == trainfast.trajectory_metrics(pred, target, **given, **options)
mine = on_gpu(reduce="none", **options)
want = trainfast.trajectory_metrics(pred, target, **given, reduce="none", **options)
for name in METRICS:
    assert isinstance(getattr(mine, name), Tensor)
    np.testing.assert_array_equal(getattr(mine, name).array, getattr(want, name))
assert not trainfast.stats().fallbacks
"""
    )


@on_fake
def test_metric_waits_for_nothing():
    """Its sums stay on the GPU: two launches, and no wait but torch's of `cpu()`."""
    out = good(
        """
from trainfast.metrics import trajectory
made = trajectory.measure(Tensor(pred), Tensor(target))
simt.tfast_simt_reset()
totals, agents = trajectory.measure(Tensor(pred), Tensor(target))
three = (ctypes.c_int64 * 3)()
simt.tfast_simt_counts(three)
assert isinstance(totals, Tensor) and agents is None
print(*three)
"""
    )
    assert out == ["0", "0", "2"]


@on_fake
def test_may_be_captured():
    good(
        """
from trainfast import _core
totals = Tensor(np.full((2, 7), 9.0))
scratch = Tensor(np.empty(1000, np.float32))

def call():
    _core.trajectory(Tensor(pred), Tensor(target), totals,
                     scratch=lambda n: Tensor(scratch.array[:n]))

call()
want = totals.array.copy()
totals.array[:] = 9
simt.tfast_simt_capture_begin()
call()
simt.tfast_simt_capture_end()
assert (totals.array == 9).all()
simt.tfast_simt_replay()
assert totals.array.tobytes() == want.tobytes()
"""
    )


@on_fake
def test_probability_that_is_none_makes_its_agent_nan():
    good(
        """
p[5, 1], p[9, 0] = 1.5, -0.5
each = on_gpu(reduce="none")
bad = np.isnan(each.min_ade.array)
assert np.flatnonzero(bad).tolist() == [5, 9]
assert np.isnan(on_gpu().ade)
"""
    )


@on_fake
def test_what_a_gpu_leaves_is_measured_on_the_cpu_and_counted():
    good(
        """
os.environ["TRAINFAST_SIMT_DEVICE"] = "60"
assert on_gpu() == trainfast.trajectory_metrics(pred, target, **given)
(counted,) = trainfast.stats().fallbacks["trajectory"]
assert "sm_75 or newer, got sm_60" in counted, counted
"""
    )


@on_fake
def test_tensors_go_where_pred_is():
    good(
        """
want = on_gpu()
target, p = torch.from_numpy(target), torch.from_numpy(p)
Tensor.to = lambda self, device: self
mine = trainfast.trajectory_metrics(
    Tensor(pred), target, mask=Tensor(mask), probabilities=p)
assert mine == want
"""
    )


@on_fake
def test_numpy_beside_a_gpu_is_an_error():
    code = "trainfast.trajectory_metrics(Tensor(pred), target)"
    done = run(CALLS + code)
    assert done.code == 1 and "target must be on cuda:0" in done.err, done.err


def test_real_gpu_has_the_bits_of_the_cpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    trainfast.reset_stats()
    rng = np.random.default_rng(1)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        pred = torch.from_numpy(rng.standard_normal((1000, 6, 60, 2))).to(dtype)
        target = torch.from_numpy(rng.standard_normal((1000, 60, 2))).to(dtype)
        mask = torch.from_numpy(rng.random((1000, 60)) < 0.8)
        mine = trainfast.trajectory_metrics(
            pred.cuda(), target.cuda(), mask=mask.cuda(), definition="av2"
        )
        want = trainfast.trajectory_metrics(pred, target, mask=mask, definition="av2")
        assert all(getattr(mine, name) == getattr(want, name) for name in METRICS)
    assert not trainfast.stats().fallbacks
