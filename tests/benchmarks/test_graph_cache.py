"""The graph cache's benchmark: graphs, rivals, checks, tables. No time is asserted."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks import (  # noqa: E402
    bench_graph_cache,
    graph_cache_cases,
    graph_cache_loading,
    graph_cache_ours,
    graph_cache_rivals,
    harness,
    machine,
    table,
)
from benchmarks.graph_cache import (  # noqa: E402
    BATCH,
    MID,
    SMALL,
    WRITTEN,
    Unavailable,
    Workload,
    collated,
    disk_bytes,
    narrowed,
    nbytes,
    needs,
)
from benchmarks.graph_cache_cases import Bench, Entry  # noqa: E402
from benchmarks.harness import Budget, Case, Contender  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TINY = Budget(0.0, warmup=1, min_rounds=2, max_rounds=2)
RIVALS = {
    "from_files": "torch_geometric",
    "from_lmdb": "lmdb",
    "from_memory": "torch_geometric",
}


@pytest.fixture
def work(tmp_path):
    return Workload(SMALL.shrunk(), tmp_path)


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path, TINY, smoke=True)


# ---- Graphs --------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [SMALL, MID, WRITTEN], ids=lambda p: p.name)
def test_graphs_have_the_sizes_they_are_named_for(problem):
    rng = np.random.default_rng(0)
    graphs = [problem.make(rng) for _ in range(200)]
    nodes = np.array([len(graph["x"]) for graph in graphs])
    assert nodes.mean() == pytest.approx(problem.nodes, rel=0.05)
    assert (nodes.std() > 0) == (problem is not WRITTEN)
    for graph, n in zip(graphs, nodes, strict=True):
        assert graph["x"].shape == (n, problem.features)
        assert graph["edge_index"].shape == (2, n * problem.degree)
        assert graph["edge_index"].min() >= 0 and graph["edge_index"].max() < n


def test_batch_is_what_pyg_makes_of_it(work):
    batch = pytest.importorskip("torch_geometric.data").Batch
    objects = graph_cache_rivals.objects(work)[:5]
    expected = batch.from_data_list(objects).to_dict()
    got = collated(work.graphs[:5])
    assert set(got) == set(expected)
    for key, array in got.items():
        assert np.array_equal(array, expected[key].numpy())
        assert array.dtype == expected[key].numpy().dtype


def test_batches_have_every_graph_once_a_pass(work):
    each = len(work.graphs) // BATCH
    for at in range(0, len(work.batches), each):
        seen = [i for batch in work.batches[at : at + each] for i in batch]
        assert sorted(seen) == list(range(len(work.graphs)))
    first = work.batches[:each]
    total = sum(nbytes(collated([work.graphs[i] for i in ids])) for ids in first)
    assert work.batch_bytes == round(total / each)


def test_narrowed_counts_integers_in_their_narrowest_type():
    floats = np.zeros(3, np.float32)
    for most, size in ((0, 1), (255, 1), (256, 2), (65536, 4), (2**32, 8)):
        graph = {"x": floats, "edge_index": np.array([[0, most], [0, 0]])}
        assert narrowed([graph, graph]) == 2 * (12 + 4 * size)


def test_disk_bytes_are_whole_blocks(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(bytes(5000))
    assert disk_bytes(tmp_path) % 512 == 0
    assert disk_bytes(tmp_path) >= 5001


# ---- Contenders ----------------------------------------------------------------------


@pytest.mark.parametrize("name", RIVALS)
def test_rival_batches_what_it_is_asked_for(name, bench):
    pytest.importorskip("torch_geometric")
    pytest.importorskip(RIVALS[name])
    work = bench.work(SMALL)
    make = getattr(graph_cache_rivals, name)
    run = bench.rival(work, make)
    assert bench.rival(work, make) is run
    for indices in work.batches[:3]:
        work.check(name, indices, run())


@pytest.mark.parametrize("workers", [0, 1])
def test_rival_loader_gives_the_batches_in_order(work, workers):
    pytest.importorskip("torch_geometric")
    some = work.batches[:3]
    loader = graph_cache_rivals.loader(work, workers, batch_sampler=some)
    for _epoch in range(2):
        for indices, batch in zip(some, loader, strict=True):
            work.check("DataLoader", indices, batch)
    assert len(graph_cache_rivals.loader(work, 0)) == len(work.graphs) // BATCH


def test_wrong_batches_are_refused(work):
    indices = work.batches[0]
    right = collated([work.graphs[i] for i in indices])
    work.check("right", indices, right)
    for key, wrong in (
        ("x", right["x"] + 1),
        ("batch", right["batch"].astype(np.int32)),
        ("y", right["y"][1:]),
        ("edge_index", right["edge_index"][::-1]),
    ):
        with pytest.raises(RuntimeError, match=f"wrong must collate '{key}' as"):
            work.check("wrong", indices, {**right, key: wrong})


def test_written_graphs_come_back(tmp_path, work):
    graph_cache_rivals.write_files(work.graphs[:3], tmp_path)
    for i, graph in enumerate(work.graphs[:3]):
        read = torch.load(tmp_path / f"{i}.pt")
        assert all(np.array_equal(read[key], graph[key]) for key in graph)
    lmdb = pytest.importorskip("lmdb")
    for durable in (False, True):
        folder = tmp_path / f"lmdb{durable}"
        folder.mkdir()
        graph_cache_rivals.write_lmdb(work.graphs * 5, folder, durable)
        with lmdb.open(str(folder), readonly=True) as database:
            assert database.stat()["entries"] == 5 * len(work.graphs)


def test_what_is_not_installed_is_unavailable(bench, capsys):
    with pytest.raises(Unavailable, match="no_such_module is not installed"):
        needs("no_such_module.inner")

    def missing():
        raise Unavailable("it is missing")

    entries = [Entry("gone", "rival", missing), Entry("here", "ours", lambda: int)]
    case = Case("case", "a case", "float32")
    report = bench.measure(case, entries)
    assert report["skipped"] == {"gone": "it is missing"}
    assert [line["contender"] for line in report["lines"]] == ["here"]
    assert bench.measure(case, entries[:1]) is None
    assert "no contender can run: {'gone': 'it is missing'}" in capsys.readouterr().out
    bench.with_ours = False
    assert bench.measure(case, entries) is None


def test_time_of_several_calls_is_divided():
    calls = []
    run = graph_cache_cases.repeated(lambda: lambda: calls.append(1), 5)
    ticks = itertools.count()

    def clock(run):
        run()
        next(ticks)
        return 1000.0, None

    times, _ = harness.measure([Contender("a", run, calls=5)], TINY, clock)
    assert times == {"a": [200.0, 200.0]}
    assert len(calls) == 5 * 3


def test_warm_turn_comes_after_as_many_as_take_10_ms_that_are_not_timed(monkeypatch):
    done, now = [], itertools.count(0, 0.004)
    monkeypatch.setattr(graph_cache_cases.time, "perf_counter", lambda: next(now))
    entry = Entry("a", "ours", lambda: lambda: done.append("a"), calls=2, warm=True)
    contender = entry.contender()

    def clock(run):
        done.append("timed")
        run()
        return 2000.0, None

    contender.prepare()
    assert clock(contender.run) == (2000.0, None)
    assert done == ["a"] * 3 + ["timed", "a"]
    assert contender.calls == 2


def test_block_counts_a_wait_for_every_step_but_the_first(monkeypatch):
    now = itertools.count(0, 10)
    monkeypatch.setattr(graph_cache_loading.time, "perf_counter_ns", lambda: next(now))
    steps = []
    wait, step = graph_cache_loading.block(range(1, 5), lambda: steps.append(1))
    assert len(steps) == 4
    assert (wait, step) == (10, 10)


def test_steps_set_torchs_threads_and_put_them_back():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), graph_cache_loading.torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyError
    assert torch.get_num_threads() == before


def test_copies_and_writes_move_every_byte(tmp_path, work):
    graph_cache_ours.make_copy(work, 3)()
    path = tmp_path / "plain"
    graph_cache_ours.write_plainly(path, 1000, 7, durable=True)
    assert path.stat().st_size == 7 * 143
    graph_cache_ours.one_file(work.graphs, tmp_path / "one.pt", 2 * len(work.graphs))
    read = torch.load(tmp_path / "one.pt")
    assert len(read["y"]) == 2 * len(work.graphs)
    edges = sum(graph["edge_index"].shape[1] for graph in work.graphs)
    assert read["edge_index"].shape == (2, 2 * edges)


# ---- The whole -----------------------------------------------------------------------


def test_bad_arguments_are_named(capsys):
    for words, message in (
        (["--case", "tiny-hot"], "invalid choice: 'tiny-hot'"),
        (["--without-ours", "--json", "auto"], "--json must be a path unless"),
    ):
        with pytest.raises(SystemExit):
            bench_graph_cache.parse(words)
        assert message in capsys.readouterr().err


def test_results_without_ours_are_not_published():
    report = {"name": "small-hot", "skipped": {"LMDB": "lmdb is not installed"}}
    bench_graph_cache.require_ours(report)
    report["skipped"]["trainfast, dict"] = "not in this build"
    with pytest.raises(
        SystemExit, match="small-hot: results need trainfast, dict: not"
    ):
        bench_graph_cache.require_ours(report)


def line(name, role, us, times_ours=None):
    def same(value):
        return None if value is None else {"median": value, "p10": value, "p90": value}

    ahead = same(2.5) if role == "ours" else None
    percent = same(40.0) if role == "ours" else None
    return {
        "contender": name,
        "role": role,
        "us": same(us),
        "percent_of_bound": percent,
        "ahead_of_best_rival": ahead,
        "times_ours": same(times_ours),
    }


def test_table_has_fine_times_large_ratios_and_the_sizes():
    lines = [
        line("trainfast", "ours", 11.64, 1.0),
        line("trainfast, dict", "ours", 7.0, 0.6),
        line("slow", "rival", 20000.0, 1718.2),
        line("fast", "rival", 29.1, 2.5),
        line("copy", "bound", 4.66),
    ]
    case = {"title": "small", "best_rival": "fast", "lines": lines}
    sizes = {"trainfast": 2100, "LMDB": 4000}
    disk = {"title": "small", "graphs": 2, "arrays": 3000, "narrowed": 2000}
    how = machine.describe_run(2, "scalar") | {"conditions": "none"}
    full = harness.make_report("graph-cache", machine.describe(), how, [case])
    full["disk"] = [{**disk, "bytes": sizes}]
    rows = [row for row in table.table(full).splitlines() if row.startswith("|")]
    assert rows[2] == (
        "| small | 11.6 us | 4.7 us | 40 (40-40) | fast 29.1 us | 2.5 (2.5-2.5) "
        "| trainfast, dict 0.6, slow 1,718 |"
    )
    assert rows[5] == "| small | 1,500 | 1,000 | 1,050 | 5.0% | LMDB 2,000 |"
    assert table.TITLES["graph-cache"] in table.table(full)


@pytest.mark.slow
def test_smoke_run_writes_valid_json_and_a_table(tmp_path):
    path = tmp_path / "graph-cache.json"
    words = ["--smoke", "--folder", str(tmp_path / "files"), "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_graph_cache", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "files").iterdir()) == []
    full = json.loads(path.read_text())
    assert full["bench"] == "graph-cache"
    names = {case["name"].removesuffix("-next") for case in full["cases"]}
    assert set(bench_graph_cache.cases()) <= names
    for case in full["cases"]:
        assert case["title"] in done.stdout
        assert case["lines"][0]["role"] == "ours", case["skipped"]
        for got in case["lines"]:
            assert 0 < got["us"]["p10"] <= got["us"]["median"] <= got["us"]["p90"]
    assert len(full["run"]["openmp"]) <= 1, "two OpenMP runtimes contend"
    rows = [row for row in table.table(full).splitlines() if row.startswith("|")]
    assert len(rows) == 2 + len(full["cases"]) + 2 + len(full["disk"])
