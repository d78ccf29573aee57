"""The chart in docs/images/ shows what is in benchmarks/results/."""

import copy
import xml.etree.ElementTree as ElementTree

import pytest

pytest.importorskip("torch")  # benchmarks.harness needs it

from benchmarks import chart


def described(path):
    """The description inside an SVG file."""
    root = ElementTree.parse(path).getroot()
    return root.find(".//{http://purl.org/dc/elements/1.1/}description").text


def test_committed_chart_shows_the_results():
    # The text and not the bytes, which differ between versions of matplotlib.
    assert described(chart.OUTPUT) == chart.description(chart.load())


def test_chart_shows_a_case_where_trainfast_is_slower():
    assert min(bar.ratio for bar in chart.bars(chart.load())) < 1


def test_another_ratio_changes_the_description():
    reports = chart.load()
    others = copy.deepcopy(reports)
    line = others["amp"]["cases"][4]["lines"][2]
    assert (others["amp"]["cases"][4]["name"], line["contender"]) == chart.ROWS[2][1:3]
    line["times_ours"]["median"] = 7.0
    assert "7.0\N{MULTIPLICATION SIGN} (torch, fused)" in chart.description(others)
    assert chart.description(others) != chart.description(reports)


def test_same_results_draw_the_same_bytes(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        assert chart.main(["--output", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert described(tmp_path / "a.svg") == chart.description(chart.load())


@pytest.mark.parametrize(
    ("ratio", "text"), [(0.4444, "0.44"), (1.6, "1.6"), (19.94, "19.9"), (87.2, "87")]
)
def test_ratios_have_two_or_three_digits(ratio, text):
    assert chart.many(ratio) == f"{text}\N{MULTIPLICATION SIGN}"
