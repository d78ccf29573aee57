"""Metrics of trajectories against a plain float64 reference, on every backend, and the
values of two benchmarks' own tests."""

import os
import subprocess
import sys

import numpy as np
import pytest

import trainfast
from tests.arrays import DTYPES, Framed
from tests.pairwise import parametrize_pairs
from trainfast import _core
from trainfast.metrics.trajectory import METRICS

STEPS = [1, 2, 15, 16, 17, 60, 255, 256, 257, 600]  # around rows and tiles
DEFINITIONS = ["seed", "av2", "nuscenes"]
BRIER = METRICS[5:]


def reference_agent(pred, target, mask, p, definition, threshold, strict, top_k):
    """The metrics of one agent; {} if it has no step, without those that it lacks."""
    steps = np.flatnonzero(mask)
    if not len(steps):
        return {}
    distances = np.sqrt(((pred - target) ** 2).sum(-1))[:, steps]
    final = None if strict and not mask[-1] else -1
    modes = np.arange(len(pred))
    most = 0
    if p is not None:
        modes = np.argsort(-p, kind="stable")
        most = modes[0]
        modes = np.sort(modes[: top_k or len(p)])
    ade = distances.mean(1)
    best = least_ade = modes[ade[modes].argmin()]
    found = {"ade": ade[most]}
    if final is not None:
        fde = distances[:, final]
        best = modes[fde[modes].argmin()]
        found["fde"] = fde[most]
        found["min_fde"] = fde[best]
        missed = fde[most] if definition == "seed" else fde[best]
        found["miss_rate"] = float(missed > threshold)
    if definition == "av2":
        least_ade = best
    if definition != "av2" or final is not None:
        found["min_ade"] = ade[least_ade]
    if definition == "nuscenes":
        found["miss_rate"] = float(distances[modes].max(1).min() >= threshold)
    if p is not None:
        for name, mode in (("min_ade", least_ade), ("min_fde", best)):
            if name in found:
                found[f"brier_{name}"] = found[name] + (1 - p[mode]) ** 2
    bad = np.isnan(distances[np.append(modes, most)]).any()
    bad |= p is not None and np.isnan(p).any()
    return dict.fromkeys(found, np.nan) if bad else found


def reference(pred, target, mask=None, p=None, definition="seed", threshold=2.0, **o):
    """[agents, metrics] in float64; NaN where an agent lacks a metric."""
    pred, target = np.asarray(pred, np.float64), np.asarray(target, np.float64)
    mask = np.ones(target.shape[:2], bool) if mask is None else np.asarray(mask)
    rows = np.full((len(pred), len(METRICS)), np.nan)
    for i, row in enumerate(rows):
        own = None if p is None else np.asarray(p[i], np.float64)
        options = definition, threshold, o.get("strict", False), o.get("top_k")
        found = reference_agent(pred[i], target[i], mask[i], own, *options)
        for m, name in enumerate(METRICS):
            row[m] = found.get(name, np.nan)
    return rows


def rows_of(result):
    width = np.full(len(result.ade), np.nan)
    columns = (getattr(result, name) for name in METRICS)
    return np.stack([width if c is None else c for c in columns], 1)


def problem(rng, agents=9, modes=6, steps=20, dim=2, dtype=np.float32, spread=1.0):
    """Inputs in which no two modes of an agent are nearly equally good."""
    shift = rng.permuted(np.tile(np.arange(modes), (agents, 1)), axis=1)[
        ..., None, None
    ]
    noise = rng.standard_normal((agents, modes, steps, dim)) * 0.1
    pred = ((shift * 0.7 + noise) * spread).astype(dtype)
    target = (rng.standard_normal((agents, steps, dim)) * 0.1).astype(dtype)
    p = rng.random((agents, modes))
    return pred, target, (p / p.sum(1, keepdims=True)).astype(np.float32)


# ---- Against the reference -----------------------------------------------------------


@parametrize_pairs(
    dtype=DTYPES,
    steps=STEPS,
    modes=[1, 2, 6],
    dim=[2, 3],
    definition=DEFINITIONS,
    masked=[False, True],
    strict=[False, True],
    top_k=[None, 1, 3],
)
def test_agrees_with_the_reference(
    backend, rng, dtype, steps, modes, dim, definition, masked, strict, top_k
):
    top_k = None if top_k is None else min(top_k, modes)
    pred, target, p = problem(rng, 9, modes, steps, dim, DTYPES[dtype])
    mask = rng.random((9, steps)) < 0.7 if masked else None
    if masked:
        mask[3] = False
    got = trainfast.trajectory_metrics(
        pred,
        target,
        mask=mask,
        probabilities=p,
        definition=definition,
        final="strict" if strict else "last",
        top_k=top_k,
        reduce="none",
    )
    want = reference(pred, target, mask, p, definition, strict=strict, top_k=top_k)
    bound = 1e-14 if dtype == "float64" else 2.4e-7
    np.testing.assert_allclose(rows_of(got), want, rtol=bound)
    assert got.agents == (9 if mask is None else mask.any(1).sum())


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_means_are_those_of_the_agents(backend, rng, definition):
    pred, target, p = problem(rng, 200, 3, 17)
    mask = rng.random((200, 17)) < 0.2
    options = {"mask": mask, "probabilities": p, "definition": definition}
    options["final"] = "strict"
    each = trainfast.trajectory_metrics(pred, target, reduce="none", **options)
    mean = trainfast.trajectory_metrics(pred, target, **options)
    assert each.agents == mean.agents == mask.any(1).sum()
    for name in METRICS:
        want = np.nanmean(getattr(each, name))
        assert getattr(mean, name) == pytest.approx(want, rel=1e-13)


def test_backends_and_thread_counts_give_the_same_bits(rng):
    code = """
import hashlib, numpy as np
from trainfast import _core
rng = np.random.default_rng(5)
found = set()
for name, why, _ in _core.backends():
    if why is None and name != "cuda":
        _core.use_backend(name)
        made, rng = [], np.random.default_rng(5)
        for dim in (2, 3):
            for steps in (7, 60, 300):
                pred = rng.standard_normal((301, 4, steps, dim), dtype=np.float32)
                target = rng.standard_normal((301, steps, dim), dtype=np.float32)
                mask = rng.random((301, steps)) < 0.6
                p = rng.random((301, 4))
                for kwargs in ({}, {"mask": mask, "definition": "nuscenes"}):
                    totals, agents = np.empty((2, 7)), np.empty((301, 7))
                    _core.trajectory(
                        pred, target, totals, agents, probabilities=p,
                        scratch=lambda n: np.empty(n, np.float32), **kwargs
                    )
                    made += [totals.tobytes(), agents.tobytes()]
        found.add(hashlib.sha256(b"".join(made)).hexdigest())
print(*found)
"""
    hashes = set()
    for threads in ("1", "2", "3", "7"):
        env = os.environ | {"OMP_NUM_THREADS": threads}
        command = [sys.executable, "-c", code]
        hashes.add(subprocess.check_output(command, env=env, text=True).strip())
    assert len(hashes) == 1 and len(hashes.pop().split()) == 1


# ---- Masks, NaN and hostile arrays ---------------------------------------------------


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_nan_in_masked_steps_does_not_leak(backend, rng, definition):
    pred, target, p = problem(rng, 9, 3, 40)
    mask = rng.random((9, 40)) < 0.5
    mask[:, 0] = True
    options = {"mask": mask, "probabilities": p, "definition": definition}
    want = trainfast.trajectory_metrics(pred, target, **options)
    pred[np.broadcast_to(~mask[:, None], pred.shape[:3])] = np.nan
    target[~mask] = np.inf
    got = trainfast.trajectory_metrics(pred, target, **options)
    assert [getattr(got, n) for n in METRICS] == [getattr(want, n) for n in METRICS]


def test_nan_that_counts_makes_its_agent_nan(backend, rng):
    pred, target, p = problem(rng, 4, 3, 40)
    pred[1, 2, 5, 0] = np.nan
    p[3, 0] = np.nan
    got = rows_of(
        trainfast.trajectory_metrics(pred, target, probabilities=p, reduce="none")
    )
    assert np.isnan(got[[1, 3]]).all() and np.isfinite(got[[0, 2]]).all()
    mean = trainfast.trajectory_metrics(pred, target, probabilities=p)
    assert np.isnan(mean.ade) and np.isnan(mean.miss_rate) and mean.agents == 4


def test_agents_without_steps_leave_the_mean(backend, rng):
    pred, target, p = problem(rng, 3, 2, 9)
    mask = np.ones((3, 9), bool)
    mask[1], p[1] = False, np.nan  # the softmax of a padding agent
    options = {"probabilities": p, "mask": mask}
    got = trainfast.trajectory_metrics(pred, target, **options)
    keep = [0, 2]
    want = trainfast.trajectory_metrics(pred[keep], target[keep], probabilities=p[keep])
    assert got.agents == 2 and got.ade == want.ade and got.min_fde == want.min_fde


def test_nothing_gives_nan_for_no_agents(backend):
    got = trainfast.trajectory_metrics(np.ones((0, 2, 3, 2)), np.ones((0, 3, 2)))
    assert got.agents == 0 and np.isnan(got.ade) and got.brier_min_ade is None
    got = trainfast.trajectory_metrics(
        np.ones((2, 3, 2)), np.ones((2, 3, 2)), mask=np.zeros((2, 3), bool)
    )
    assert got.agents == 0 and np.isnan(got.fde)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides_are_read(backend, rng, dtype):
    pred, target, p = problem(rng, 7, 3, 20, 2, DTYPES[dtype])
    mask = rng.random((7, 20)) < 0.8
    want = trainfast.trajectory_metrics(pred, target, mask=mask, probabilities=p)
    wide = np.zeros((20, 3, 7, 5), DTYPES[dtype])
    strange = wide[::-1].transpose(2, 1, 0, 3)[..., 1:3]
    strange[...] = pred
    far = np.asfortranarray(target)
    got = trainfast.trajectory_metrics(
        strange, far, mask=np.asfortranarray(mask), probabilities=np.asfortranarray(p)
    )
    assert got == want
    one = np.broadcast_to(pred[:1], pred.shape)
    got = trainfast.trajectory_metrics(one, target)
    assert got == trainfast.trajectory_metrics(one.copy(), target)


@pytest.mark.parametrize("steps", [3, 16, 20, 300])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_reads_nothing_that_counts_beyond_its_arrays(backend, rng, dtype, steps):
    """What lies behind the arrays, and in the next mode, is NaN."""
    pred, target, _ = problem(rng, 3, 2, steps, 2, DTYPES[dtype])
    framed = Framed(pred, dtype)
    framed.whole[: framed.start] = np.nan
    framed.whole[framed.start + framed.size :] = np.nan
    framed.array[0, 1], framed.array[1, 1] = np.nan, np.nan
    p = np.array([[1.0, 0], [1, 0], [0, 1]])
    got = trainfast.trajectory_metrics(
        framed.array, target, probabilities=p, top_k=1, reduce="none"
    )
    want = reference(pred, target, None, p, top_k=1)
    np.testing.assert_allclose(rows_of(got), want, rtol=2.4e-7)


def test_dtypes_may_differ_and_inputs_stay(backend, rng):
    pred, target, p = problem(rng, 5, 3, 20)
    half, wide = pred.astype(np.float16), target.astype(np.float64)
    before = half.tobytes(), wide.tobytes()
    got = trainfast.trajectory_metrics(
        half, wide, probabilities=p.astype(np.float16), reduce="none"
    )
    want = reference(half, wide, p=p.astype(np.float16))
    np.testing.assert_allclose(rows_of(got), want, rtol=1e-14)
    half.flags.writeable = False
    trainfast.trajectory_metrics(half, wide)
    assert (half.tobytes(), wide.tobytes()) == before


WRONG = [
    (
        {"pred": np.ones((2, 3, 4, 4)), "target": np.ones((2, 4, 4))},
        ValueError,
        "2 or 3 coordinates",
    ),
    ({"pred": np.ones((2, 0, 4, 2))}, ValueError, "at least one mode"),
    ({"pred": np.ones((2, 4))}, ValueError, r"\[agents, modes, steps, coordinates\]"),
    ({"target": np.ones((2, 3, 2))}, ValueError, "target must have shape"),
    ({"pred": np.ones((2, 3, 4, 2), int)}, NotImplementedError, "pred must be"),
    ({"pred": [1.0]}, TypeError, "pred must be an array"),
    ({"mask": np.ones((2, 3), bool)}, ValueError, "mask must have shape"),
    ({"mask": np.ones((2, 4))}, ValueError, "mask must be bool"),
    ({"probabilities": np.ones((2, 2))}, ValueError, "probabilities must have shape"),
    ({"probabilities": np.full((2, 3), 1.5)}, ValueError, r"in \[0, 1\], got 1.5"),
    ({"probabilities": np.full((2, 3), -1.0)}, ValueError, "apply softmax"),
    ({"definition": "nuScenes"}, ValueError, "definition must be"),
    ({"definition": None}, None, ""),
    ({"final": "first"}, ValueError, "final must be"),
    ({"reduce": "sum"}, ValueError, "reduce must be"),
    ({"top_k": 0}, ValueError, "top_k must be"),
    ({"top_k": 4}, ValueError, r"top_k must be 1 to 3"),
    ({"top_k": 2}, ValueError, "top_k needs probabilities"),
    ({"miss_threshold": -1.0}, ValueError, "miss_threshold must be >= 0"),
    ({"miss_threshold": float("nan")}, ValueError, "miss_threshold must be >= 0"),
]


@pytest.mark.parametrize("given, error, message", WRONG, ids=lambda x: str(x)[:30])
def test_wrong_arguments_are_refused(given, error, message):
    options = {"pred": np.ones((2, 3, 4, 2)), "target": np.ones((2, 4, 2))} | given
    pred, target = options.pop("pred"), options.pop("target")
    if error is None:
        trainfast.trajectory_metrics(pred, target, **options)
        return
    with pytest.raises(error, match=message):
        trainfast.trajectory_metrics(pred, target, **options)


def test_core_refuses_overlapping_and_wrong_results():
    pred, target = np.ones((2, 3, 4, 2)), np.ones((2, 4, 2))
    both = np.ones((4, 7))
    with pytest.raises(_core.PlacementError, match="agents must not overlap totals"):
        _core.trajectory(pred, target, both[:2], both[1:3])
    for totals in (np.ones((2, 6)), np.ones((2, 14))[:, ::2]):
        with pytest.raises(ValueError, match="totals must"):
            _core.trajectory(pred, target, totals)


# ---- The benchmarks' own values ------------------------------------------------------

# Numbers from av2-api's tests/datasets/motion_forecasting/eval/test_metrics.py
# (Argo AI, MIT licence): ten steps, the truth at the origin.
LINE = np.stack([np.arange(10.0), np.zeros(10)], 1)
AV2 = [
    (np.ones((10, 2)), 2**0.5, 2**0.5, 0),
    (LINE, 4.5, 9.0, 1),
    (LINE[:, :1].repeat(2, 1), 6.36396103, 9 * 2**0.5, 1),
]


@pytest.mark.parametrize("modes", [1, 6])
@pytest.mark.parametrize("path, ade, fde, miss", AV2, ids=["still", "line", "diagonal"])
def test_values_of_av2(backend, path, ade, fde, miss, modes):
    pred = np.broadcast_to(path, (1, modes, 10, 2))
    p = np.array([[1.0], [0.9, 0.02, 0.02, 0.02, 0.02, 0.02]][modes > 1])[None]
    got = trainfast.trajectory_metrics(
        pred, np.zeros((1, 10, 2)), probabilities=p, definition="av2"
    )
    brier = (1 - p[0, 0]) ** 2
    want = [ade, fde, ade, fde, miss, ade + brier, fde + brier]
    assert [getattr(got, n) for n in METRICS] == pytest.approx(want)


@pytest.mark.parametrize("over, miss", [(0.01, 0), (-0.01, 1)])
def test_miss_threshold_of_av2(backend, over, miss):
    got = trainfast.trajectory_metrics(
        LINE[None], np.zeros((1, 10, 2)), definition="av2", miss_threshold=9 + over
    )
    assert got.miss_rate == miss


# Numbers from nuscenes-devkit's eval/prediction/tests/test_metrics.py (Motional, Apache
# License 2.0): modes that stand at 0, 1 and 2, and five orders of their probabilities.
NUSCENES_P = np.array(
    [
        [0.2, 0.5, 0.3],
        [0.5, 0.3, 0.2],
        [0.2, 0.3, 0.5],
        [0.3, 0.2, 0.5],
        [0.3, 0.5, 0.2],
    ]
)
NUSCENES = {
    "min_ade": [
        [5.33529, 4.49286, 4.49286],
        [6.45396, 5.33529, 4.49286],
        [4.49286, 4.49286, 4.49286],
        [4.49286, 4.49286, 4.49286],
        [5.33529, 5.33529, 4.49286],
    ],
    "min_fde": [
        [10.63014, 9.21954, 9.21954],
        [12.04159, 10.63014, 9.21954],
        [9.21954, 9.21954, 9.21954],
        [9.21954, 9.21954, 9.21954],
        [10.63014, 10.63014, 9.21954],
    ],
    "miss_rate": [[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0], [1, 1, 0]],
}


@pytest.mark.parametrize("k", [1, 2, 3])
def test_values_of_nuscenes(backend, k):
    pred = np.broadcast_to(np.arange(3.0)[None, :, None, None], (5, 3, 5, 2))
    target = np.broadcast_to(np.arange(10.0).reshape(5, 2), (5, 5, 2))
    got = trainfast.trajectory_metrics(
        pred,
        target,
        probabilities=NUSCENES_P,
        definition="nuscenes",
        miss_threshold=10,
        top_k=k,
        reduce="none",
    )
    for name, values in NUSCENES.items():
        want = [row[k - 1] for row in values]
        assert getattr(got, name) == pytest.approx(want, rel=1e-5)


def test_largest_distance_at_the_threshold_is_a_miss_for_nuscenes_only(backend):
    pred, target = np.zeros((1, 4, 2), np.float32), np.zeros((1, 4, 2), np.float32)
    pred[0, :, 0] = 2
    rates = [
        trainfast.trajectory_metrics(pred, target, definition=name).miss_rate
        for name in DEFINITIONS
    ]
    assert rates == [0, 0, 1]


# ---- The result and the targets ------------------------------------------------------


def test_result_names_the_mode_and_prints(rng):
    pred, target, p = problem(rng)
    got = trainfast.trajectory_metrics(pred, target)
    assert "mode 0" in got.mode_note and got.brier_min_fde is None
    assert "minADE" in str(got) and "<table" in got._repr_html_()
    assert '"min_ade"' in got.to_json()
    each = trainfast.trajectory_metrics(pred, target, probabilities=p, reduce="none")
    assert "most probable" in each.mode_note and "brier-minFDE" in str(each)
    assert len(each.to_dict()["ade"]) == 9 and each.to_json()


def test_targets_are_met_or_not():
    target = np.zeros((1, 4, 2))
    for distance, met in ((0.05, True), (0.2, False), (np.nan, False)):
        pred = np.full((1, 4, 2), 0.0)
        pred[..., 0] = distance
        check = trainfast.targets("world_class").check(
            trainfast.trajectory_metrics(pred, target)
        )
        assert bool(check) is check.passed is met
        assert ("fail" in str(check)) is not met
    assert check.to_dict()["rows"][0]["below"] == 0.18
    with pytest.raises(ValueError, match="name must be one of"):
        trainfast.targets("best")
    each = trainfast.trajectory_metrics(target, target, reduce="none")
    with pytest.raises(ValueError, match="reduce='mean'"):
        trainfast.targets("competition").check(each)
