"""The bar: where it is drawn, how often, and that it reads no GPU in a hurry."""

import io
import sys
from types import SimpleNamespace

import pytest

tqdm = pytest.importorskip("tqdm")

from tqdm import auto  # noqa: E402

import trainfast  # noqa: E402
from tests.log.far_tensors import far, use_fake_gpu  # noqa: E402
from trainfast.log import bar as bar_module  # noqa: E402


class Terminal(io.StringIO):
    def isatty(self):
        return True


def use_terminal(monkeypatch):
    """Called in the test: pytest sets sys.stderr anew after the fixtures."""
    monkeypatch.delenv("CI", raising=False)
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    return shown


def test_bar_in_a_terminal_is_drawn_seldom_and_removed(monkeypatch):
    terminal = use_terminal(monkeypatch)
    bar = trainfast.progress(range(50_000), "epoch 1")
    assert len(bar) == 50_000
    assert list(bar) == list(range(50_000)) == list(bar)
    text = terminal.getvalue()
    assert "epoch 1: " in text and text.count("\r") < 20 and "\n" not in text
    assert text.rstrip("\r").endswith(" ")  # wiped


@pytest.mark.parametrize("where", ["ci", "file", "closed", "without tqdm"])
def test_nothing_is_drawn_where_nobody_looks(where, monkeypatch):
    terminal = use_terminal(monkeypatch)
    if where == "ci":
        monkeypatch.setenv("CI", "true")
    elif where == "file":
        terminal.isatty = lambda: False
    elif where == "closed":
        monkeypatch.setattr(sys, "stderr", None)
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    bar = trainfast.progress([1, 2])
    for _ in bar:
        bar.postfix(loss=1.0)
    assert list(bar) == [1, 2] and terminal.getvalue() == ""


def test_notebook_has_a_bar(monkeypatch):
    terminal = use_terminal(monkeypatch)
    terminal.isatty = lambda: False
    notebook = type(sys)("IPython")
    notebook.get_ipython = lambda: SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setattr(bar_module, "find_spec", lambda name: None)
    assert bar_module._tqdm() == (tqdm.tqdm, 10.0)
    monkeypatch.setattr(bar_module, "find_spec", lambda name: "a spec")
    assert bar_module._tqdm() == (auto.tqdm, 0.5)
    notebook.get_ipython = lambda: None
    assert bar_module._tqdm()[0] is None


def test_postfix_shows_numbers_and_options_are_tqdms(monkeypatch):
    terminal = use_terminal(monkeypatch)
    monkeypatch.setattr(bar_module, "INTERVAL", 0)
    bar = trainfast.progress(iter([1, 2, 3]), total=3, mininterval=0, leave=True)
    for i in bar:
        bar.postfix(loss=i / 2, phase="warm")
    assert "3/3 " in terminal.getvalue()
    assert "loss=1.5, phase=warm" in terminal.getvalue()


def test_postfix_on_a_gpu_is_read_later(monkeypatch):
    terminal = use_terminal(monkeypatch)
    gpu = use_fake_gpu(monkeypatch)
    bar = trainfast.progress(range(6), mininterval=0)
    for i in bar:
        gpu.finished = i == 4
        bar.postfix(loss=far(i + 0.25))
        assert gpu.transfers == 1  # the interval allows one
    assert (gpu.reads, gpu.waits) == (0, 0)
    assert "loss=0.25" in terminal.getvalue() and "1.25" not in terminal.getvalue()


def test_bar_is_closed_where_the_loop_breaks(monkeypatch):
    use_terminal(monkeypatch)
    bar = trainfast.progress(range(10))
    for i in bar:
        bar.postfix(loss=1.0)
        if i == 2:
            break
    bar.postfix(loss=2.0)
    assert list(bar) == list(range(10))
