"""The rows of benchmarks.bench_small_calls: each can be made and called."""

import json

import pytest

pytest.importorskip("torch")
from benchmarks import bench_small_calls

NAMES = [row.name for row in bench_small_calls.ROWS]


def test_rows_have_names_of_their_own():
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.slow
def test_smoke_run_of_each_kind_writes_valid_json(tmp_path):
    kinds = {}
    for name in NAMES:
        kinds.setdefault(name.split("-b")[0], name)
    path = tmp_path / "small.json"
    words = ["--smoke", "--json", str(path), "--case", *kinds.values()]
    assert bench_small_calls.main(words) == 0
    cases = json.loads(path.read_text())["cases"]
    assert [case["name"] for case in cases] == [n for n in NAMES if n in kinds.values()]
    for case in cases:
        assert [line["role"] for line in case["lines"]] == ["rival", "ours"]
