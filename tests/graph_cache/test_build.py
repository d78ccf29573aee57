"""Building caches of graphs: writers of one's own, and `build` in this process."""

import errno
import gc
import signal
import sys

import numpy as np
import pytest

from tests.graph_samples import (
    assert_same,
    graph,
    numbers,
    quiet,
    read,
    run_python,
    segments,
)
from trainfast import _core
from trainfast.graph_cache import (
    BuildError,
    Counted,
    Rule,
    Schema,
    StaleCacheError,
    Writer,
)

pytestmark = [
    pytest.mark.usefixtures("stopped_clock"),
    # MADE, which make() fills, cannot be compared.
    pytest.mark.filterwarnings("ignore:not all of what made the cache"),
]

MADE = []  # the inputs that make() was called with, in this process


def make(n):
    MADE.append(n)
    return graph(n)


@pytest.fixture(autouse=True)
def _nothing_made():
    MADE.clear()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


# ---- Writer --------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 40])
def test_a_writers_graphs_are_in_the_cache_in_order(path, n):
    graphs = [graph(i) for i in range(n)]
    with Writer(path) as writer:
        for one in graphs:
            writer.append(one)
        assert writer.appended == n
    assert writer.committed == n
    assert_same(read(path), graphs)


def test_a_writer_goes_on_in_a_cache_with_its_schema(path):
    for first in (1, 4):
        with Writer(path) as writer:
            for n in range(first, first + 3):
                writer.append(graph(n))
    assert numbers(path) == [1, 2, 3, 4, 5, 6]
    schema = Schema.decode(_core.GraphCache(str(path)).schema)
    with Writer(path) as writer:
        assert writer.schema == schema


def test_a_graph_whose_sizes_do_not_fit_begins_a_segment(path):
    graphs = [graph(i) | {"z1": np.zeros(2)} for i in range(1, 12)]
    graphs += [graph(3) | {"z1": np.zeros(5)}, graph(4) | {"z1": np.zeros(0)}]
    graphs += [graph(5), graph(6) | {"z1": np.zeros(2)}]
    with Writer(path) as writer:
        for one in graphs:
            writer.append(one)
    assert len(segments(path)) == 3  # the sizes, and then that it can be missing
    assert_same(read(path), graphs)


def test_a_size_that_was_the_number_of_nodes_by_chance_is_kept(path):
    graphs = [graph(i) | {"extra": np.arange(i)} for i in range(1, 10)]
    graphs.append(graph(3) | {"extra": np.arange(7)})
    with Writer(path) as writer:
        for one in graphs:
            writer.append(one)
    assert_same(read(path), graphs)


def test_graphs_that_wait_for_the_schema_may_be_overwritten(path):
    one = graph(4)
    wanted = {key: value.copy() for key, value in one.items()}
    with Writer(path) as writer:
        writer.append(one)
        one["x"][:] = 7
    assert_same(read(path), [wanted])


def test_values_of_every_kind_come_back(path):
    one = {"a": True, "b": -(2**63), "c": float("nan"), "d": "äß", "e": b"\0\1", "f": 3}
    with Writer(path) as writer:
        writer.append(one)
        writer.append(one | {"d": "", "e": b"", "f": 255})
    found = read(path)
    assert found[0]["c"] != found[0]["c"]
    assert [type(v) for v in found[0].values()] == [bool, int, float, str, bytes, int]
    assert found[0] | {"c": 0} == one | {"c": 0}
    assert found[1]["d"] == "" and found[1]["e"] == b"" and found[1]["f"] == 255


def test_counts_that_arrays_do_not_tell_are_stored(path):
    edges = {"edge_index": np.array([[0, 1], [1, 2]])}
    with Writer(path) as writer:
        writer.append(edges)
        writer.append(edges | {"edge_index": np.zeros((2, 0), np.int64)})
        writer.append(Counted(edges, {("nodes", ""): 9}))
    cache = _core.GraphCache(str(path))
    assert cache.counts(0).tolist() == [3, 0, 9]
    assert cache.counts(1).tolist() == [2, 0, 2]


def test_objects_with_to_dict_are_graphs(path):
    class Data:
        def to_dict(self):
            edges = {"edge_index": np.zeros((2, 1), np.int64)}
            return {"y": 1.5, "a": {"x": np.ones((2, 2))}, ("a", "to", "a"): edges}

    with Writer(path) as writer:
        writer.append(Data())
    (found,) = read(path)
    assert set(found) == {"y", ("a", "x"), (("a", "to", "a"), "edge_index")}


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"x": np.zeros((3, 3))}, ValueError, "graph 9: .*x.* float32, got float64"),
        ({"x": np.zeros(3, np.float32)}, ValueError, "graph 9: .*x.*2 dim"),
        ({"edge_index": np.array([[0], [5]])}, ValueError, "graph 9: .*edge_index.*5"),
        (
            {"edge_index": np.array([[0], [-1]])},
            ValueError,
            "graph 9: .*edge_index.*-1",
        ),
        ({"new": [1.0]}, TypeError, "graph 9: 'new': .*must be an array"),
        ({"y": [1.0]}, TypeError, "graph 9: .*y.* must be an array"),
    ],
)
def test_a_graph_that_cannot_be_cached_is_refused_alone(path, bad, error, message):
    good = [graph(3, seed) for seed in range(9)]
    with Writer(path) as writer:
        for one in good:
            writer.append(one)
        with pytest.raises(error, match=message):
            writer.append(graph(3) | bad)
        writer.append(graph(4))
    assert_same(read(path), [*good, graph(4)])


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"x": np.zeros((3, 3))}, ValueError),
        ({"edge_index": np.array([[0], [5]])}, ValueError),
        ({"y": [1.0]}, TypeError),
    ],
)
def test_a_graph_is_refused_before_there_is_a_schema(path, bad, error):
    with Writer(path) as writer:
        writer.append(graph(3))
        with pytest.raises(error, match=r"graph 1\b"):
            writer.append(graph(3) | bad)
    assert_same(read(path), [graph(3)])


@pytest.mark.parametrize("before", [1, 9])
@pytest.mark.parametrize("message", ["graph has no atoms", "the writer is tired"])
def test_any_refusal_names_the_graph_once(path, before, message):
    class Broken:
        def to_dict(self):
            raise ValueError(message)

    with Writer(path) as writer:
        for seed in range(before):
            writer.append(graph(3, seed))
        with pytest.raises(ValueError, match=f"^graph {before}: {message}$") as raised:
            writer.append(Broken())
        assert str(raised.value.__cause__) == message


def test_what_is_no_graph_is_refused(path):
    with (
        Writer(path) as writer,
        pytest.raises(TypeError, match=r"a graph must be a dict"),
    ):
        writer.append([1])


def test_a_closed_writer_refuses_more(path):
    writer = Writer(path)
    writer.append(graph(1))
    writer.close()
    writer.close()
    for call in (lambda: writer.append(graph(1)), writer.commit):
        with pytest.raises(ValueError, match="the writer is closed; open another"):
            call()


@pytest.mark.parametrize("committed", [0, 5])
def test_an_exception_keeps_what_was_committed(path, committed):
    with pytest.raises(ZeroDivisionError), Writer(path) as writer:
        for i in range(12):
            writer.append(graph(i))
            if i + 1 == committed:
                writer.commit()
        raise ZeroDivisionError
    wanted = [graph(i) for i in range(committed)]
    if (path / "manifest").exists():
        assert_same(read(path), wanted)
    else:
        assert wanted == []


def test_commits_come_by_number_and_by_time(path, monkeypatch):
    with Writer(path / "a", commit_every=5, commit_seconds=1e9) as writer:
        seen = []
        for i in range(12):
            writer.append(graph(i))
            seen.append(writer.committed)
    assert seen == [0] * 4 + [5] * 5 + [10] * 3
    now = iter([5.0, 6.9, 7.0, 7.0, 8.9, 9.0, 9.0])  # also after each commit
    module = sys.modules["trainfast.graph_cache.writer"]
    monkeypatch.setattr(module, "monotonic", lambda: next(now))
    with Writer(path / "b") as writer:
        seen = []
        for i in range(4):
            writer.append(graph(i))
            seen.append(writer.committed)
        monkeypatch.undo()
    assert seen == [0, 2, 2, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"commit_every": 0}, "commit_every must be at least 1, got 0"),
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"commit_seconds": 0}, "commit_seconds must be positive, got 0"),
    ],
)
def test_writers_options_are_checked(path, options, message):
    with pytest.raises(ValueError, match=message):
        Writer(path, **options)


def test_a_rule_for_an_unknown_key_is_a_warning(path):
    writer = Writer(path, rules={"y1": Rule(), "y": Rule()})
    writer.append(graph(1))
    with pytest.warns(UserWarning, match="the first graphs do not have: 'y1'$"):
        writer.close()
    assert_same(read(path), [graph(1)])


def test_two_writers_share_a_cache(path):
    with Writer(path) as one, Writer(path) as other:
        for i in range(20):
            (one if i % 2 else other).append(graph(i))
    assert sorted(numbers(path)) == list(range(20))


# ---- Build ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 8, 30])
def test_build_makes_what_is_missing_in_order(path, n):
    report = quiet(path, range(1, n + 1), make)
    assert [*range(1, n + 1)] == MADE
    assert (report.graphs, report.made, report.reused, report.dropped) == (n, n, 0, 0)
    assert (
        report.bytes == sum(file.stat().st_size for file in path.glob("segment-*"))
        or report.bytes > 0
    )
    assert_same(read(path), [graph(i) for i in range(1, n + 1)])
    assert "made" in str(report) and report.to_dict()["made"] == n


def test_a_second_build_makes_nothing_and_writes_nothing(path):
    quiet(path, range(20), make)
    before = {f.name: f.read_bytes() for f in path.iterdir()}
    report = quiet(path, range(20), make)
    assert MADE[20:] == [0, 19, 9]  # to compare them
    assert (report.made, report.reused) == (0, 20)
    assert {f.name: f.read_bytes() for f in path.iterdir()} == before


def test_inputs_may_be_an_iterator_that_is_gone_through_once(path):
    assert quiet(path, (n for n in [3, 1, 2]), make).made == 3
    assert numbers(path) == [3, 1, 2]
    assert quiet(path, iter([3, 1, 2, 5]), make).made == 1
    assert numbers(path) == [3, 1, 2, 5]


def test_inputs_without_make_are_graphs(path):
    graphs = [graph(n) for n in range(5)]
    quiet(path, graphs)
    assert_same(read(path), graphs)


def test_inputs_that_are_cached_are_hardly_read(path):
    class Dataset:
        reads = 0

        def __len__(self):
            return 100

        def __getitem__(self, i):
            self.reads += 1
            return graph(i)

    dataset = Dataset()
    quiet(path, dataset)
    quiet(path, dataset)
    assert 100 + 3 <= dataset.reads <= 100 + 16  # some are compared


def test_the_place_is_the_key_unless_there_is_another(path):
    quiet(path, [1, 2, 3], make)
    quiet(path, [1, 2, 3, 4], make)
    assert MADE[:3] == [1, 2, 3] and MADE[-1] == 4 and numbers(path) == [1, 2, 3, 4]
    with pytest.raises(StaleCacheError, match="changed: input 0, input 1, input 2, "):
        quiet(path, [7, 8, 9, 9], make)
    assert numbers(path) == [1, 2, 3, 4]


def test_with_keys_what_changed_is_made_and_what_is_gone_leaves(path):
    quiet(path, range(10), make, key=str)
    MADE.clear()
    report = quiet(path, [9, 20, 3, 4, 21], make, key=str)
    assert MADE == [9, 4, 3, 20, 21]  # what is kept is compared
    assert numbers(path) == [9, 20, 3, 4, 21]
    assert (report.made, report.reused, report.dropped) == (2, 3, 7)


def test_another_order_is_another_order_of_the_same_graphs(path):
    quiet(path, range(10), make, key=int)
    assert quiet(path, reversed(range(10)), make, key=int).made == 0
    assert numbers(path) == list(range(9, -1, -1))


def test_inputs_with_the_same_key_are_each_a_graph(path):
    assert quiet(path, [5, 5, 6, 5], make, key=int).made == 4
    assert quiet(path, [5, 6, 5], make, key=int).made == 0
    assert numbers(path) == [5, 6, 5]


def test_another_transform_id_makes_all_again(path):
    quiet(path, range(5), make, transform_id=("v", 1))
    quiet(path, range(5), make, transform_id=("v", 1))
    assert len(MADE) == 5
    report = quiet(path, range(5), lambda n: graph(n + 10), transform_id=("v", 2))
    assert (report.made, report.dropped) == (5, 5)
    assert numbers(path) == [10, 11, 12, 13, 14]
    assert len(segments(path)) == 1  # what is not used any more is deleted


@pytest.mark.parametrize(
    "options", [{}, {"key": str}, pytest.param({"workers": 2}, marks=pytest.mark.forks)]
)
def test_graphs_that_look_otherwise_replace_the_old_ones(path, options):
    quiet(path, range(20), graph, transform_id=1, **options)
    new = [{"x": graph(n)["x"].astype(np.float64), "name": "a" * n} for n in range(20)]
    report = quiet(path, range(20), new.__getitem__, transform_id=2, **options)
    assert (report.made, report.dropped) == (20, 20)
    assert_same(read(path), new)


def test_old_graphs_stay_until_new_ones_can_be_made(path):
    quiet(path, range(5), make)
    with pytest.raises(BuildError, match="ZeroDivisionError"):
        quiet(path, range(5), lambda n: {"new": 1 // n}, transform_id=2)
    assert quiet(path, range(5), make).reused == 5
    assert numbers(path) == [0, 1, 2, 3, 4]


def test_graphs_that_look_otherwise_beside_old_ones_are_refused(path):
    quiet(path, range(5), graph)
    with pytest.raises(ValueError, match=r"input 5: x must.*transform_id"):
        quiet(
            *(path, range(9)),
            lambda n: graph(n) | ({"x": np.ones(n)} if n > 4 else {}),
            rebuild=False,
        )
    quiet(path, range(9), graph, rebuild=False)
    assert numbers(path) == [*range(9)]


def test_rebuild_makes_all_again(path):
    quiet(path, range(5), make)
    report = quiet(path, range(5), lambda n: graph(n + 10), rebuild=True)
    assert (report.made, report.reused, report.dropped) == (5, 0, 5)
    assert numbers(path) == [10, 11, 12, 13, 14]


def test_rules_reach_the_schema(path):
    quiet(path, range(3), make, rules={"y": Rule(cat_dim=None)})
    schema = Schema.decode(_core.GraphCache(str(path)).schema)
    assert schema.fields[2].cat_dim is None


def test_an_exception_in_make_keeps_what_was_made(path):
    def fails_at_13(n):
        if n == 13:
            raise ZeroDivisionError("thirteen")
        return make(n)

    message = r"make\(\) failed on input 12: ZeroDivisionError: thirteen; the graphs"
    with pytest.raises(BuildError, match=message) as caught:
        quiet(path, range(1, 20), fails_at_13)
    assert caught.value.place == 12
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises((OSError, ValueError), match="build"):
        _core.GraphCache(str(path))
    assert len(read(path, partial=True)) == 12
    with pytest.raises(StaleCacheError, match="changed: the code of `make`; "):
        quiet(path, range(1, 20), make)
    report = quiet(path, range(1, 20), make, rebuild=False)
    assert (report.made, report.reused) == (7, 12)
    assert numbers(path) == list(range(1, 20))


def test_ctrl_c_keeps_what_was_made(path):
    def interrupted(n):
        if n == 5:
            raise KeyboardInterrupt
        return make(n)

    with pytest.raises(KeyboardInterrupt):
        quiet(path, range(10), interrupted)
    assert quiet(path, range(10), make, rebuild=False).reused == 5
    assert numbers(path) == list(range(10))


def test_a_graph_that_cannot_be_cached_names_its_input(path):
    with pytest.raises(ValueError, match=r"input 11: .*x"):
        quiet(
            path,
            range(1, 20),
            lambda n: graph(n) | ({"x": np.zeros(3)} if n == 12 else {}),
        )


def test_a_killed_build_goes_on_where_it_was(path):
    code = f"""
        import os, signal
        from tests.graph_samples import graph
        from trainfast.graph_cache import build
        def make(n):
            if n == 600:
                os.kill(os.getpid(), signal.SIGKILL)
            return graph(n % 50)
        build({str(path)!r}, range(700), make, progress=False, commit_seconds=1e9)
    """
    done = run_python(code)
    assert done.returncode == -signal.SIGKILL, done.stderr
    report = quiet(path, range(700), lambda n: make(n % 50), rebuild=False)
    assert report.reused == 512 and report.made == 188
    assert_same(read(path), [graph(n % 50) for n in range(700)])


@pytest.mark.parametrize("limit", [1, 4097, 200_000, 700_000])
def test_a_full_disk_keeps_what_was_committed(path, limit):
    code = f"""
        import resource, signal
        from tests.graph_samples import graph, quiet
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
        try:
            quiet({str(path)!r}, range(1000), lambda n: graph(n % 99), commit_every=16)
        except OSError as error:
            print(error.errno, error)
    """
    done = run_python(code)
    assert done.stdout.startswith(f"{errno.EFBIG} "), done.stderr
    report = quiet(path, range(1000), lambda n: graph(n % 99))
    assert report.made + report.reused == 1000
    assert report.reused >= limit // 4000 // 16 * 16
    assert_same(read(path), [graph(n % 99) for n in range(1000)])


def test_a_second_builder_is_refused(path):
    def make_and_build(n):
        with pytest.raises(BlockingIOError, match=r"another build of .* is running"):
            quiet(path, range(3), make)
        return graph(n)

    quiet(path, range(2), make_and_build)
    assert MADE == [] and numbers(path) == [0, 1]


@pytest.mark.parametrize("what", ["file", "other"])
def test_a_path_of_something_else_is_refused(tmp_path, what):
    path = tmp_path / "place"
    if what == "file":
        path.write_text("mine")
    else:
        path.mkdir()
        (path / "mine").write_text("mine")
    with pytest.raises((OSError, ValueError), match=r"place.*|.*place"):
        quiet(path, range(3), make)
    assert MADE == []
    kept = path if what == "file" else path / "mine"
    assert kept.read_text() == "mine"
    assert what == "file" or [f.name for f in path.iterdir()] == ["mine"]


def test_build_checks_its_arguments(path):
    with pytest.raises(ValueError, match="workers must be at least 0, got -1"):
        quiet(path, [], workers=-1)
    with pytest.raises(TypeError, match=r"the key of input 1 must be str, .* got list"):
        quiet(path, [0, 1], make, key=lambda n: [n] if n else 0)
    with pytest.raises(TypeError, match=r"transform_id must be str, .* got float"):
        quiet(path, [0], make, transform_id=1.5)
    for wrong in ({"workers": "2"}, {"workers": 1.5}, {"key": "a"}, {"make": 3}):
        name = next(iter(wrong))
        with pytest.raises(TypeError, match=f"^{name} must be "):
            quiet(path, **{"inputs": [0], "make": make, **wrong})
    for wrong in (None, 5):
        with pytest.raises(TypeError, match="inputs must be iterable, got "):
            quiet(path, wrong, make)


class Refused:
    """An array by its dtype and shape, whose data cannot be had."""

    dtype, shape = np.dtype(np.float32), (2,)

    def __dlpack__(self, **options):
        raise NotImplementedError("no data")

    def __dlpack_device__(self):
        return 1, 0


def test_a_writer_that_could_not_end_has_ended(path, recwarn):
    writer = Writer(path)
    writer.append({"x": Refused()})
    with pytest.raises(NotImplementedError, match="no data"):
        writer.close()
    writer.close()
    del writer
    gc.collect()
    assert not [w for w in recwarn if w.category is ResourceWarning]


# ---- PyG's graphs --------------------------------------------------------------------


def test_pygs_graphs_are_stored_with_what_their_class_says(path):
    torch = pytest.importorskip("torch")
    pyg = pytest.importorskip("torch_geometric.data")

    class Pair(pyg.Data):
        def __inc__(self, key, value, *args, **kwargs):
            return self.x_s.size(0) if key == "edge_index_s" else 0

    pairs = [
        Pair(
            x_s=torch.rand(n, 2),
            edge_index_s=torch.randint(n - 1, (2, 5)),
            hint_index=torch.tensor([-1]),
            num_nodes=n,
        )
        for n in range(2, 14)
    ]
    quiet(path, pairs)
    assert_same(read(path), [pair.to_dict() for pair in pairs])
    cache = _core.GraphCache(str(path))
    schema = Schema.decode(cache.schema)
    (added,) = schema.fields[schema.field_of("edge_index_s")].add
    assert schema.counts[added].role == "increment"
    assert cache.counts(added).tolist() == list(range(2, 14))
    assert schema.fields[schema.field_of("hint_index")].cat_dim == 0
