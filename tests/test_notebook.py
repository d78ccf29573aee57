"""Notebooks are read as scripts, and run as they do in Jupyter."""

import json
import linecache
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from trainfast.cli import main
from trainfast.lint.report import lint_files
from trainfast.notebook import place_name, read_script

LOOP = """\
for step in range({steps}):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    losses.append(loss)
losses[-1]"""
SETUP = """\
!pip install \\
    torch
import torch
%matplotlib inline
model = torch.nn.Linear(8, 8)
opt = torch.optim.AdamW(model.parameters())
losses = []"""


def notebook(path, *cells, language="python"):
    """A cell is code, or (type, text)."""
    parts = [cell if isinstance(cell, tuple) else ("code", cell) for cell in cells]
    info = {"language_info": {"name": language}}
    written = [
        {"cell_type": kind, "metadata": {}, "source": text.splitlines(True)}
        for kind, text in parts
    ]
    path.write_text(json.dumps({"nbformat": 4, "metadata": info, "cells": written}))
    return path


def lines_of(path):
    """Its lines that are not empty, by number."""
    lines = read_script(path).split("\n")
    return {number: line for number, line in enumerate(lines, 1) if line.strip()}


def test_line_numbers_name_cell_and_line(tmp_path):
    long = "\n".join(f"x = {i}" for i in range(1500))
    cells = ["a = 1\n\nb = 2", ("markdown", "# words"), "c = 3", long, "d = 4\ne = 5"]
    path = notebook(tmp_path / "a.ipynb", *cells)
    lines = lines_of(path)
    assert {1001: "a = 1", 1003: "b = 2", 2001: "c = 3"}.items() <= lines.items()
    assert lines[3001] == "x = 0" and lines[4500] == "x = 1499"
    assert lines[4501] == "d = 4" and lines[4502] == "e = 5"  # moved by the long cell
    linecache.checkcache(str(path))
    assert linecache.getline(str(path), 1003) == "b = 2\n"


@pytest.mark.parametrize(
    "cell, want",
    [
        ("%%time\na = 1", {1002: "a = 1"}),
        ("%%capture out\na = 1", {1002: "a = 1"}),
        ("%%bash\nls", {}),
        ("%%writefile model.py\nimport torch", {}),
        ("%time a = f(1)", {1001: "a = f(1)"}),
        ("if a:\n    %time f()", {1001: "if a:", 1002: "    f()"}),
        ("%timeit f()", {1001: "pass"}),
        ("if a:\n    !ls", {1001: "if a:", 1002: "    pass"}),
        ("!pip install a \\\n  b \\\n  c\nd = 1", {1001: "pass", 1004: "d = 1"}),
        ("%cd -q /tmp/x y", {1001: "__import__('os').chdir('/tmp/x y')"}),
        ("%cd ~", {1001: f"__import__('os').chdir({os.path.expanduser('~')!r})"}),
        ("model.fit?", {1001: "pass"}),
        ("?model", {1001: "pass"}),
        ('s = """\n%cd x\n!no\n"""', {1001: 's = """', 1002: "%cd x", 1003: "!no"}),
        ("a = b\\\n%c", {1001: "a = b\\", 1002: "%c"}),
    ],
)
def test_lines_that_only_ipython_knows(tmp_path, cell, want):
    lines = lines_of(notebook(tmp_path / "a.ipynb", cell))
    assert {**want, 1: lines[1]}.items() <= lines.items()
    assert set(lines.values()) <= {*want.values(), lines[1], '"""'}
    compile(read_script(tmp_path / "a.ipynb"), "a", "exec")


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("", "is no notebook of format 4"),
        ("[1]", "is no notebook of format 4"),
        ('{"worksheets": []}', "is no notebook of format 4: 'cells'"),
        ('{"cells": [{"cell_type": "code", "source": [1]}]}', "is no notebook"),
        ('{"cells": [3], "metadata": {}}', "is no notebook"),
        ('{"cells": [], "metadata": {"language_info": {"name": "R"}}}', "in R, not"),
    ],
)
def test_other_files_are_no_notebooks(tmp_path, text, wrong):
    path = tmp_path / "a.ipynb"
    path.write_text(text)
    with pytest.raises(ValueError, match=wrong):
        read_script(path)


def test_faults_are_found_in_cells(tmp_path):
    notebook(tmp_path / "a.ipynb", SETUP, LOOP.format(steps=9))
    copies = tmp_path / ".ipynb_checkpoints"
    copies.mkdir()
    notebook(copies / "a-checkpoint.ipynb", SETUP, LOOP.format(steps=9))
    notebook(tmp_path / "r.ipynb", "x <- 1", language="R")
    report = lint_files([tmp_path])
    assert [(f.id, f.line) for f in report.findings] == [("loss-kept", 2006)]
    assert "line 3004 is the fourth line of the third code cell" in str(report)
    assert report.files == 1 and "r.ipynb: " in str(report)
    assert [each["path"] for each in report.to_dict()["skipped"]] == [
        str(tmp_path / "r.ipynb")
    ]


def run(*words, folder):
    return subprocess.run(
        [sys.executable, "-m", "trainfast", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=200,
    )


def test_notebook_runs_as_a_script(tmp_path):
    (tmp_path / "sub").mkdir()
    path = notebook(
        tmp_path / "a.ipynb",
        "import os, sys\n%cd sub\n!false",
        "display(os.path.basename(os.getcwd()), '__file__' in globals())",
        "def f():\n    raise KeyError(3)",
        "f()",
    )
    done = run("run", str(path), folder=tmp_path)
    assert done.stdout == "sub False\n" and done.returncode == 1
    assert "line 4001" in done.stderr and "KeyError: 3" in done.stderr
    notebook(path, "a = 1", "x = !ls")
    done = run("run", str(path), folder=tmp_path)
    assert done.returncode == 1 and "line 2001" in done.stderr


@pytest.mark.slow
def test_notebook_is_probed(tmp_path, capsys):
    pytest.importorskip("torch")
    loop = LOOP.format(steps=400).replace(
        "    loss.b", "    time.sleep(5e-3)\n    loss.b"
    )
    path = notebook(tmp_path / "a.ipynb", f"import time\n{SETUP}", loop)
    assert main(["diagnose", "--probe", "--json", str(path)]) == 1
    first = json.loads(capsys.readouterr().out)["findings"][0]
    assert (first["id"], first["line"]) == ("statement", 2003)
    notebook(path, SETUP, "for x in y:\n    pass")
    assert main(["diagnose", "--probe", str(path)]) == 1
    said = capsys.readouterr().err
    assert "line 2001, in <module>\n    for x in y:" in said and "NameError" in said


def test_deprecated_calls_are_found_in_cells(tmp_path, capsys):
    path = notebook(tmp_path / "a.ipynb", "!ls", "from torch.cuda.amp import autocast")
    main(["diagnose", "--json", "--source", str(path)])
    found = json.loads(capsys.readouterr().out)["findings"]
    assert any(f"{path}:2001" in json.dumps(finding) for finding in found)


@pytest.mark.slow
def test_memory_of_a_notebook_is_estimated(tmp_path, capsys):
    pytest.importorskip("torch")
    path = notebook(tmp_path / "a.ipynb", SETUP, LOOP.format(steps=3))
    assert main(["estimate-memory", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["total"] > 0


def test_cells_have_the_names_that_ipython_shows(monkeypatch):
    path = "/tmp/ipykernel_7/240.py"
    assert place_name("train.py", 3) == "train.py:3"
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert place_name(path, 3) == "line 3 of a cell"
    names = {path: ("Cell", "In[12]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=names.get))
    ipython = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert place_name(path, 3) == "line 3 of cell In[12]"
    assert place_name("/tmp/ipykernel_7/9.py", 3) == "line 3 of a cell"
