"""Keys that first appear when graphs without them are in the cache already."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

import trainfast.graph_cache as gc
from tests.graph_samples import assert_same, graph, quiet, read, segments
from trainfast import _core
from trainfast.graph_cache import Counted, Rule, Schema, Writer
from trainfast.graph_cache.fit import agrees, with_late
from trainfast.graph_cache.infer import infer

pytestmark = pytest.mark.usefixtures("stopped_clock")

FIRST = 10  # graphs without the late keys
PAPER, CITES = "paper", ("paper", "cites", "paper")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


def late(n):
    """What some graphs have besides, of every kind of field."""
    nodes, edges = graph(n)["x"].shape[0], graph(n)["edge_index"].shape[1]
    return {
        "pos": np.full((nodes, 3), n, np.float64),
        "edge_attr": np.arange(edges * 2, dtype=np.int16).reshape(edges, 2),
        "ragged": np.arange(n % 4, dtype=np.float32),
        "sub_index": np.arange(nodes)[::2],
        "name": "n" * (n % 3),
        "score": n / 2,
    }


def appended(path, graphs, **options):
    with Writer(path, **options) as writer:
        for one in graphs:
            writer.append(one)


def test_a_late_key_is_optional_from_then_on(path):
    graphs = [graph(n) for n in range(1, FIRST)]
    graphs += [graph(n) | late(n) for n in range(2, 7)]
    graphs += [graph(n) for n in range(3, 5)] + [graph(8) | {"score": 1.0}]
    with pytest.warns(UserWarning, match=f"graph {FIRST - 1} is the first with 'pos'"):
        appended(path, graphs)
    assert_same(read(path), graphs)
    cache = gc.open(path)
    cache.verify()
    schema = cache.schema
    assert schema.keys == (*graph(3), *late(3))
    assert [f.optional for f in schema.fields] == [
        key in late(3) for key in schema.keys
    ]
    assert schema.fields[schema.field_of("pos")].dims[0] == -1 - schema.nodes[""]
    assert schema.fields[schema.field_of("sub_index")].add == (schema.nodes[""],)


def test_late_keys_are_batched_where_all_graphs_have_them(path):
    few = [graph(n) for n in range(1, FIRST)]
    more = [graph(n) | late(n) for n in range(2, 7)]
    with pytest.warns(UserWarning, match="is the first with"):
        appended(path, few + more)
    cache = gc.open(path)
    whole = gc.Loader(cache, batch_sampler=[range(FIRST - 1, len(cache))])
    (batch,) = whole
    for key in ("pos", "edge_attr", "ragged"):
        expected = np.concatenate([one[key] for one in more])
        np.testing.assert_array_equal(batch[key], expected)
    starts = batch["ptr"][:-1]
    expected = [one["sub_index"] + at for one, at in zip(more, starts, strict=True)]
    np.testing.assert_array_equal(batch["sub_index"], np.concatenate(expected))
    (batch,) = gc.Loader(cache, batch_sampler=[range(FIRST - 1)])
    assert not {*late(1)} & {*batch}
    with pytest.raises(ValueError, match="must all have field pos or all lack it"):
        list(gc.Loader(cache, batch_sampler=[[0, FIRST]]))
    sampler = [[FIRST - 1, FIRST], [0, 1], [FIRST, FIRST + 1]]  # in one arena in turn
    found = ["pos" in one for one in gc.Loader(cache, batch_sampler=sampler)]
    assert found == [True, False, True]
    for batch in gc.Loader(cache, batch_size=4, exclude=list(late(1))):
        assert not {*late(1)} & {*batch}


def test_schema_of_segments_has_what_the_widest_has(path):
    with pytest.warns(UserWarning, match="is the first with 'u'"):
        appended(path, [{"x": np.ones(n % 3)} for n in range(9)] + [{"u": np.ones(2)}])
    assert len(segments(path)) == 2
    cache = gc.open(path)
    assert cache.schema.fields[1].dims == (2,)  # which no graph contradicts
    assert cache[0].keys() == {"x"} and cache[9].keys() == {"u"}
    for wide in (Writer(path), Writer(path)):
        with wide, warnings.catch_warnings():
            warnings.simplefilter("error")
            wide.append({"u": np.zeros(5)})
            wide.append({"x": np.zeros(4), "u": np.zeros(2)})
    assert [len(one) for one in gc.open(path)] == [1] * 10 + [1, 2] * 2


def test_field_that_an_older_segment_lacks_is_optional_whatever_the_newer_says(path):
    base = infer([graph(2), graph(3)])
    wide = with_late(base, graph(2) | {"u": 1}, {})
    wide = Schema(wide.counts, (*base.fields, replace(wide.fields[-1], optional=False)))
    appended(path, [graph(2)], schema=base)
    appended(path, [graph(4) | {"u": 1}], schema=wide)
    assert gc.open(path).schema.fields[-1].optional
    assert_same(read(path), [graph(2), graph(4) | {"u": 1}])


def test_two_writers_with_other_late_keys_agree(path):
    with (
        pytest.warns(UserWarning, match="first with"),
        Writer(path, samples=1) as one,
        Writer(path, samples=1) as other,
    ):
        one.append(graph(1))
        other.append(graph(2))
        one.append(graph(3) | {"u": 1})
        other.append(graph(4) | {"v": np.ones(2)})
        one.append(graph(5) | {"v": np.zeros(3), "u": 2})
        other.append(graph(6) | {"u": 3})
    assert gc.open(path).schema.keys == (*graph(1), "u", "v")
    found = sorted(read(path), key=lambda one: one["x"].shape)
    more = [{}, {}, {"u": 1}, {"v": np.ones(2)}, {"u": 2, "v": np.zeros(3)}, {"u": 3}]
    assert_same(found, [graph(n) | m for n, m in enumerate(more, 1)])


def test_a_late_key_of_an_unknown_type_is_refused_alone(path):
    def typed(n):
        return {
            (PAPER, "x"): np.ones((n, 2), np.float32),
            (CITES, "edge_index"): np.zeros((2, n), np.int64),
        }

    with Writer(path) as writer:
        for n in range(1, FIRST):
            writer.append(typed(n))
        message = (
            r"graph 9: .*author.* must come with the first graphs, .*nodes of auth"
        )
        with pytest.raises(ValueError, match=message):
            writer.append(typed(3) | {("author", "x"): np.ones(2)})
        with pytest.warns(UserWarning, match="the first with .*weight"):
            writer.append(typed(3) | {(CITES, "weight"): np.ones(3)})
        writer.append(typed(2))
    assert [len(one) for one in gc.open(path)] == [2] * (FIRST - 1) + [3, 2]


def test_a_late_key_follows_its_rule_and_its_counts(path):
    graphs = [{"x": np.ones(n)} for n in range(1, FIRST)]
    more = Counted({"x": np.ones(2), "to": np.array([4, 1])}, {("increment", "to"): 9})
    rules = {"to": Rule(add="increment", cat_dim=0)}
    with pytest.warns(UserWarning) as seen:
        appended(path, [*graphs, more, more], rules=rules)
    assert {str(one.message).split(":")[0] for one in seen} >= {
        "rules for keys that the first graphs do not have",
        "graph 9 is the first with 'to'",
    }
    (batch,) = gc.Loader(gc.open(path), batch_sampler=[[9, 10]])
    assert batch["to"].tolist() == [4, 1, 13, 10]


def make(n):
    return graph(n) | ({"late": np.full(n, n)} if n > 100 else {})


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.forks)])
def test_a_build_with_late_keys_goes_on(path, workers):
    with warnings.catch_warnings():  # that of a worker is not seen here
        warnings.simplefilter("ignore")
        report = quiet(path, range(150), make, workers=workers)
    assert report.made == 150
    assert_same(read(path), [make(n) for n in range(150)])
    assert quiet(path, range(150), make).made == 0


def test_a_build_can_look_at_more_samples(path):
    quiet(path, range(99, 110), make, samples=5)
    assert len(segments(path)) == 1
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        quiet(path, range(99, 120), make, samples=0)


def test_repair_keeps_graphs_with_late_keys(path, tmp_path):
    graphs = [graph(n) for n in range(1, FIRST)] + [graph(n) | late(n) for n in (3, 4)]
    with pytest.warns(UserWarning, match="is the first with"):
        appended(path, graphs)
    _core.graph_repair(str(path), str(tmp_path / "repaired"), str)
    assert_same(read(tmp_path / "repaired"), graphs)


def test_schemas_agree_when_one_begins_with_the_other():
    base = infer([graph(2), graph(3)])
    wide = with_late(base, graph(2) | {"u": 1}, {})
    assert agrees(base, wide) and agrees(wide, base) and agrees(wide, wide)
    other = with_late(base, graph(2) | {"v": 1}, {})
    assert not agrees(wide, other)
