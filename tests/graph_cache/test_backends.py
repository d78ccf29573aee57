"""The graph cache under each backend that is forced, also those without its kernels."""

import os
import subprocess
import sys

import pytest

LIBRARIES = {
    name: os.environ.get(name)
    for name in ("TRAINFAST_SIMT_LIBRARY", "TRAINFAST_WIDE_LIBRARY")
}
NAMES = ["avx512", "avx2", "scalar", "wide", "simt", "cuda"]

# Builds, reads, collates and checks, and prints a digest of all that came out.
USE = """
import hashlib, sys, tempfile
from pathlib import Path
import numpy as np
import trainfast
from trainfast import _core
from trainfast import graph_cache as gc

def use(path):
    digest = hashlib.sha256()
    def make(i):
        rng = np.random.default_rng(i)
        n = i % 7 + 1
        return {
            "x": rng.standard_normal((n, 3)).astype("f"),
            "edge_index": rng.integers(0, n, (2, 3 * n)),
            "small": rng.integers(-200, 200, n),
            "label": i,
        }
    with gc.Writer(path) as writer:
        for i in range(50):
            writer.append(make(i), bytes([i]) * 16)
    for verify, mode in (("always", "mmap"), ("once", "pread")):
        cache = gc.open(path, verify, mode=mode)
        assert cache.verify(values=True).ok
        for graph in cache:
            for value in graph.values():
                digest.update(np.asarray(value).tobytes())
        for batch in gc.Loader(cache, 16, seed=1):
            digest.update(np.asarray(batch["edge_index"]).tobytes())
            digest.update(np.asarray(batch["small"]).tobytes())
    digest.update(_core.crc32c(b"123456789").to_bytes(4, "little"))
    digest.update(_core.GraphCache(str(path)).keys())
    return digest.hexdigest()

folder = Path(tempfile.mkdtemp())
"""


def run(code, **environment):
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRAINFAST_")}
    env |= {name: value for name, value in environment.items() if value}
    command = [sys.executable, "-c", USE + code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)


def digests(code, **environment):
    done = run(code, **environment)
    if "cannot run here" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def plain():
    (digest,) = digests("print(use(folder / 'c'))", TRAINFAST_BACKEND="scalar")
    return digest


@pytest.mark.parametrize("name", NAMES)
def test_cache_works_where_the_environment_forces_a_backend(name, plain):
    simt = LIBRARIES["TRAINFAST_SIMT_LIBRARY"]
    code = "print(use(folder / 'c'), trainfast._core.backend_in_use())"
    digest, _ = digests(
        code, TRAINFAST_BACKEND=name, TRAINFAST_CUDA_LIBRARY=simt, **LIBRARIES
    )
    assert digest == plain


def test_cache_works_under_each_backend_in_turn(plain):
    """A cache that was opened under one is read under another."""
    code = """
names = [b["name"] for b in trainfast.backends() if b["usable"]]
for name in [*names, None]:
    trainfast.use_backend(name)
    print(use(folder / str(name)))
cache = gc.open(folder / names[0], "always")
for name in names:
    trainfast.use_backend(name)
    assert cache.verify().ok and len(list(gc.Loader(cache, 16))) == 4
"""
    assert set(digests(code, **LIBRARIES)) == {plain}
