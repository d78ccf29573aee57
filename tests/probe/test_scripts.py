"""The probe on whole scripts, whose faults sleep: a busy machine cannot hide them."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from tests.probe.test_sandbox import processes_with, snapshot
from trainfast.cli import main
from trainfast.launch.environment import KEEP_MEMORY
from trainfast.probe import run
from trainfast.probe.diagnosis import diagnose
from trainfast.probe.findings import findings, rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        run.best_sandbox() is None, reason="no sandbox works on this machine"
    ),
]

COMPUTE_BOUND = """\
import torch
model = torch.nn.Linear(1024, 1024, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(512, 1024)
for step in range(3000):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""

SMALL_LAYERS = """\
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(4000, 64)
for step in range(10**6):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""

SCRIPT = """\
import os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        time.sleep({item})
        return torch.ones(4), i % 2


class Model(torch.nn.Linear):
    def forward(self, x):
        time.sleep({step} * len(x) / 8)
        return super().forward(x)


model = Model(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
os.makedirs("out", exist_ok=True)
for epoch in range({epochs}):
    for x, y in DataLoader(Rows(), batch_size=8):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        {statement}
    {epoch_end}
"""
LINE_OF_STATEMENT = 29


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a script of this text and returns its path."""
    monkeypatch.setattr(run, "SECONDS", 3.0)

    def write(item=0, step=0.004, statement="pass", epoch_end="pass", epochs=1000):
        text = SCRIPT.format(
            item=item,
            step=step,
            statement=statement,
            epoch_end=epoch_end,
            epochs=epochs,
        )
        path = tmp_path / "train.py"
        path.write_text(text)
        return str(path)

    return write


def first(report):
    if not report.findings and os.getloadavg()[0] > len(os.sched_getaffinity(0)):
        pytest.skip("other programs use this machine: the probe is not sure")
    assert report.findings, report
    return report.findings[0]


def test_slow_data_set_is_found(script):
    found = first(diagnose(script(item=0.003)))
    assert (found.id, found.exact) == ("data", False)
    assert found.file.endswith("train.py") and found.line == 10
    assert 1.3 < found.low <= found.gain <= found.high


TRAINER = """\
import time
import torch
from torch.utils.data import DataLoader


def slow(rows):
    time.sleep(0.01)
    return torch.utils.data.default_collate(rows)


class Trainer:
    def __init__(self, model, data):
        self.model, self.data = model, data

    def run(self):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        loader = DataLoader(
            self.data, batch_size=8, collate_fn=slow
        )
        while True:
            for (x,) in loader:
                optimizer.zero_grad()
                self.model(x).sum().backward()
                optimizer.step()
"""


def test_loader_is_found_in_the_file_of_a_trainer(tmp_path):
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "loop.py").write_text(TRAINER)
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "from trainer.loop import Trainer\n"
        "data = TensorDataset(torch.randn(640, 4))\n"
        "Trainer(torch.nn.Linear(4, 2), data).run()\n"
    )
    child = run.child(str(script), switches=["data"], seconds=1)
    place = (
        str(package / "loop.py"),
        TRAINER[: TRAINER.index("DataLoader(")].count("\n"),
    )
    assert child["lines"]["data"] == [5]  # the script's own: where it calls the trainer
    (found,) = findings(rows([child]), [child], str(script))
    assert (found.id, found.file, found.line) == ("data", place[0], place[1] + 1)


def test_slow_statement_is_found_with_its_line(script):
    found = first(diagnose(script(statement="time.sleep(0.02)")))
    assert (found.id, found.line) == ("statement", LINE_OF_STATEMENT)
    assert found.low > 1.3


def test_rare_statement_is_found_by_its_frequency(script):
    found = first(diagnose(script(epoch_end="time.sleep(0.2)")))
    assert (found.id, found.line) == ("statement", LINE_OF_STATEMENT + 1)
    assert found.low > 1.3


@pytest.mark.parametrize("kind", [run.NAMESPACES, run.SYSTEM_CALLS])
def test_saving_is_found_and_nothing_is_saved(kind, script, tmp_path, monkeypatch):
    if not run.has(kind):
        pytest.skip("this sandbox does not work on this machine")
    monkeypatch.setattr(run, "best_sandbox", lambda: kind)
    save = "time.sleep(0.01) or torch.save(model.state_dict(), 'out/model.pt')"
    path = script(statement=f"(lambda: {save})()")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.pt").write_bytes(b"weights of a week")
    before = snapshot(tmp_path)
    first(diagnose(path))
    assert snapshot(tmp_path) == before


SAVES = """\
import os
import time
import torch

class Weights:
    def __reduce__(self):
        time.sleep(0.004)
        os.environ["COLD"] = "1"
        return (Weights, ())

class Model(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.008 if os.environ.pop("COLD", None) else 0.004)
        return super().forward(x)

model = Model(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10**6):
    optimizer.zero_grad()
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
    torch.save(Weights(), {path})
"""


@pytest.mark.parametrize(
    "path, gain", [("'last.pt'", 12 / 4), ("f'{step}.pt'", 12 / 8)]
)
def test_saves_that_slow_the_step_behind_them(path, gain, tmp_path):
    """Files that nothing replaces may be read or removed: these are always written."""
    script = tmp_path / "train.py"
    script.write_text(SAVES.replace("{path}", path))
    found = first(diagnose(str(script)))
    assert (found.id, found.exact) == ("save", False)
    assert found.gain == pytest.approx(gain, rel=0.2)


GRAPHS = """\
import time
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

torch.set_num_threads(1)
graph = Data(x=torch.ones(3, 4), edge_index=torch.tensor([[0, 1], [1, 2]]))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(1000):
    for batch in DataLoader([graph] * 64, batch_size=8):
        time.sleep(0.002)
        optimizer.zero_grad()
        model(batch.x).sum().backward()
        optimizer.step()
"""


def test_without_a_sandbox_nothing_runs_unless_asked(script, monkeypatch, tmp_path):
    left = "__import__('subprocess').Popen(['sleep', '1000.25'])"
    path = script(epoch_end=f"epoch == 0 and {left}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "best_sandbox", lambda: None)
    with pytest.raises(run.ProbeError, match="TRAINFAST_SANDBOX=none"):
        diagnose(path)
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("TRAINFAST_SANDBOX", "docker")
    with pytest.raises(run.ProbeError, match="must be auto or none, got 'docker'"):
        diagnose(path)
    monkeypatch.setenv("TRAINFAST_SANDBOX", "none")
    assert diagnose(path).facts["mfu"] > 0
    assert (tmp_path / "out").exists()
    assert not processes_with("1000.25")


def test_graph_cache_leaves_nothing_without_a_sandbox(monkeypatch, tmp_path):
    pytest.importorskip("torch_geometric")
    path, files = tmp_path / "graphs.py", tmp_path / "files"
    path.write_text(GRAPHS)
    files.mkdir()
    monkeypatch.setenv("TRAINFAST_SANDBOX", "none")
    monkeypatch.setenv("TMPDIR", str(files))
    monkeypatch.setattr(tempfile, "tempdir", None)  # what it has read before
    result = run.child(str(path), switches=["graph cache"], seconds=1.0)
    assert {block[1] for block in result["blocks"]} == {"base", "graph cache"}
    assert not list(files.iterdir())


def test_workers_that_start_anew_in_long_epochs_are_found(script):
    path = script(step=0.004)
    with open(path) as file:
        text = file.read()
    slow_start = "num_workers=1, worker_init_fn=lambda worker: time.sleep(0.5)"
    text = text.replace("return 64", "return 560").replace(
        "batch_size=8", f"batch_size=8, {slow_start}"
    )
    with open(path, "w") as file:
        file.write(text)
    found = first(diagnose(path))
    assert (found.id, found.exact) == ("worker-restart", False)
    assert "persistent_workers" in found.fix and found.gain > 1.3


def test_clean_script_has_no_finding(script):
    report = diagnose(script(step=0.01))
    if report.findings and os.getloadavg()[0] > len(os.sched_getaffinity(0)):
        pytest.skip("other programs use this machine: the probe is not sure")
    assert report.findings == []
    assert 0 < report.facts["mfu"] < 0.5
    assert any("matrix-product rate" in note for note in report.notes)
    assert not any("compute-bound" in note for note in report.notes)


def test_product_of_large_matrices_is_compute_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SECONDS", 3.0)
    path = tmp_path / "train.py"
    path.write_text(COMPUTE_BOUND)
    report = diagnose(str(path))
    # Of x, W and the gradient of W: the input needs no gradient.
    assert report.facts["flops"] == 2 * 2 * 512 * 1024 * 1024
    busy = os.getloadavg()[0] > len(os.sched_getaffinity(0))
    if report.findings or busy or report.facts["spread"] > 1.3:
        pytest.skip("other programs use this machine: the probe is not sure")
    assert report.facts["mfu"] > 0.5
    assert any("compute-bound" in note for note in report.notes)


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2 or torch.cuda.is_available(),
    reason="needs two cores, and a step on the CPU",
)
def test_threads_that_wait_beside_another_program_are_found(tmp_path, monkeypatch):
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS"):  # conftest.py sets the former
        monkeypatch.delenv(name, raising=False)
    for name, value in KEEP_MEMORY.items():  # page faults vary beside other programs
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run, "SECONDS", 4.0)
    path = tmp_path / "train.py"
    path.write_text(SMALL_LAYERS)
    # It holds one core at all times, so that each parallel loop waits for its thread
    # there. A second copy of the script would sleep now and then.
    busy = f"import os; os.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}])"
    other = subprocess.Popen([sys.executable, "-c", f"{busy}\nwhile True: pass"])
    try:
        for _ in range(3):  # a third program may run meanwhile: then it must say so
            report = diagnose(str(path))
            if report.findings:
                break
            assert "no verdict, as steps without a change vary too much" in str(report)
    finally:
        other.kill()
        other.wait()
    assert report.findings, "unsure in three runs: other programs use this machine"
    found = report.findings[0]
    assert (found.id, found.exact) == ("threads", True), report.findings
    assert found.fix.startswith("torch.set_num_threads(1)")


def test_script_that_ends_soon_runs_again(script):
    result = run.child(script(epochs=2), seconds=2.0)
    assert sum(whole for _, _, whole in result["runs"]) >= 2
    assert len(result["blocks"]) >= 6


def test_error_of_the_script_is_shown_as_python_shows_it(script):
    with pytest.raises(run.ProbeError) as caught:
        diagnose(script(statement="x[100]"))
    text = str(caught.value)
    assert f'train.py", line {LINE_OF_STATEMENT}, in <module>' in text
    assert text.endswith(
        "IndexError: index 100 is out of bounds for dimension 0 with size 8"
    )
    assert "trainfast/torch/probe/child.py" not in text


def test_script_that_does_not_train_is_named(tmp_path):
    path = tmp_path / "hello.py"
    path.write_text("print('hello')\n")
    with pytest.raises(run.ProbeError, match="ended without an optimizer step"):
        diagnose(str(path))


def test_script_that_takes_too_long_is_ended_and_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_LONGEST", 1.0)
    path = tmp_path / "train.py"
    path.write_text("import time\ntime.sleep(1000)\n")
    with pytest.raises(run.ProbeError, match="was ended after 1 s"):
        diagnose(str(path))


UPDATED_BY_HAND = """\
import time
import torch
model = torch.nn.Linear(4, 2)
for step in range(10**9):
    model.zero_grad()
    model(torch.ones(8, 4)).sum().backward()
    time.sleep(0.004)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)
"""


def test_loop_without_a_torch_optimizer_is_probed(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SECONDS", 2.0)
    path = tmp_path / "train.py"
    path.write_text(UPDATED_BY_HAND)
    found = first(diagnose(str(path)))
    assert (found.id, found.line) == ("statement", 7)


SMALL_BATCHES = """\
import torch

torch.set_num_threads(1)


class Net(torch.nn.Sequential):
    def forward(self, x, y):
        return (super().forward(x) - y).square().mean()


model = Net(*(torch.nn.Linear(32, 32) for _ in range(24)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
while True:
    for _ in range(4):
        x = torch.randn(1, 32, requires_grad=True)
        torch.autograd.grad(model[0](x).sum(), x)
        model(x, torch.ones(1, 32)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_small_batches_without_a_loader_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SECONDS", 2.0)
    path = tmp_path / "train.py"
    path.write_text(SMALL_BATCHES)
    report = diagnose(str(path))
    assert report.facts["flops"] > 4 * 24 * 6 * 32 * 32
    assert first(report).id == "batch" and first(report).gain > 1.5


def test_neither_bare_except_nor_finally_breaks_the_probe(tmp_path, script):
    head, _, loop = Path(script()).read_text().partition("for epoch")
    lines = "\n".join("        " + line for line in f"for epoch{loop}".splitlines())
    path = tmp_path / "train.py"
    path.write_text(
        f"{head}while True:\n    try:\n{lines}\n    except:\n        pass\n"
        "    finally:\n        time.sleep(100)\n"
    )
    result = run.child(str(path), seconds=2.0)
    assert result["blocks"] and result["seconds"] < 60


@pytest.mark.parametrize(
    ("asked", "own", "seen"),
    [(False, None, None), (True, None, str(16 << 30)), (True, "4096", "4096")],
)
def test_memory_is_kept_where_asked_and_the_user_did_not_choose(
    script, monkeypatch, asked, own, seen
):
    name = "MALLOC_TRIM_THRESHOLD_"
    monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(name, own)
    statement = f"1 / (os.environ.get({name!r}) == {seen!r})"
    path = script(item=0.001, statement=statement)
    run.child(path, switches=["data"], seconds=0.5, keep_memory=asked)


def test_switch_that_breaks_the_script_is_listed(script):
    """A script that is not content with batches that it has seen."""
    check = "seen.append(x.sum().item()) or 1 / (len(set(seen[-9:])) > 8)"
    path = Path(script(item=0.002, statement=check))
    text = path.read_text().replace("torch.ones(4)", "torch.rand(4)")
    path.write_text(text.replace("model = ", "seen = list(range(-9, 0))\nmodel = "))
    result = run.child(str(path), seconds=2.0)
    assert "ZeroDivisionError" in result["failed"]["data"]
    assert "data" not in {name for _, name, _, _ in result["blocks"]}
    assert len(result["blocks"]) >= 6


def test_command_line_without_a_script_says_what_it_needs(capsys):
    for words in (["train.py"], ["--probe"], ["--deep"]):
        with pytest.raises(SystemExit) as end:
            main(["diagnose", *words])
        assert end.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("usage: ")
        assert error.endswith("error: pass --probe and a training script\n")


def test_script_that_cannot_be_probed_is_a_problem(tmp_path, capsys):
    assert main(["diagnose", "--probe", str(tmp_path / "missing.py")]) == 1
    assert "missing.py" in capsys.readouterr().err


def test_command_line_prints_json_and_says_by_its_status(script, capsys):
    status = main(["diagnose", "--probe", "--json", script(item=0.003)])
    report = json.loads(capsys.readouterr().out)
    if not report["findings"] and os.getloadavg()[0] > len(os.sched_getaffinity(0)):
        pytest.skip("other programs use this machine: the probe is not sure")
    assert status == 1
    assert report["findings"][0]["id"] in ("data", "workers")
    keys = {"id", "file", "line", "gain", "low", "high", "exact", "fix"}
    assert keys <= set(report["findings"][0])
