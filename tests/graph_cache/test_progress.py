"""The progress bar of a build, with tqdm, in a notebook, and without tqdm."""

import sys
import types

import pytest

from tests.graph_samples import graph, quiet
from trainfast.graph_cache import build


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


def test_progress_is_shown_only_if_asked_for(path, capsys):
    pytest.importorskip("tqdm")
    build(path, range(5), graph)
    shown = capsys.readouterr()
    assert "5/5" in shown.err
    assert shown.out == ""
    quiet(path, range(5), graph)
    assert capsys.readouterr() == ("", "")


def test_bar_is_of_tqdm_auto(path, monkeypatch):
    """Which is the one of a notebook there."""
    bars = []

    class Bar:
        disable = False

        def __init__(self, total, **options):
            self.total, self.n, self.initial, self.open = total, 0, 0, True
            bars.append(self)

        def update(self, n):
            self.n += n

        def close(self):
            self.open = False

    auto = types.ModuleType("tqdm.auto")
    auto.tqdm = Bar
    monkeypatch.setitem(sys.modules, "tqdm", types.ModuleType("tqdm"))
    monkeypatch.setitem(sys.modules, "tqdm.auto", auto)
    build(path, range(3), graph)
    build(path, range(5), graph)
    assert [vars(bar) for bar in bars] == [
        {"total": 3, "n": 3, "initial": 0, "open": False},
        {"total": 5, "n": 5, "initial": 3, "open": False},
    ]


def test_without_tqdm_the_build_is_silent(path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert build(path, range(3), graph).made == 3
    assert capsys.readouterr() == ("", "")
