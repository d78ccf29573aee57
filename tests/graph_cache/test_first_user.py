"""What a first user got wrong, or what got a first user: one test each."""

import inspect

import numpy as np
import pytest

from tests.graph_samples import graph, read, run_python
from trainfast import _core
from trainfast import graph_cache as gc

pytestmark = pytest.mark.usefixtures("stopped_clock")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def cache(path):
    gc.build(path, [graph(n) for n in range(1, 24)], progress=False)
    return gc.open(path)


# ---- Several writers ---------------------------------------------------------------


def weighted(n):
    return {**graph(n), "weight": np.ones(n, np.float32)}


@pytest.mark.parametrize(
    "first, second",
    [
        ([weighted(5)] * 8, [weighted(n) for n in (5, 6, 7)]),  # weight: fixed or not
        ([weighted(3)] * 3, [graph(4)] * 3),  # a key that only one of them has seen
        ([weighted(3), graph(3)] * 3, [graph(4)] * 3),
    ],
)
def test_writers_at_once_that_infer_different_schemas_agree(path, first, second):
    one, other = gc.Writer(path), gc.Writer(path)
    for wanted in first:
        one.append(wanted)
    for wanted in second:
        other.append(wanted)
    one.close()
    other.close()
    found = read(path)
    assert len(found) == len(first) + len(second)
    assert sorted(len(have["x"]) for have in found) == sorted(
        len(wanted["x"]) for wanted in [*first, *second]
    )
    assert sum("weight" in have for have in found) == sum(
        "weight" in wanted for wanted in [*first, *second]
    )


def test_writer_whose_graphs_cannot_be_in_the_cache_leaves_it_as_it_is(path):
    one, other = gc.Writer(path), gc.Writer(path)
    one.append({"x": np.ones(3, np.float32)})
    other.append({"x": np.ones(3, np.float64)})
    one.close()
    with pytest.raises(ValueError, match="graph 0: x must have dtype float32"):
        other.close()
    assert len(gc.open(path)) == 1
    with gc.Writer(path) as writer:
        writer.append({"x": np.ones(5, np.float32)})
    assert len(gc.open(path)) == 2


def test_schema_that_disagrees_is_refused_before_anything_is_written(path):
    gc.build(path, [graph(3)], progress=False)
    schema = gc.open(path).schema
    other = gc.Schema(schema.counts, schema.fields[1:])
    before = sorted(file.name for file in path.iterdir())
    with pytest.raises(ValueError, match="schema must agree in all but sizes"):
        gc.Writer(path, other)
    assert sorted(file.name for file in path.iterdir()) == before


def test_schema_of_a_living_writer_counts(path):
    with gc.Writer(path, samples=1) as writer:
        writer.append({"x": np.ones(3, np.float32)})
        with gc.Writer(path) as other, pytest.raises(ValueError, match="float32"):
            other.append({"x": np.ones(3, np.float64)})
            other.commit()
    assert len(gc.open(path)) == 1


# ---- Values ------------------------------------------------------------------------


@pytest.mark.parametrize("place", [3, 13])  # before and after there is a schema
@pytest.mark.parametrize(
    "good, bad, message",
    [(1, 2**70, "must fit int64"), ("a", "\ud800", "that UTF-8 can encode")],
)
def test_value_that_cannot_be_stored_names_its_own_input(
    path, place, good, bad, message
):
    inputs = [{"y": bad if i == place else good} for i in range(20)]
    with pytest.raises(ValueError, match=f"^input {place}: .*'y'.*{message}"):
        gc.build(path, inputs, progress=False)


@pytest.mark.parametrize("dtype", [np.float32, np.bool_])
def test_edge_index_without_integers_is_refused(path, dtype):
    wrong = {**graph(3), "edge_index": np.ones((2, 4), dtype)}
    with pytest.raises(TypeError, match="'edge_index' must have integers"):
        gc.build(path, [wrong], progress=False)


@pytest.mark.parametrize("key", ["a" * 16, b"short"])
def test_key_of_another_size_is_refused_at_once(path, key):
    with gc.Writer(path) as writer, pytest.raises(ValueError, match="16 bytes"):
        writer.append(graph(3), key=key)


def test_make_that_is_no_function_is_refused(path):
    with pytest.raises(TypeError, match="make must be callable, got int"):
        gc.build(path, range(3), 3, progress=False)
    assert not path.exists()


def test_rebuild_with_tqdm_disabled_shows_nothing(path, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")  # which tqdm reads when it is imported
    code = f"""
        from tests.graph_samples import graph
        from trainfast.graph_cache import build
        build({str(path)!r}, range(3), graph)
        assert build({str(path)!r}, range(4), graph).reused == 3
    """
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")


# ---- Loading -----------------------------------------------------------------------


def test_prefetch_beyond_all_batches_ends(cache):
    assert len(list(gc.Loader(cache, 4, prefetch=10**12))) == 6


@pytest.mark.parametrize("name", ["batch_size", "max_nodes", "prefetch"])
def test_number_beyond_int64_is_refused(cache, name):
    with pytest.raises(ValueError, match=f"{name} must be below"):
        gc.Loader(cache, **{name: 2**63})


@pytest.mark.parametrize(
    "options", [{"sampler": [1.5]}, {"batch_sampler": [[1.5]]}, {"sampler": ["1"]}]
)
def test_sampler_without_integers_is_error(cache, options):
    with pytest.raises(TypeError, match="integer"):
        size = None if "batch_sampler" in options else 1
        list(gc.Loader(cache, size, **options))
    with pytest.raises(IndexError, match="integers"):
        cache.get_many([1.5])


@pytest.mark.parametrize("index", [5, -1])
def test_sampler_beyond_a_subset_is_error_with_budgets_too(cache, index):
    loader = gc.Loader(cache[:5], sampler=[0, index], max_nodes=100)
    with pytest.raises(IndexError, match=rf"must be in 0 \.\. 4, got {index}"):
        list(loader)


def test_state_of_something_else_is_refused(cache, tmp_path):
    loader = gc.Loader(cache, 4)
    with pytest.raises(ValueError, match="state must be of a Loader, got one without"):
        loader.load_state_dict({})
    gc.build(tmp_path / "other", [graph(3)] * 23, progress=False)
    state = gc.Loader(gc.open(tmp_path / "other"), 4).state_dict()
    with pytest.raises(ValueError, match="another cache, or it has changed since"):
        loader.load_state_dict(state)


# ---- Repair ------------------------------------------------------------------------


def test_repair_of_a_cut_segment_keeps_what_lies_before_the_cut(path, tmp_path):
    """Also what lies behind the last commit frame that is left: it was closed once."""
    wanted = [graph(n) for n in range(1, 200)]
    gc.build(path, wanted, progress=False)
    (segment,) = path.glob("segment-*")
    with segment.open("r+b") as file:
        file.truncate(segment.stat().st_size // 2)
    with pytest.raises(OSError, match=r"must be sealed.*cache repair` keeps"):
        gc.open(path)
    report = _core.graph_repair(
        str(path), str(tmp_path / "repaired"), lambda line: None
    )
    found = read(tmp_path / "repaired")
    assert report["kept"] == len(found) > 90
    assert report["damaged"] == 199 - len(found)
    assert report["uncommitted"] == 0
    for have, truth in zip(found, wanted):
        assert all(np.array_equal(have[key], truth[key]) for key in truth)


def test_completion_shows_what_users_call_and_no_more(path):
    gc.build(path, [graph(3)], progress=False)
    cache = gc.open(path)
    shown = {name for name in dir(cache) if not name.startswith("_")}
    methods = {"close", "closed", "counts", "get_many", "sizes", "verify"}
    assert shown == methods | {"fingerprint", "mode", "path", "schema"}
    loader = gc.Loader(cache, 1)
    shown = {name for name in dir(loader) if not name.startswith("_")}
    arguments = {*inspect.signature(gc.Loader).parameters} - {"cache"}
    methods = {"load_state_dict", "set_epoch", "state_dict"}
    assert shown == methods | arguments | {"dataset", "epoch"}
