"""Small graphs, and whole caches of them, for tests."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np

from trainfast import _core
from trainfast.graph_cache import Schema, build

ROOT = Path(__file__).resolve().parents[1]


def graph(n, seed=0):
    """A graph with n nodes and 2 n edges."""
    rng = np.random.default_rng([n, seed])
    return {
        "x": rng.normal(size=(n, 3)).astype(np.float32),
        "edge_index": rng.integers(0, max(n, 1), size=(2, 2 * n)),
        "y": np.array([n], np.float32),
    }


def read(path, **options):
    """All graphs in the cache as dicts."""
    cache = _core.GraphCache(str(path), **options)
    assert cache.verify(0, len(cache), False) == []
    if cache.schema is None:
        return []
    keys = Schema.decode(cache.schema).keys
    graphs = [dict(zip(keys, cache.get(i))) for i in range(len(cache))]
    return [{k: v for k, v in g.items() if v is not None} for g in graphs]


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        assert one.keys() == other.keys()
        for key in one:
            assert np.asarray(one[key]).dtype == np.asarray(other[key]).dtype, key
            np.testing.assert_array_equal(one[key], other[key])


def numbers(path):
    return [int(g["y"][0]) for g in read(path)]


def quiet(path, inputs, *args, **options):
    return build(path, inputs, *args, progress=False, **options)


def segments(path):
    return sorted(file.name for file in Path(path).glob("segment-*"))


def run_python(code, **options):
    """Runs code in a process of its own, which finds the tests' modules."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(), **options
    )


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT)}
