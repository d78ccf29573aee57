"""build_from_points: graphs from positions, against a loop over pairs of points."""

import os
import signal
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from trainfast import graph_cache
from trainfast.graph_cache import build_from_points

FRAMES, TRACKS = 4, 6


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


def plays(n, dtype=np.float32, seed=0):
    random = np.random.default_rng(seed)
    start = random.random((n, 1, TRACKS, 2)) * 20
    steps = random.normal(size=(n, FRAMES, TRACKS, 2)).cumsum(1)
    return (start + steps).astype(dtype).reshape(n, FRAMES * TRACKS, 2)


FRAME = np.repeat(np.arange(FRAMES), TRACKS)
TRACK = np.tile(np.arange(TRACKS), FRAMES)


def expected(pos, r, frame=None, track=None, most=None):
    """{(neighbour, centre): (distance, kind)} by a loop over all pairs."""
    edges = {}
    pos = pos.astype(np.float64)
    for i in range(len(pos)):
        near = []
        for j in range(len(pos)):
            gap = pos[j] - pos[i]
            square = (gap * gap).sum()
            same_frame = frame is None or frame[i] == frame[j]
            if i != j and same_frame and square <= r * r:
                near.append((square, j))
            same_track = track is not None and track[i] == track[j]
            if same_track and abs(int(frame[i]) - int(frame[j])) == 1:
                edges[j, i] = (np.sqrt(square), 1)
        for square, j in sorted(near)[:most]:
            edges[j, i] = (np.sqrt(square), 0)
    return edges


def found(graph):
    kinds = graph.get("edge_type", np.zeros(graph["edge_index"].shape[1]))
    rows = zip(graph["edge_index"].T, graph["edge_attr"][:, 0], kinds, strict=True)
    edges = {(int(j), int(i)): (float(d), int(kind)) for (j, i), d, kind in rows}
    assert len(edges) == graph["edge_index"].shape[1]  # none is there twice
    return edges


def assert_edges(graph, wanted):
    got = found(graph)
    assert got.keys() == wanted.keys()
    for edge, (distance, kind) in wanted.items():
        assert got[edge] == (pytest.approx(distance, rel=1e-6), kind)


def read(path):
    with graph_cache.open(path) as cache:
        return [cache[i] for i in range(len(cache))]


@pytest.mark.parametrize("most", [None, 2])
def test_frames_and_tracks_become_two_kinds_of_edges(path, most):
    points = plays(5)
    build_from_points(
        path, points, r=6, frame=FRAME, track=TRACK, max_num_neighbors=most
    )
    graphs = read(path)
    assert len(graphs) == 5
    kinds = 0
    for pos, graph in zip(points, graphs, strict=True):
        np.testing.assert_array_equal(graph["pos"], pos)
        assert graph["edge_attr"].dtype == np.float32
        assert_edges(graph, expected(pos, 6, FRAME, TRACK, most))
        assert np.array_equal(np.sort(graph["edge_type"]), graph["edge_type"])
        kinds |= 1 << int(graph["edge_type"].max()) | 1 << int(graph["edge_type"].min())
    assert kinds == 3


def test_points_without_frames(path):
    points = plays(3, np.float64)
    build_from_points(path, points, r=5)
    for pos, graph in zip(points, read(path), strict=True):
        assert "edge_type" not in graph
        assert_edges(graph, expected(pos, 5))


def test_points_in_the_order_of_tracks(path):
    points = plays(4)
    order = np.argsort(TRACK, kind="stable")  # frames go 0, 1, .. for each track
    build_from_points(
        path, points[:, order], r=6, frame=FRAME[order], track=TRACK[order]
    )
    for pos, graph in zip(points, read(path), strict=True):
        wanted = expected(pos[order], 6, FRAME[order], TRACK[order])
        assert_edges(graph, wanted)


def test_points_that_are_not_there_become_no_nodes(path):
    points = plays(6)
    mask = np.random.default_rng(1).random(points.shape[:2]) < 0.7
    mask[2] = False  # a graph without points
    points[~mask] = np.nan
    number = np.arange(points[..., 0].size).reshape(points.shape[:2])
    target = np.arange(6 * 3, dtype=np.float32).reshape(6, 3)
    build_from_points(
        path,
        points,
        r=7,
        frame=FRAME,
        track=TRACK,
        mask=mask,
        node_fields={"number": number, "track": TRACK},
        graph_fields={"y": target},
    )
    for i, graph in enumerate(read(path)):
        kept = mask[i]
        np.testing.assert_array_equal(graph["pos"], points[i][kept])
        np.testing.assert_array_equal(graph["number"], number[i][kept])
        np.testing.assert_array_equal(graph["track"], TRACK[kept])
        np.testing.assert_array_equal(graph["y"], target[i])
        assert_edges(graph, expected(points[i][kept], 7, FRAME[kept], TRACK[kept]))


def test_ragged_graphs(path):
    sizes = [5, 0, 40, 1, 17]
    ptr = np.concatenate(([0], np.cumsum(sizes)))
    points = np.random.default_rng(2).random((ptr[-1], 3)) * 4
    build_from_points(path, points, r=1.5, ptr=ptr)
    for g, graph in enumerate(read(path)):
        assert_edges(graph, expected(points[ptr[g] : ptr[g + 1]], 1.5))


@pytest.mark.forks
def test_workers_and_chunks_change_nothing(path, tmp_path, monkeypatch):
    points = plays(40)
    build_from_points(path, points, r=6, frame=FRAME, track=TRACK)
    monkeypatch.setattr("trainfast.graph_cache.points._CHUNK_NODES", 3 * len(FRAME) + 1)
    other = tmp_path / "other"
    build_from_points(other, points, r=6, frame=FRAME, track=TRACK, workers=2)
    for a, b in zip(read(path), read(other), strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            np.testing.assert_array_equal(value, b[key])


def test_only_new_graphs_are_made(path):
    points = plays(30)
    first = build_from_points(path, points[:20], r=6, transform_id="plays")
    again = build_from_points(path, points, r=6, transform_id="plays")
    assert (first.made, again.made, again.reused) == (20, 10, 20)
    other = build_from_points(path, points, r=3, transform_id="nearer")
    assert other.made == 30


def test_a_killed_build_resumes(path):
    script = """
import sys
sys.path.insert(0, {tests!r})
from trainfast.graph_cache import points
from graph_cache.test_points import plays
points._CHUNK_NODES = 1  # one graph at a time
make = points._Graphs._make
def slowly(self, first, end):
    print(first, flush=True)
    return make(self, first, end)
points._Graphs._make = slowly
points.build = lambda *a, **k: real(*a, commit_every=10, **k)
real = __import__("trainfast.graph_cache", fromlist=["build"]).build
points.build_from_points({path!r}, plays(3000), r=6.0, transform_id="p", progress=False)
"""
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    code = script.format(tests=tests, path=str(path))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    while int(child.stdout.readline() or 3000) < 100:
        pass
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    report = build_from_points(path, plays(3000), r=6.0, transform_id="p")
    assert report.graphs == 3000
    assert 50 <= report.reused < 3000
    for pos, graph in list(zip(plays(3000), read(path), strict=True))[::250]:
        assert_edges(graph, expected(pos, 6.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"points": np.zeros((4, 2))}, "points must have shape"),
        ({"ptr": [0, 2]}, "points must have shape"),
        ({"points": np.zeros((4, 2)), "ptr": [0, 5, 4]}, "ptr must not decrease"),
        ({"points": np.zeros((4, 2)), "ptr": [1, 4]}, "ptr must be a vector"),
        ({"frame": np.zeros(3, int)}, "frame must have shape"),
        ({"frame": np.zeros(24)}, "frame must be an integer for each point"),
        ({"mask": np.zeros(24, int)}, "mask must be bool for each point"),
        ({"track": TRACK}, "track must be given with frame"),
        ({"frame": FRAME, "track": TRACK * 0}, "must be in a frame once"),
        ({"graph_fields": {"y": np.zeros(9)}}, "must have a row for each of 3 graphs"),
        ({"node_fields": {"x": np.zeros((3, 5))}}, r"node_fields\['x'\] must have"),
        ({"points": np.full((3, 24, 2), np.nan)}, "finite.*of the points of graphs 0"),
        ({"r": -1.0}, "r must be >= 0"),
    ],
)
def test_bad_arguments_are_refused(path, options, message):
    arguments = {"points": plays(3), "r": 6.0, **options}
    points = arguments.pop("points")
    with pytest.raises((ValueError, graph_cache.BuildError), match=message):
        build_from_points(path, points, **arguments)


def test_what_is_the_same_for_all_graphs_is_not_repeated(path, monkeypatch):
    monkeypatch.setattr("trainfast.graph_cache.points._CHUNK_NODES", 500)
    n = 3000
    points = plays(n)
    fields = {"number": np.arange(len(FRAME))}
    mask = np.ones(len(FRAME), bool)
    mask[5] = False
    graph_cache.build(path.with_name("warm"), [{"x": np.zeros(3)}], progress=False)
    tracemalloc.start()
    build_from_points(
        path, points, r=0, frame=FRAME, track=TRACK, mask=mask, node_fields=fields,
        progress=False,
    )  # fmt: skip
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    one = 8 * n * len(FRAME)  # bytes of an array of integers for all points
    assert peak < 2 * one
    with graph_cache.open(path) as cache:
        assert cache[n - 1]["number"].tolist() == [*range(5), *range(6, len(FRAME))]
