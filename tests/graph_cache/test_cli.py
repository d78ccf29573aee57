"""`trainfast cache` as a user calls it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import graph_samples
from tests.graph_samples import assert_same, environment, graph, numbers, quiet, read
from trainfast import cli
from trainfast.tools import _cache_export, _cache_import

torch = pytest.importorskip("torch")

SCRIPT = """
import numpy as np
from tests.graph_samples import graph
NUMBERS = [3, 1, 2]
def numbers():
    return iter(NUMBERS)
def graphs():
    return [graph(n) for n in NUMBERS]
class Keys:
    @staticmethod
    def key(n):
        return str(n)
"""
HETERO = {
    ("paper", "x"): np.ones((2, 3), np.float32),
    (("paper", "cites", "paper"), "edge_index"): np.array([[0, 1], [1, 1]]),
    "text": "äß",
    "data": b"\0\1\0",
    "empty": b"",
    "flag": True,
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def cache(path):
    quiet(path, range(1, 6), graph)
    return path


def run(*arguments):
    """In this process: the exit status. What it prints is capsys's."""
    return cli.main(["cache", *map(str, arguments)])


def run_json(capsys, *arguments, status=0):
    assert run(*arguments, "--json") == status
    return json.loads(capsys.readouterr().out)


def damage(path):
    """Flips a bit in the payload of the first graph."""
    (segment,) = path.glob("segment-*")
    data = bytearray(segment.read_bytes())
    data[data.index(b"TFGR") + 60] ^= 1
    segment.chmod(0o644)
    segment.write_bytes(data)


def test_without_an_action_the_help_names_all(capsys):
    assert run() == 0
    text = capsys.readouterr().out
    for action in ("build", "inspect", "stat", "verify", "repair", "import", "export"):
        assert f"\n    {action} " in text


@pytest.mark.parametrize(
    "arguments", [["bad"], ["stat"], ["verify", "a", "--bad"], ["export", "a"]]
)
def test_a_wrong_command_line_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        run(*arguments)
    assert exit.value.code == 2
    assert "usage: trainfast" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["inspect", "stat", "verify"])
def test_a_path_without_a_cache_exits_with_1(tmp_path, action, capsys):
    assert run(action, tmp_path / "none") == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("trainfast cache: ") and shown.out == ""
    assert "none" in shown.err


# ---- build ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "made"),
    [
        (["script:numbers", "--make", "tests.graph_samples:graph"], [3, 1, 2]),
        (["script:NUMBERS", "--make", "tests.graph_samples:graph"], [3, 1, 2]),
        (["script:graphs"], [3, 1, 2]),
        (
            *(
                [
                    "script:numbers",
                    "--make=tests.graph_samples:graph",
                    "--key=script:Keys.key",
                ],
            ),
            [3, 1, 2],
        ),
    ],
)
def test_build_takes_functions_of_the_working_directory(tmp_path, arguments, made):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "trainfast", "cache", "build", "cache", *arguments]
    for reused in (0, 3):
        done = subprocess.run(
            [*command, "--json", "--quiet"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment(),
        )
        assert (done.returncode, done.stderr) == (0, "")
        facts = json.loads(done.stdout)
        assert (facts["graphs"], facts["reused"]) == (3, reused)
    assert numbers(tmp_path / "cache") == made


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("graph_samples", "must be given as module:name, got 'graph_samples'"),
        ("graph_samples:none", "graph_samples:none must be importable"),
        ("no_such_module:x", "no_such_module:x must be importable"),
    ],
)
def test_build_says_what_it_cannot_find(path, name, message, capsys, monkeypatch):
    monkeypatch.syspath_prepend(Path(graph_samples.__file__).parent)
    assert run("build", path, name) == 1
    assert message in capsys.readouterr().err
    assert not path.exists()


# ---- inspect, stat, verify, repair ---------------------------------------------------


def test_inspect_shows_fields_and_a_graph(cache, capsys):
    assert run("inspect", cache, "--graph", "-1") == 0
    text = capsys.readouterr().out
    assert "3 fields, 2 counts a graph" in text and "graph 4 of 5" in text
    assert "float32 (5, 3): " in text
    facts = run_json(capsys, "inspect", cache)
    assert facts["graphs"] == 5
    assert facts["fields"][1] == {
        "key": "edge_index",
        "dtype": "int64",
        "shape": [2, "edges"],
        "cat_dim": 1,
        "adds": ["nodes"],
        "optional": False,
        "scalar": False,
    }
    assert facts["graph"]["y"] == "float32 (1,): 1.0"


def test_inspect_of_a_graph_that_is_not_there_is_an_error(cache, capsys):
    assert run("inspect", cache, "--graph", "5") == 1
    assert "5" in capsys.readouterr().err


def test_stat_counts_from_the_index(cache, capsys):
    facts = run_json(capsys, "stat", cache)
    assert (facts["graphs"], facts["segments"]) == (5, 1)
    (segment,) = cache.glob("segment-*")
    assert facts["file_bytes"] >= segment.stat().st_size
    assert facts["counts"]["nodes"] == {
        **{"total": 15, "smallest": 1, "mean": 3.0, "largest": 5}
    }
    assert facts["counts"]["edges"]["total"] == 30
    assert run("stat", cache) == 0
    assert "nodes" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["inspect", "stat", "verify"])
def test_a_cache_without_graphs_is_shown(path, action, capsys):
    quiet(path, [])
    assert run_json(capsys, action, path)["graphs"] == 0
    assert run(action, path) == 0


def test_verify_finds_damaged_graphs(cache, capsys):
    assert run("verify", cache) == 0
    assert "all 5 graphs are intact" in capsys.readouterr().out
    damage(cache)
    facts = run_json(capsys, "verify", cache, status=1)
    assert [entry["graph"] for entry in facts["damaged"]] == [0]
    assert run("verify", cache) == 1
    assert "1 of 5 graphs damaged" in capsys.readouterr().out


def test_verify_of_values_finds_what_is_not_finite(path, capsys):
    quiet(path, [{"x": np.array([[np.nan]])}, {"x": np.array([[0.0]])}])
    assert run_json(capsys, "verify", path)["damaged"] == []
    facts = run_json(capsys, "verify", path, "--values", status=1)
    assert [entry["graph"] for entry in facts["damaged"]] == [0]


def test_repair_keeps_all_other_graphs(cache, tmp_path, capsys):
    damage(cache)
    facts = run_json(capsys, "repair", cache, tmp_path / "new", status=1)
    assert (facts["kept"], facts["damaged"]) == (4, 1)
    assert_same(read(tmp_path / "new"), [graph(n) for n in range(2, 6)])
    assert run("repair", cache, tmp_path / "other") == 1
    assert "kept" in capsys.readouterr().out


def test_repair_of_an_intact_cache_copies_it(cache, tmp_path):
    assert run("repair", cache, tmp_path / "new") == 0
    assert numbers(tmp_path / "new") == [1, 2, 3, 4, 5]


# ---- import --------------------------------------------------------------------------


def tensors(n):
    return {key: torch.from_numpy(value) for key, value in graph(n).items()}


def test_import_reads_a_directory_in_natural_order(tmp_path, path):
    folder = tmp_path / "graphs"
    folder.mkdir()
    for n in (10, 9, 1):
        torch.save(tensors(n), folder / f"graph_{n}.pt")
    np.savez(folder / "graph_2.npz", **graph(2))
    (folder / "notes.txt").write_text("")
    assert run("import", folder, path, "--quiet") == 0
    assert_same(read(path), [graph(n) for n in (1, 2, 9, 10)])


def test_import_makes_only_what_is_missing(tmp_path, path, capsys):
    torch.save([tensors(1), tensors(2)], tmp_path / "a.pt")
    for reused in (0, 2):
        facts = run_json(capsys, "import", tmp_path / "a.pt", path, "--quiet")
        assert (facts["graphs"], facts["reused"]) == (2, reused)
    torch.save([tensors(1), tensors(3)], tmp_path / "a.pt")
    os.utime(tmp_path / "a.pt", (1, 1))
    assert run_json(capsys, "import", tmp_path / "a.pt", path, "--quiet")["made"] == 2
    assert numbers(path) == [1, 3]


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_import_refuses_pickles_unless_they_are_trusted(
    tmp_path, path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    torch.save({"x": torch.ones(2), "y": Harmful()}, "a.pt")
    assert run("import", "a.pt", path, "--quiet") == 1
    error = capsys.readouterr().err
    assert "a.pt must have only tensors, containers and PyG's graphs" in error
    assert not (tmp_path / "harm").exists()
    run("import", "a.pt", path, "--quiet", "--trust")
    assert (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "content", [b"", b"hi", b"no pickle at all", b"\x80\x02.", b"PK"]
)
@pytest.mark.parametrize("trust", [[], ["--trust"]])
def test_import_of_a_file_that_is_none_is_one_line(
    tmp_path, path, capsys, content, trust
):
    (tmp_path / "a.pt").write_bytes(content)
    assert run("import", str(tmp_path / "a.pt"), path, "--quiet", *trust) == 1
    error = capsys.readouterr().err
    assert f"{tmp_path / 'a.pt'} must " in error and error.count("\n") == 1


def test_import_refuses_pickles_in_npz(tmp_path, path, capsys):
    np.savez(tmp_path / "a.npz", x=np.array([Harmful()], object))
    assert run("import", tmp_path / "a.npz", path, "--quiet") == 1
    assert "allow_pickle" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["none", "empty", "a.txt"])
def test_import_of_nothing_is_an_error(tmp_path, path, what, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("")
    assert run("import", tmp_path / what, path) == 1
    assert "source must" in capsys.readouterr().err
    assert not path.exists()


def test_import_reads_pygs_graphs_and_processed_datasets(tmp_path, path):
    pyg = pytest.importorskip("torch_geometric.data")
    data = [pyg.Data(**tensors(n), name=f"graph {n}") for n in (1, 2, 3)]
    torch.save(data[0], tmp_path / "one.pt")
    processed = tmp_path / "dataset" / "processed"
    processed.mkdir(parents=True)
    pyg.InMemoryDataset.save(data[1:], processed / "data.pt")
    torch.save("repr", processed / "pre_filter.pt")
    assert (
        run("import", tmp_path / "one.pt", tmp_path / "dataset", path, "--quiet") == 0
    )
    wanted = [graph(n) | {"name": f"graph {n}"} for n in (1, 2, 3)]
    assert_same(read(path), wanted)


def test_import_reads_pygs_hetero_graphs(tmp_path, path):
    pyg = pytest.importorskip("torch_geometric.data")
    data = pyg.HeteroData()
    data["paper"].x = torch.ones(2, 3)
    data["paper", "cites", "paper"].edge_index = torch.tensor([[0, 1], [1, 1]])
    data.y = torch.tensor([1.0])
    pyg.InMemoryDataset.save([data, data], tmp_path / "data.pt")
    assert run("import", tmp_path / "data.pt", path, "--quiet") == 0
    found = read(path)
    assert len(found) == 2 and set(found[0]) == {*list(HETERO)[:2], "y"}


# ---- export --------------------------------------------------------------------------


def test_exported_npz_files_import_as_the_same_graphs(tmp_path, path, capsys):
    half = {"h": np.ones(3, np.float16), "z": np.array([1 + 2j])}
    graphs = [HETERO | half, HETERO | half | {"text": "", "flag": False}]
    quiet(path, graphs)
    facts = run_json(capsys, "export", path, tmp_path / "out", "--quiet")
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == ["000000.npz", "000001.npz"]
    assert facts["bytes"] == sum(file.stat().st_size for file in files)
    assert run("import", tmp_path / "out", tmp_path / "again", "--quiet") == 0
    assert_same(read(tmp_path / "again"), graphs)


def test_export_writes_only_into_a_new_directory(tmp_path, cache, capsys):
    (tmp_path / "mine").write_text("")
    assert run("export", cache, tmp_path) == 1
    assert "target must be a new directory" in capsys.readouterr().err


def test_names_in_files_stand_for_keys():
    for key in HETERO:
        assert _cache_import.key_of(_cache_export.name_of(key)) == key
