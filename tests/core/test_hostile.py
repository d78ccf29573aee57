"""Callers that do what nobody should: objects whose export changes the call's lists,
calls back into what is running, arguments of a wild kind."""

import copy
import gc
import os
import pickle
import sys

import numpy as np
import pytest

import trainfast
from trainfast import _core
from trainfast import graph_cache as gc_

pytestmark = pytest.mark.usefixtures("stopped_clock")


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


# ---- Arguments that are not there ---------------------------------------------------


def test_missing_arrays_are_type_errors():
    a, q = np.ones((2, 2), np.float32), np.ones((1, 2, 4, 8), np.float32)
    for call in (
        _core.gemm,
        lambda: _core.gemm(a, a),
        _core.trajectory,
        lambda: _core.trajectory(a, a),
    ):
        with pytest.raises(TypeError, match="requires the argument"):
            call()
    with pytest.raises(TypeError, match="out must be an array, got None"):
        _core.attention(q, q, q, None, None, scale=1.0)


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
    _core.amp_update(scale, tracker, flags, **options)
    assert scale[0] == 0.5


def test_a_step_inside_a_step_with_the_same_workspace_is_refused():
    def again():
        with pytest.raises(RuntimeError, match="workspace must not be used by two"):
            step([ones()])

    def step(grads):
        columns = [ones()], grads, [ones()], [ones()]
        trainfast.numpy.adamw_step(*columns, step=1, lr=0.1, workspace=workspace)

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
    module = sys.modules["trainfast.numpy.attention"]
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
    out, lse = trainfast.numpy.attention(q, q, q, return_lse=True, **options)
    got = trainfast.numpy.attention_backward(
        out, q, q, q, out, lse, wanted=list(options), **options
    )
    for name, gradient in zip(got._fields[3:], got[3:], strict=True):
        assert not gradient.any(), name


# ---- Writers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"commit_every": float("nan")},
        {"commit_every": "1"},
        {"samples": None},
        {"schema": 5},
        {"rules": {"x": 5}},
    ],
)
def test_options_of_a_writer_are_named(tmp_path, options):
    with pytest.raises((ValueError, TypeError), match=f"{next(iter(options))}.* must"):
        gc_.Writer(tmp_path / "cache", **options)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("method", ["close", "abandon", "commit"])
def test_a_writer_that_is_ended_by_what_it_appends_goes_on(tmp_path, method):
    writer = gc_.Writer(tmp_path / "cache", samples=1, durable=False)
    writer.append(graph(1))
    end = Exports(np.zeros((3, 2), np.float32), getattr(writer, method))
    with pytest.raises(NotImplementedError, match="two threads at once"):
        writer.append(graph(2) | {"x": end})
    writer.append(graph(3))
    writer.close()
    assert [g["y"] for g in gc_.open(tmp_path / "cache")] == [1, 3]


@pytest.mark.parametrize(("samples", "lost"), [(9, 5), (1, 3)])
def test_a_writer_that_is_dropped_says_how_many_graphs_are_lost(
    tmp_path, samples, lost
):
    """Waiting for their schema, or not committed."""
    path = tmp_path / "cache"
    writer = gc_.Writer(path, samples=samples, durable=False)
    for i in range(5):
        writer.append(graph(i))
        if samples == 1 and i == 1:
            writer.commit()
    message = rf"without close\(\): {lost} of 5 graphs were lost; use `with Writer\("
    with pytest.warns(ResourceWarning, match=message):
        del writer
        gc.collect()


@pytest.mark.parametrize("method", ["close", "abandon", "__exit__"])
def test_a_writer_that_has_ended_is_dropped_without_a_word(tmp_path, recwarn, method):
    writer = gc_.Writer(tmp_path / "cache", samples=9, durable=False)
    writer.append(graph())
    getattr(writer, method)(*[OSError, None, None][: 3 * (method == "__exit__")])
    del writer
    gc.collect()
    assert [w for w in recwarn if w.category is ResourceWarning] == []


def test_a_writer_that_was_never_made_is_dropped_without_a_word(
    tmp_path, recwarn, cache
):
    path = tmp_path / "cache"
    path.write_text("not one")
    with pytest.raises(NotADirectoryError):
        gc_.Writer(path, cache.schema)
    gc.collect()
    assert [w for w in recwarn if w.category is ResourceWarning] == []


@pytest.mark.parametrize("samples", [1, 9])
def test_writers_are_neither_copied_nor_pickled(tmp_path, samples):
    with gc_.Writer(tmp_path / "cache", samples=samples) as writer:
        writer.append(graph())
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="a writer cannot be pickled or copied"):
                copied(writer)


@pytest.mark.forks
def test_graphs_that_wait_for_a_schema_are_not_written_by_a_forked_child(tmp_path):
    writer = gc_.Writer(tmp_path / "cache", samples=9)
    writer.append(graph())
    child = os.fork()
    if child == 0:
        try:
            writer.close()
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    writer.close()
    assert len(gc_.open(tmp_path / "cache")) == 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"num_nodes": 1.5}, "number of nodes must be an integer >= 0, got 1.5"),
        ({"num_nodes": -5}, "number of nodes must be an integer >= 0, got -5"),
        ({"wide": np.zeros((0, 2**31), np.float32)}, "'wide' must have dims < 2"),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name(tmp_path, value, message):
    writer = gc_.Writer(tmp_path / "cache", samples=1)
    with pytest.raises(ValueError, match=message):
        writer.append({"edge_index": np.zeros((2, 1), np.int64), **value})


def test_an_integer_beyond_float64_is_refused_and_the_writer_goes_on(tmp_path):
    with gc_.Writer(tmp_path / "cache", samples=1) as writer:
        writer.append({"y": 1.0})
        with pytest.raises(ValueError, match=r"graph 1: graph\['y'\] must fit float64"):
            writer.append({"y": 2**2000})
        writer.append({"y": 2})
    assert [g["y"] for g in gc_.open(tmp_path / "cache")] == [1.0, 2.0]


# ---- Optimizers and scalers ----------------------------------------------------------


def test_numbers_of_numpy_are_steps(backend, device):
    if device == "cuda":
        pytest.skip("arrays of NumPy's")
    columns = [[ones()] for _ in range(4)], [[ones()] for _ in range(4)]
    for each, step in zip(columns, (3, np.int64(3)), strict=True):
        trainfast.numpy.adamw_step(*each, step=step, lr=0.1)
    assert (columns[0][0][0] == columns[1][0][0]).all()


@pytest.mark.parametrize("option", ["zero_grad", "write_back_grads"])
def test_gradients_that_repeat_elements_are_not_written(backend, device, option):
    torch = pytest.importorskip("torch")
    from trainfast.torch import AdamW

    param = torch.nn.Parameter(torch.ones(3, 4, device=device))
    param.grad = torch.ones(1, 1, device=device).expand(3, 4)
    optimizer = AdamW([param], **{option: True})
    with pytest.raises(ValueError, match=r"grads\[0\] must not repeat elements"):
        optimizer.step()
    assert (param == 1).all()


@pytest.mark.parametrize("name", ["growth_interval", "hysteresis"])
@pytest.mark.parametrize("value", [2**31, 2**70, 1.5, "x"])
def test_integers_of_a_scaler_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} must be an int < 2"):
        trainfast.numpy.LossScaler(**{name: value})


@pytest.mark.parametrize("name", [5, b"avx2", "scalar\0x", "\udcff"])
def test_a_backend_that_has_no_name_is_refused(name):
    before = _core.backend_in_use()
    with pytest.raises(TypeError, match="name must be a backend's or None, got"):
        trainfast.use_backend(name)
    assert _core.backend_in_use() == before


def test_a_default_device_does_not_take_the_counters_of_steps():
    torch = pytest.importorskip("torch")
    from trainfast.torch import AdamW

    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = AdamW([param])
    with torch.device("meta"):
        optimizer.step()
    assert optimizer.state[param]["step"].item() == 1


@pytest.mark.parametrize("step", ["x", None, [1.0, 2.0]])
def test_a_counter_that_is_no_number_is_not_loaded(step):
    torch = pytest.importorskip("torch")
    from trainfast.torch import AdamW

    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = AdamW([param])
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = torch.tensor(step) if isinstance(step, list) else step
    saved["state"][0]["exp_avg"] += 1
    saved["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ValueError, match="step of parameter 0 must be a number"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert optimizer.state[param]["exp_avg"].max() < 1


@pytest.mark.parametrize("name", ["mask", "bias", "alibi_slopes", "sinks"])
def test_a_gradient_that_nothing_records_is_refused(name):
    torch = pytest.importorskip("torch")
    q = torch.ones(1, 2, 3, 8)
    shape = (3, 3) if name in ("mask", "bias") else (2,)
    given = {name: torch.ones(shape, requires_grad=True)}
    with pytest.raises(ValueError, match=f"{name} must not require a gradient"):
        trainfast.numpy.attention(q, q, q, **given)
    with torch.no_grad():
        trainfast.numpy.attention(q, q, q, **given)


@pytest.mark.parametrize("path", [5, None, "", b"", "a\0b", ["x"]])
def test_a_path_that_is_none_is_named(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    for use in (gc_.open, gc_.Writer, lambda path: gc_.build(path, [graph()])):
        with pytest.raises((ValueError, TypeError), match="path must "):
            use(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["cache", "caché", "c\udcff"])
def test_a_path_may_be_of_bytes(tmp_path, name):
    path = os.fsencode(tmp_path / name)
    write(path, 3)
    gc_.build(path + b"2", [graph()], progress=False)
    assert [len(gc_.open(path)), len(gc_.open(path + b"2"))] == [3, 1]


@pytest.mark.parametrize("other", ["k", "v", "mask", "kv_lens"])
def test_a_tensor_without_data_beside_others_is_refused(other):
    """Torch's operations take it, and give what was in memory."""
    torch = pytest.importorskip("torch")
    from trainfast.torch import attention

    q = torch.ones(1, 2, 3, 8)
    given = {"k": q, "v": q, "mask": q[:, :, :, :3], "kv_lens": torch.tensor([3])}
    given[other] = given[other].to("meta")
    with pytest.raises(ValueError, match="must be on"):
        attention(q, **given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 1.5),
        ("seed", 2**63),
        ("window_size", (1.5, None)),
        ("window_size", (-1, 2)),
    ],
)
def test_integers_of_attention_are_named(name, value):
    torch = pytest.importorskip("torch")
    from trainfast.torch import attention

    q = torch.ones(1, 2, 3, 8)
    with pytest.raises(ValueError, match=f"{name} must "):
        attention(q, q, q, dropout_p=0.5, **{"seed": 1, name: value})


def test_windows_beyond_any_integer_are_none():
    torch = pytest.importorskip("torch")
    from trainfast.torch import attention

    q = torch.randn(1, 2, 3, 8)
    assert torch.equal(
        attention(q, q, q, window_size=(2**70, 2**63)), attention(q, q, q)
    )
