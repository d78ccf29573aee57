"""Two writers that are killed while they write, TRAINFAST_KILL_ROUNDS (3) times.

Each says how far it has committed; after the last round all of that must be there.
"""

import inspect
import os
import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from graph_samples import environment

from trainfast import graph_cache as gc

ROUNDS = int(os.environ.get("TRAINFAST_KILL_ROUNDS", "3"))
OF_A_WRITER = 1_000_000  # numbers
KILL_AFTER = 0.2  # seconds after the first commit, at most

WRITE = """
    import sys
    import numpy as np
    from trainfast.graph_cache import Writer
    path, number = sys.argv[1], int(sys.argv[2])
    writer = Writer(path)
    while True:
        writer.append(make(number))
        number += 1
        if number % 8 == 0:
            writer.commit()
            print(number, flush=True)
"""


def make(number):
    rng = np.random.default_rng(number)
    nodes = int(rng.integers(1, 9))
    edges = rng.integers(0, nodes, (2, nodes))
    return {"x": rng.random((nodes, 3)), "edge_index": edges, "y": number}


def start(path, first):
    code = inspect.getsource(make) + textwrap.dedent(WRITE)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path), str(first)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def test_killed_writers_lose_nothing_they_committed(tmp_path, record_property):
    path = tmp_path / "cache"
    delay = random.Random(0)
    promised = set()
    for i in range(ROUNDS):
        firsts = [(2 * i + k) * OF_A_WRITER for k in range(2)]
        writers = [start(path, first) for first in firsts]
        begun = [writer.stdout.readline() for writer in writers]
        with pytest.raises(subprocess.TimeoutExpired):
            writers[0].wait(delay.random() * KILL_AFTER)
        for writer in writers:
            writer.kill()
        for first, writer, line in zip(firsts, writers, begun):
            said = line + writer.communicate()[0]
            # Of a line that was cut off by the kill nothing is believed.
            last = said[: said.rindex("\n")].splitlines()[-1]
            promised.update(range(first, int(last)))
    with pytest.raises(OSError, match=r"left without closing it: \d+ graphs are safe"):
        gc.open(path)
    gc.Writer(path).close()  # adopts them
    found = {}
    cache = gc.open(path)
    assert cache.verify()
    for graph in cache:
        found[graph["y"]] = graph
    assert len(found) == len(cache)  # none twice
    assert promised <= found.keys()
    for number, graph in found.items():
        truth = make(number)
        assert all(np.array_equal(graph[key], truth[key]) for key in truth)
    record_property("killed writers", 2 * ROUNDS)
    record_property("graphs", len(found))
