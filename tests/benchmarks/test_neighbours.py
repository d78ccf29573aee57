"""benchmarks.bench_neighbours: every installed contender finds the same edges."""

import json

import numpy as np
import pytest

from benchmarks import bench_neighbours, table


def test_benchmark_runs_and_prints_its_aims(tmp_path, capsys):
    path = tmp_path / "neighbours.json"
    assert bench_neighbours.main(["--smoke", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [case["name"] for case in report["cases"]] == [
        problem.name for problem in bench_neighbours.problems()
    ]
    for case in report["cases"]:
        assert case["edges"] > 0
        roles = {line["role"] for line in case["lines"]}
        assert {"ours", "bound"} <= roles
    rows = table.KINDS["neighbours"][0](report)
    assert len(rows) == 1 + len(report["cases"])
    printed = capsys.readouterr().out
    if "scipy pairs" in printed:
        assert "(aim 4)" in printed and "(no aim)" in printed


def test_problems_have_the_neighbours_that_their_titles_say():
    setup = bench_neighbours.Setup(bench_neighbours.problems()[0], 1)
    for edges, points in zip(setup.edges, setup.flat, strict=True):
        assert 60 < edges.shape[1] / len(points) < 76


def test_batches_of_a_turn_differ_and_each_one_is_built():
    setup = bench_neighbours.Setup(bench_neighbours.problems()[1], 1)
    found = []
    contender = setup.contender(
        "it", lambda points: found.append(points) or setup.find(points), setup.flat
    )
    found.clear()
    contender.run()
    assert len(found) == contender.calls == 32
    assert len({points.tobytes() for points in found}) == 32


def test_contender_that_finds_other_edges_is_refused():
    setup = bench_neighbours.Setup(bench_neighbours.problems()[2], 1)

    def check(change):
        setup.contender("loose", lambda points: change(setup.find(points)), setup.flat)

    def replace_one(edges):
        edges[:, 0] = edges[:, 1]
        return edges

    check(lambda edges: edges[:, ::-1])
    with pytest.raises(RuntimeError, match="loose must find int64"):
        check(lambda edges: edges[:, 1:])
    with pytest.raises(RuntimeError, match="loose must find the edges"):
        check(replace_one)
    with pytest.raises(RuntimeError, match="int32"):
        check(lambda edges: edges.astype(np.int32))
