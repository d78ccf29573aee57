"""Damage behind right checksums: nothing a file says may crash a reader.

Each input is one of the small caches in corpus/ with a few bytes changed, where
mutation knows the structure: whole fields get values at the edges of their range. Then
checksums are made right, so that the change reaches what lies behind them. The same
seeds give the same inputs; TRAINFAST_FUZZ_SECONDS makes it longer.
"""

import os
import random
import resource
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.graph_cache.cache_files import (
    folder_in_memory,
    layout_of,
    read_cache,
    seal_commits,
    seal_header,
    seal_manifest,
    seal_records,
    seal_segment,
    seal_trailer,
    write_cache,
)
from trainfast import graph_cache as gc

CORPUS = Path(__file__).parent / "corpus"
SEEDS = sorted(path.name for path in CORPUS.iterdir() if path.is_dir())
SECONDS = float(os.environ.get("TRAINFAST_FUZZ_SECONDS", "4"))
LEAST = 200  # inputs, however slow the machine is
MEMORY = 3 << 30  # bytes that the fuzzed process may have; its libraries take most
ENDS = {
    1: (0, 1, 2, 3, 7, 8, 16, 19, 20, 127, 128, 254, 255),
    2: (0, 1, 2, 4096, 4097, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF),
    4: (0, 1, 2, 15, 16, 2**16, 2**28, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1),
    8: (0, 1, 16, 64, 2**32 - 1, 2**32, 2**60, 2**63 - 1, 2**63, 2**64 - 64, 2**64 - 1),
}
FORMS = {1: "<B", 2: "<H", 4: "<I", 8: "<Q"}


def mutate(rng, data, begin, end):
    """Changes one thing between two offsets."""
    size = rng.choice((1, 1, 2, 4, 4, 8))
    if end - begin < size:
        return
    at = begin + rng.randrange((end - begin) // size) * size
    how = rng.randrange(4)
    if how == 0:
        value = rng.choice(ENDS[size])
    elif how == 1:
        old = struct.unpack_from(FORMS[size], data, at)[0]
        value = (old + rng.choice((-16, -2, -1, 1, 2, 16))) % 256**size
    elif how == 2:
        value = rng.randrange(256**size)
    else:
        other = begin + rng.randrange((end - begin) // size) * size
        value = struct.unpack_from(FORMS[size], data, other)[0]
    struct.pack_into(FORMS[size], data, at, value)


def regions(data, layout):
    """Parts of a segment that are worth damaging, with equal chances."""
    parts = [(0, 64), (64, 64 + layout.schema_bytes), (layout.size - 64, layout.size)]
    parts.append((layout.index[0], sum(layout.index)))
    for at, size, head in layout.records:
        parts += [(at, at + head), (at + head, at + size)]
    return parts + [(at, at + 32) for at in layout.commits]


def fuzzed(rng, manifest, segments):
    """One damaged cache with right checksums, as (manifest, segments)."""
    manifest = bytearray(manifest)
    segments = {uuid: bytearray(data) for uuid, data in segments.items()}
    if not segments or rng.random() < 0.15:
        for _ in range(rng.choice((1, 1, 2))):
            mutate(rng, manifest, 0, len(manifest))
    else:
        data = rng.choice(list(segments.values()))
        layout = layout_of(data)
        parts = regions(data, layout)
        for _ in range(rng.choice((1, 1, 2, 3))):
            mutate(rng, data, *rng.choice(parts))
        if rng.random() < 0.9:
            seal_segment(data, layout)
        else:  # some checksums wrong
            steps = (seal_header, seal_records, seal_commits, seal_trailer)
            for step in rng.sample(steps, rng.randrange(4)):
                step(data, layout)
    if rng.random() < 0.95:
        seal_manifest(manifest, segments)
    return manifest, segments


def exercise(path, rng):
    """Reads all that can be read; the ways in which that ends are counted."""
    verify = rng.choice(("never", "once", "always"))
    mode = rng.choice(("mmap", "mmap", "pread"))
    ends = []
    try:
        cache = gc.open(path, verify, mode=mode, partial=rng.random() < 0.2)
    except (ValueError, OSError, MemoryError) as error:
        return [f"open {type(error).__name__}"]
    ends.append("opened")
    for number in range(min(len(cache), 8)):
        attempt(ends, "get", lambda n=number: touch(cache[n]))
    attempt(ends, "verify", lambda: cache.verify(values=True))
    attempt(ends, "sizes", lambda: touch(cache.sizes.bytes))
    pad_to = rng.choice((None, None, "max"))
    attempt(
        ends,
        "collate",
        lambda: [touch(b) for b in gc.Loader(cache[:8], 3, threads=0, pad_to=pad_to)],
    )
    return ends


def attempt(ends, what, action):
    try:
        action()
        ends.append(what)
    except (ValueError, OSError, MemoryError, NotImplementedError) as error:
        ends.append(f"{what} {type(error).__name__}")


def touch(value):
    """Reads every byte."""
    if isinstance(value, dict):
        return sum(touch(v) for v in value.values())
    if isinstance(value, np.ndarray):
        return int(value.reshape(-1).view(np.uint8).sum()) if value.size else 0
    return 0


def campaign(folder, seconds, first=0):
    """Fuzzes for so long, or longer, and returns the counts; run in a process of its
    own."""
    if "libasan" not in os.environ.get("LD_PRELOAD", ""):  # it maps the world
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    corpus = [read_cache(CORPUS / name) for name in SEEDS]
    counts = {}
    stop = time.monotonic() + seconds
    number = first
    while number < first + LEAST or time.monotonic() < stop:
        rng = random.Random(number)
        manifest, segments = fuzzed(rng, *rng.choice(corpus))
        path = write_cache(folder / "now", manifest, segments)
        (folder / "number").write_text(str(number))
        for end in exercise(path, rng):
            counts[end] = counts.get(end, 0) + 1
        for uuid in segments:
            (path / f"segment-{uuid}").unlink(missing_ok=True)
        number += 1
    counts["inputs"] = number - first
    return counts


@pytest.mark.parametrize("seed", SEEDS)
def test_corpus_is_intact(seed):
    cache = gc.open(CORPUS / seed)
    assert cache.verify().ok
    assert sum(len(batch) > 0 for batch in gc.Loader(cache, 2)) == -(-len(cache) // 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_checksums_of_tests_are_those_of_the_core(seed):
    manifest, segments = read_cache(CORPUS / seed)
    before = bytes(manifest), {k: bytes(v) for k, v in segments.items()}
    for data in segments.values():
        layout = layout_of(data)
        for at in range(60, 64):
            data[at] ^= 1
        seal_segment(data, layout)
    seal_manifest(manifest, segments)
    assert (bytes(manifest), {k: bytes(v) for k, v in segments.items()}) == before


@pytest.fixture
def in_memory():
    with folder_in_memory() as folder:
        yield Path(folder)


@pytest.mark.slow
def test_damage_behind_right_checksums_cannot_crash(in_memory):
    code = (
        "import json, pathlib, sys; sys.path.append(sys.argv[1]);"
        "from tests.graph_cache import test_fuzz as fuzz;"
        "print(json.dumps(fuzz.campaign(pathlib.Path(sys.argv[2]), "
        "float(sys.argv[3]))))"
    )
    arguments = [str(Path(__file__).parents[2]), str(in_memory), str(SECONDS)]
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS + 240,
    )
    number = in_memory / "number"
    at = number.read_text() if number.exists() else "none"
    assert done.returncode == 0, f"input {at}: {done.stderr[-3000:]}"
    import json

    counts = json.loads(done.stdout)
    print(f"\nfuzzed: {counts}")
    assert counts["inputs"] >= LEAST
    assert counts["opened"] > 0.05 * counts["inputs"]
