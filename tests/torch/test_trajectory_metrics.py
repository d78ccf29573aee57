"""Metrics of trajectories on torch's tensors, and as a torchmetrics.Metric."""

import numpy as np
import pytest
import torch

import trainfast
from trainfast.metrics.trajectory import METRICS


def problem(agents=20, modes=3, steps=12):
    torch.manual_seed(0)
    pred = torch.randn(agents, modes, steps, 2)
    target = torch.randn(agents, steps, 2)
    mask = torch.rand(agents, steps) < 0.7
    return pred, target, mask, torch.rand(agents, modes).softmax(1)


def options(mask, p):
    return {"mask": mask, "probabilities": p}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_tensors_give_what_arrays_give(dtype):
    pred, target, mask, p = problem()
    pred, target = (x.to(getattr(torch, dtype)) for x in (pred, target))
    got = trainfast.trajectory_metrics(pred, target, **options(mask, p))
    wide = [x.double().numpy() for x in (pred, target)]
    want = trainfast.trajectory_metrics(*wide, **options(mask.numpy(), p.numpy()))
    for name in METRICS:
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=1e-6)


def test_metrics_of_each_agent_are_tensors_without_gradients():
    pred, target, mask, p = problem()
    pred.requires_grad_()
    p = p.clone().requires_grad_()
    got = trainfast.trajectory_metrics(
        pred, target, **options(mask, p), reduce="none", definition="av2"
    )
    assert got.brier_min_ade.dtype == torch.float64 and got.ade.shape == (20,)
    assert not got.ade.requires_grad
    mean = trainfast.trajectory_metrics(
        pred, target, **options(mask, p), definition="av2"
    )
    assert got.ade.nanmean().item() == pytest.approx(mean.ade, rel=1e-13)


def test_tensors_on_another_device_are_refused():
    pred = torch.ones(1, 2, 2)
    with pytest.raises((NotImplementedError, BufferError, ValueError)):
        trainfast.trajectory_metrics(pred.to("meta"), pred)


# ---- torchmetrics --------------------------------------------------------------------


@pytest.fixture
def metric_class():
    pytest.importorskip("torchmetrics")
    return trainfast.TrajectoryMetrics


@pytest.mark.parametrize("definition", ["seed", "av2", "nuscenes"])
def test_batches_give_the_mean_over_all_agents(metric_class, definition):
    pred, target, mask, p = problem()
    metric = metric_class(definition, 1.0, "strict", 2)
    for part in (slice(0, 3), slice(3, 4), slice(4, 20)):
        metric.update(pred[part], target[part], mask[part], p[part])
    want = trainfast.trajectory_metrics(
        pred,
        target,
        **options(mask, p),
        definition=definition,
        miss_threshold=1.0,
        final="strict",
        top_k=2,
    )
    found = metric.compute()
    assert list(found) == list(METRICS)
    for name in METRICS:
        assert found[name].item() == pytest.approx(getattr(want, name), rel=1e-13)
    report = metric.report()
    assert report.agents == want.agents and report.mode_note == want.mode_note
    assert report.ade == pytest.approx(want.ade, rel=1e-13)


def test_processes_add_sums_and_counts(metric_class):
    """What torchmetrics does with states whose dist_reduce_fx is "sum"."""
    pred, target, mask, p = problem()
    whole, *ranks = (metric_class() for _ in range(3))
    whole.update(pred, target, mask, p)
    ranks[0].update(pred[:7], target[:7], mask[:7], p[:7])
    ranks[1].update(pred[7:], target[7:], mask[7:], p[7:])
    for state, reduce in ranks[0]._reductions.items():
        both = torch.stack([getattr(rank, state) for rank in ranks])
        setattr(ranks[0], state, reduce(both))
    for name, value in ranks[0].compute().items():
        assert value.item() == pytest.approx(whole.compute()[name].item(), rel=1e-13)
    assert all(value.dtype == torch.float64 for value in whole.compute().values())


def test_metric_resets_and_leaves_out_brier_without_probabilities(metric_class):
    pred, target, mask, _ = problem()
    metric = metric_class()
    value = metric(pred, target, mask)
    assert "brier_min_ade" not in value and metric.report().brier_min_ade is None
    metric.reset()
    assert np.isnan(metric.report().ade) and metric.report().agents == 0
    metric.half()  # must not narrow the sums
    assert metric.sums.dtype == torch.float64
