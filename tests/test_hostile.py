"""Callers that do what nobody should: objects whose export changes the call's lists,
calls back into what is running, arguments of a wild kind."""

import gc
import sys

import numpy as np
import pytest

import trainfast
from trainfast import _core
from trainfast import graph_cache as gc_


def ones(n=4, dtype=np.float32):
    return np.ones(n, dtype)


class Exports:
    """An array that runs `action` when it is borrowed."""

    def __init__(self, array, action):
        self.array, self.action = array, action

    def __dlpack__(self, **options):
        self.action()
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


# ---- Lists that change while they are read -----------------------------------------


def test_gradients_that_are_dropped_during_the_pass_live_until_its_end():
    def drop():
        grads.clear()
        gc.collect()

    norm = ones(1)
    grads = [Exports(ones(5000), drop), ones(), ones()]
    _core.amp_grads(grads, _core.Workspace(), total_norm=norm)
    assert norm[0] == pytest.approx(5008**0.5)


def test_flags_that_are_dropped_during_the_update_live_until_its_end():
    def drop():
        flags.clear()
        gc.collect()

    scale, tracker = ones(1), np.zeros(1, np.int32)
    flags = [Exports(np.zeros(1, np.float32), drop), ones(1)]
    options = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9}
    _core.amp_update(scale, tracker.view(np.float32), flags, **options)
    assert scale[0] == 0.5


def test_a_step_inside_a_step_with_the_same_workspace_is_refused():
    def again():
        with pytest.raises(RuntimeError, match="workspace must not be used by two"):
            step([ones()])

    def step(grads):
        columns = [ones()], grads, [ones()], [ones()]
        trainfast.adamw_step(*columns, step=1, lr=0.1, workspace=workspace)

    workspace = _core.Workspace()
    step([Exports(ones(), again)])


# ---- The graph cache -----------------------------------------------------------------


def graph(i=0):
    return {
        "x": np.full((3, 2), i, np.float32),
        "edge_index": np.array([[0, 1], [1, 2]]),
        "y": i,
    }


def write(path, n=10):
    with gc_.Writer(path, durable=False, samples=2) as writer:
        for i in range(n):
            writer.append(graph(i))
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return gc_.open(write(tmp_path_factory.mktemp("hostile") / "cache"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("epoch", -1), ("epoch", "x"), ("position", -1), ("position", 2**70)],
)
def test_a_state_that_does_not_fit_leaves_the_loader_where_it_is(cache, name, value):
    loader = gc_.Loader(cache, 3)
    iteration = iter(loader)
    next(iteration)
    before = loader.state_dict()
    with pytest.raises(ValueError, match=f"{name} must be"):
        loader.load_state_dict({**before, name: value})
    assert loader.state_dict() == before
    assert len(list(iteration)) == 3


def test_a_batch_that_is_none_is_an_error_and_not_the_end(cache):
    iteration = iter(gc_.Loader(cache, batch_sampler=[[0], None, [1]]))
    assert next(iteration)["y"].tolist() == [0]
    with pytest.raises(TypeError, match="must be integers, got None"):
        next(iteration)


@pytest.mark.parametrize(
    ("name", "value"),
    [("threads", 65), ("threads", 2**62), ("batch_size", np.array([3])), ("seed", 1.5)],
)
def test_numbers_of_a_loader_are_named(cache, name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        gc_.Loader(cache, **{name: value})


def test_an_iteration_is_not_entered_twice(cache):
    def output(plan):
        def assemble(batch):
            with pytest.raises(RuntimeError, match="an iteration must not be used by"):
                next(iteration)
            return batch.n_graphs

        return assemble

    iteration = iter(gc_.Loader(cache, 4, output=output))
    assert list(iteration) == [4, 4, 2]


# ---- Attention -----------------------------------------------------------------------


@pytest.mark.parametrize("per_item", [False, True])
def test_gradients_of_no_items_are_zeros(monkeypatch, backend, device, per_item):
    if device == "cuda":
        pytest.skip("arrays of NumPy's")
    module = sys.modules["trainfast.attention"]
    make = module.empty
    monkeypatch.setattr(
        module, "empty", lambda *args, **options: make(*args, **{"fill": 7} | options)
    )
    q = np.ones((0, 2, 3, 8), np.float32)
    options = {
        "bias": np.ones((1, 2, 1, 3), np.float32),
        "sinks": ones(2),
        "alibi_slopes": np.ones((0, 2) if per_item else 2, np.float32),
    }
    out, lse = trainfast.attention(q, q, q, return_lse=True, **options)
    got = trainfast.attention_backward(
        out, q, q, q, out, lse, wanted=list(options), **options
    )
    for name, gradient in zip(got._fields[3:], got[3:], strict=True):
        assert not gradient.any(), name
