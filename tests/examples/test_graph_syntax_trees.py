"""examples/graph_syntax_trees.py: its graphs, and all ways to get them train alike."""

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

SCRIPT = Path(__file__).parents[2] / "examples" / "graph_syntax_trees.py"
MODULES = ("graph_syntax_trees", "syntax_batches", "syntax_graphs", "small_gnn")
TINY = ["--preset", "tiny", "--device", "cpu", "--steps", "25"]


def imported(monkeypatch, name):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    for module in MODULES:
        monkeypatch.delitem(sys.modules, module, raising=False)
    return importlib.import_module(name)


@pytest.fixture
def syntax(monkeypatch):
    return imported(monkeypatch, "syntax_graphs")


@pytest.fixture
def batches(monkeypatch):
    return imported(monkeypatch, "syntax_batches")


@pytest.fixture
def example(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield imported(monkeypatch, "graph_syntax_trees")
    torch.set_num_threads(threads)


def graph(syntax, source):
    function = syntax.Function("module", 1, textwrap.dedent(source).strip("\n"))
    return syntax.build(function)


def kinds(syntax, built):
    names = {number: name for name, number in syntax.KINDS.items()}
    return [names[number] for number in built["x"][:, 0]]


# ---- Graphs --------------------------------------------------------------------------


def test_graph_has_the_tree_the_tokens_and_the_names(syntax):
    built = graph(syntax, "def f(a):\n    b = a\n")
    assert kinds(syntax, built) == [
        "FunctionDef", "arguments", "arg", "Assign", "Name", "Name",
    ]  # fmt: skip
    of = {
        relation: built["edge_index"][:, built["edge_attr"] == relation].T.tolist()
        for relation in syntax.RELATIONS
    }
    assert of[syntax.CHILD] == [[0, 1], [1, 2], [0, 3], [3, 4], [3, 5]]
    assert of[syntax.NEXT_TOKEN] == [[2, 4], [4, 5]]
    assert of[syntax.SAME_NAME] == [[2, 5]]  # both are called a
    assert built["x"][2, 1] == built["x"][5, 1] != built["x"][4, 1]
    types = {key: (str(array.dtype), array.ndim) for key, array in built.items()}
    assert types == {
        "x": ("int64", 2),
        "walks": ("float32", 2),
        "edge_index": ("int64", 2),
        "edge_attr": ("int64", 1),
        "y": ("float32", 1),
    }


@pytest.mark.parametrize(
    ("body", "returns"),
    [
        ("return a", 1),
        ("return a.none", 1),
        ("return (yield)", 1),
        ("if a:\n        return 0", 1),
        ("return", 0),
        ("return None", 0),
        ("pass", 0),
        ("def inner():\n        return a", 0),
        ("class Inner:\n        def inner(self):\n            return a", 0),
    ],
)
def test_value_that_is_returned_is_told_but_not_shown(syntax, body, returns):
    built = graph(syntax, f"def f(a):\n    {body}\n")
    assert built["y"].tolist() == [returns]
    assert "Return" not in kinds(syntax, built)


@pytest.mark.parametrize("statement", ["a(1)", "[a, 2]"])
def test_returned_value_looks_like_the_value_as_a_statement(syntax, statement):
    shown = graph(syntax, f"def f(a):\n    {statement}\n")
    returned = graph(syntax, f"def other(a) -> int:\n    return {statement}\n")
    assert (shown["y"], returned["y"]) == (0, 1)
    for key in ("x", "edge_index", "edge_attr", "walks"):
        assert np.array_equal(shown[key], returned[key])


def test_walks_are_the_powers_of_the_transition_matrix(syntax):
    rng = np.random.default_rng(0)
    n = 9
    tree = np.stack([rng.integers(0, np.arange(1, n)), np.arange(1, n)])
    edges = np.concatenate([tree, rng.integers(0, n, (2, 5))], 1)
    adjacent = np.zeros((n, n))
    np.add.at(adjacent, (edges[0], edges[1]), 1)
    adjacent += adjacent.T
    step = adjacent / adjacent.sum(1, keepdims=True)
    walks = syntax.walks(edges, n)
    for k in range(syntax.STEPS):
        expected = np.linalg.matrix_power(step, k + 1).diagonal()
        assert walks[:, k] == pytest.approx(expected, abs=1e-6)


def test_functions_come_once_and_as_they_are_indented(syntax):
    found = syntax.functions(150)
    assert len({function.source for function in found}) == len(found) == 150
    assert any(function.source.startswith("    ") for function in found)
    for function in found:
        assert not function.source.lstrip().startswith("@")
        built = syntax.build(function)
        n = len(built["x"])
        assert built["edge_index"].min() >= 0 and built["edge_index"].max() < n
        tree = built["edge_index"][:, built["edge_attr"] == syntax.CHILD]
        assert tree[1].tolist() == list(range(1, n))  # each has one parent
        assert np.isfinite(built["walks"]).all()


def test_library_without_source_is_an_error(syntax, monkeypatch, tmp_path):
    monkeypatch.setattr(syntax.sysconfig, "get_paths", lambda: {"stdlib": tmp_path})
    with pytest.raises(SystemExit, match="must hold Python's source, got 0 defs"):
        syntax.functions()


# ---- Training ------------------------------------------------------------------------


def test_batch_is_its_graphs_side_by_side(batches):
    syntax = batches.syntax_graphs
    built = [syntax.build(function) for function in syntax.functions(100)[:3]]
    batch = batches.collate([batches.tensors(graph) for graph in built])
    at, edges = 0, 0
    for i, one in enumerate(built):
        n, e = len(one["x"]), one["edge_index"].shape[1]
        assert np.array_equal(batch["x"][at : at + n], one["x"])
        assert (batch["batch"][at : at + n] == i).all()
        joined = batch["edge_index"][:, edges : edges + e]
        assert np.array_equal(joined, one["edge_index"] + at)
        at, edges = at + n, edges + e
    assert set(batch) == set(batches.KEYS)
    assert batch["edge_index"].shape == (2, edges)


def test_network_does_not_mix_graphs_of_a_batch(batches):
    syntax = batches.syntax_graphs
    built = [syntax.build(function) for function in syntax.functions(100)[:4]]
    graphs = [batches.tensors(graph) for graph in built]
    torch.manual_seed(0)
    sizes = (len(syntax.KINDS), syntax.N_WORDS, syntax.STEPS, len(syntax.RELATIONS))
    network = importlib.import_module("small_gnn").GNN(*sizes, width=8, rounds=2)
    together = network(batches.collate(graphs))
    alone = torch.cat([network(batches.collate([graph])) for graph in graphs])
    assert together.tolist() == pytest.approx(alone.tolist(), abs=1e-5)
    assert len(set(together.tolist())) == len(graphs)


def test_order_has_every_graph_once_an_epoch_and_none_for_validation(batches, tmp_path):
    graphs = batches.Graphs(tmp_path, 300, 8, workers=0, fresh=False)
    order = graphs.order(2 * graphs.epoch, seed=3)
    assert {len(batch) for batch in order} == {graphs.batch}
    first, second = order[: graphs.epoch], order[graphs.epoch :]
    for epoch in (first, second):
        seen = [i for batch in epoch for i in batch]
        assert len(set(seen)) == len(seen) == graphs.epoch * graphs.batch
        assert set(seen) <= set(graphs.train)
    assert first != second
    assert order == graphs.order(2 * graphs.epoch, seed=3)
    modules = [{graphs.functions[i].module for i in ids}
               for ids in (graphs.train, graphs.validation)]  # fmt: skip
    assert modules[1] and modules[0].isdisjoint(modules[1])


@pytest.mark.slow
def test_all_ways_have_the_same_losses_and_write_their_files(example, capsys, tmp_path):
    pytest.importorskip("trainfast.graph_cache")
    command = [sys.executable, SCRIPT, *TINY, "--workers", "0", "--out", tmp_path]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=one_thread)
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line[:22].strip(): line for line in done.stdout.splitlines()}
    assert {"no cache", ".pt per graph", "trainfast"} <= set(rows)
    losses = {row.split()[-1] for row in rows.values() if "%  " in row}
    assert len(losses) == 1 and 0 < float(losses.pop()) < 1
    assert "Losses are the same in all runs" in done.stdout
    assert "300 graphs built and 0 found" in done.stdout
    assert "300 files written" in done.stdout
    assert "of an iteration is building graphs" in done.stdout
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")

    arguments = [*TINY, "--steps", "2", "--workers", "0", "--out", str(tmp_path)]
    example.main([*arguments, "--ways", "cache", "files"])
    again = capsys.readouterr().out
    assert "0 graphs built and 300 found" in again
    assert "0 files written" in again


def test_losses_that_differ_are_an_error(example):
    class Run:
        def __init__(self, losses):
            self.losses = losses

    same = example.check_losses([Run([1.0, 2.0]), Run([1.0, 2.0])])
    assert same == "Losses are the same in all runs, bit by bit."
    near = example.check_losses([Run([1.0, 2.0]), Run([1.0, 2.0 + 2e-5])])
    assert near == "Losses are the same in all runs, to 1e-05."
    for other in (2.1, float("nan")):
        with pytest.raises(SystemExit, match="all runs must have the same losses, got"):
            example.check_losses([Run([1.0, 2.0]), Run([1.0, other])])


def test_note_says_what_share_is_building_and_what_that_allows(example):
    class Run:
        def __init__(self, whole, waiting):
            self.speed = lambda: (whole, waiting)

    note = example.note({"none": Run(0.040, 0.036), "cache": Run(0.005, 0.001)})
    assert "90% of an iteration is building graphs" in note
    assert "Never waiting would make it\n10.0 times faster" in note
    assert "cache makes it 8.0 times faster, and leaves 20.0% of it" in note
    assert "9.2 times: at least 89% of its iterations" in note
    assert example.note({"none": Run(0.040, 0.036)}) == ""


@pytest.mark.slow
def test_stopped_build_goes_on_where_it_was(example, monkeypatch, tmp_path, capsys):
    pytest.importorskip("trainfast.graph_cache")
    arguments = [*TINY, "--workers", "0", "--ways", "cache", "--out", str(tmp_path)]
    build, made = example.syntax_graphs.build, []

    def stop_at_290(function):
        made.append(function)
        if len(made) == 290:
            raise KeyboardInterrupt
        return build(function)

    with monkeypatch.context() as patch:
        patch.setattr(example.syntax_graphs, "build", stop_at_290)
        with pytest.raises(SystemExit, match="the same command goes on building"):
            example.main(arguments)
    example.main(arguments)
    printed = capsys.readouterr().out
    kept = 300 - int(printed.partition(" graphs built")[0].split()[-1])
    assert kept >= 256  # of 289: what was committed


@pytest.mark.slow
def test_files_that_are_there_are_not_written_again(example, tmp_path, capsys):
    arguments = [*TINY, "--steps", "2", "--ways", "files", "--out", str(tmp_path)]
    example.main(arguments)
    (folder,) = tmp_path.glob("files-*")
    (folder / "7.pt").unlink()
    kept = (folder / "8.pt").stat().st_mtime_ns
    example.main(arguments)
    assert ".pt:   1 files written" in capsys.readouterr().out
    assert (folder / "8.pt").stat().st_mtime_ns == kept
    assert not list(folder.glob("*.new"))


def test_example_refuses_an_unknown_way(example, capsys):
    with pytest.raises(SystemExit) as stop:
        example.main(["--ways", "magic"])
    assert stop.value.code == 2
    assert "magic" in capsys.readouterr().err
