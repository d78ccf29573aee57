"""examples/quickstart.ipynb: committed without outputs, installs from a wheel, and runs
from start to end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

import trainfast  # noqa: E402

PATH = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
STEPS = 60  # of each of the two runs

# Appended to the notebook: prints what the test compares.
LAST = """
import json

print(json.dumps({
    "report": str(report),
    "stats": trainfast.stats().to_dict(),
    "losses": [before.losses, after.losses],
    "optimizers": [type(run.optimizer).__module__ for run in (before, after)],
    "now": [torch.optim.AdamW.__module__, F.scaled_dot_product_attention.__module__],
    "graphs": [len(cache), sum(len(batch["y"]) for batch in batches)],
}))
"""


@pytest.fixture
def notebook():
    return nbformat.read(PATH, as_version=4)


def texts(cell):
    """What a cell has printed."""
    return "".join(o.text for o in cell.outputs if o.get("name") == "stdout")


def test_notebook_is_committed_without_outputs(notebook):
    nbformat.validate(notebook)
    assert notebook.metadata == {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) >= 6
    for cell in code:
        assert (cell.outputs, cell.execution_count) == ([], None), cell.id
    assert all(cell.metadata == {} for cell in notebook.cells)


@pytest.mark.slow
def test_notebook_runs(notebook, tmp_path, monkeypatch):
    where = [str(Path(trainfast.__file__).parent.parent)]
    where += filter(None, [os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(where))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # beside other tests, more are slower
    notebook.cells.append(nbformat.v4.new_code_cell(LAST))
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    seen = json.loads(texts(notebook.cells[-1]))
    cells = {cell.id: cell for cell in notebook.cells}

    assert seen["report"].startswith("patched adamw, amp, clip, attention (")
    assert "torch.optim.AdamW " in texts(cells["patch"])
    assert seen["optimizers"] == ["torch.optim.adamw", "trainfast.torch.optim.adamw"]
    theirs, ours = seen["losses"]
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert len(theirs) == STEPS
    assert sum(theirs[-10:]) / 10 < 0.7 * theirs[0]  # it learns
    calls = {name: sum(n.values()) for name, n in seen["stats"]["calls"].items()}
    assert (calls["adamw"], calls["clip"]) == (STEPS, STEPS)
    assert calls["attention"] > 0
    assert seen["graphs"] == [1000, 1000]
    assert not any(name.startswith("trainfast") for name in seen["now"])
    assert any("image/png" in o.get("data", {}) for o in cells["plot"].outputs)


# Runs the cell without trainfast and records pip's command instead of running pip.
INSTALL = """
import glob, json, subprocess, sys

sys.modules["trainfast"] = None  # makes its import fail
commands = []


def record(command):
    commands.append(command)
    del sys.modules["trainfast"]


subprocess.check_call = record
exec(sys.argv[1])
print(json.dumps([commands, trainfast.__name__]))
"""


def install(notebook, folder):
    source = next(cell.source for cell in notebook.cells if cell.id == "install")
    root = str(Path(trainfast.__file__).parent.parent)
    return subprocess.run(
        [sys.executable, "-c", INSTALL, source],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )


def test_notebook_installs_a_wheel_that_it_finds(notebook, tmp_path):
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "trainfast-0.1.0-cp311-abi3-linux_x86_64.whl").touch()
    done = install(notebook, tmp_path)
    assert done.returncode == 0, done.stderr
    [command], name = json.loads(done.stdout)
    assert command[1:3] == ["-m", "pip"]
    assert command[-4:] == ["--no-index", "--find-links", "dist", "trainfast"]
    assert name == "trainfast"


def test_notebook_without_a_wheel_says_what_to_attach(notebook, tmp_path):
    done = install(notebook, tmp_path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == ("ImportError: attach a data set that contains trainfast's wheel")
