"""Command lines that nobody would write: an exit status and one line, no traceback."""

import contextlib
import io
import sys
import types

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.bench.planted import results, seeded, timing
from tests.graph_samples import graph, quiet
from trainfast import cli
from trainfast.bench import run as bench
from trainfast.launch import launcher
from trainfast.monitor import eye
from trainfast.probe import memory, optimize
from trainfast.tools import monitor, selftest

SCRIPT = """
import numpy as np
from tests.graph_samples import graph
NUMBERS, NOTHING, NUMBER, TEXT = [3, 1, 2], [], 5, "abc"
def graphs():
    return [graph(n) for n in NUMBERS]
def lists():
    return [[1], [2]]
def objects():
    return [{"x": object()}, {"x": np.array([None])}, {"x": np.array(["a"])}]
def needs(more):
    return more
"""
NAMES = ["NUMBERS", "NOTHING", "NUMBER", "TEXT", "graphs", "lists", "objects", "needs"]
OBJECTS = [f"fuzzed_script:{name}" for name in [*NAMES, "missing", "NUMBER.real", ""]]
OBJECTS += ["", ":", "..a:b", "a\0b:c", ".:x", "no_such_module:x", "fuzzed_script"]
PLACES = ["cache", "empty", "file", "folder", "missing", "damaged", "deep/er", "new"]
PLACES += ["graphs.npz", "object.npz", "lines\nof\nthem", "bytes\udcff", ".", "a\0b"]
ACTIONS = ["build", "inspect", "stat", "verify", "repair", "import", "export"]
OPTIONS = [
    "--json",
    "--make",
    "--key",
    "--transform-id",
    "--workers",
    "--rebuild",
    "-h",
]
OPTIONS += ["--config", "--source", "--checklist", "--markdown", "-m"]
OPTIONS += ["--output", "--force", "--allow", "--plot", "--profile", "--progressive"]
OPTIONS += ["--devices", "--cases", "--seconds", "--processes", "--save", "--compare"]
OPTIONS += ["--quiet", "--graph", "--values", "--trust", "--backend", "--"]
NUMBERS = [
    "0",
    "1",
    "-1",
    "4",
    "-9",
    str(2**63),
    str(-(2**63) - 1),
    "1e3",
    "\u0661",
    "nan",
]
WORDS = st.one_of(
    *map(st.sampled_from, (OBJECTS, PLACES, OPTIONS, NUMBERS)),
    st.text(st.characters(exclude_characters="/", codec="utf-8"), max_size=5),
)
LIKELY = st.builds(
    lambda action, words, more: ["cache", action, *words, *more],
    st.sampled_from(ACTIONS),
    st.lists(st.sampled_from(PLACES + OBJECTS), min_size=1, max_size=2),
    st.lists(WORDS, max_size=4),
)
VERBS = st.sampled_from(
    [
        "cache",
        "env",
        "selftest",
        "diagnose",
        "bench",
        "run",
        "optimize",
        "estimate-memory",
        "find-batch-size",
        "find-workers",
        "lint",
        "monitor",
        "oom",
        "--version",
    ]
)
ANY = st.builds(lambda verb, words: [verb, *words], VERBS, st.lists(WORDS, max_size=5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The working directory, with what a command line can name."""
    outside = tmp_path_factory.mktemp("fuzz")
    folder = outside / "in" / "here"
    (folder / "folder").mkdir(parents=True)
    (folder / "fuzzed_script.py").write_text(SCRIPT)
    (folder / "file").write_text("no cache")
    np.savez(folder / "graphs.npz", **graph(3))
    np.savez(folder / "object.npz", x=np.array([None]))
    for name, n in (("cache", 4), ("empty", 0), ("damaged", 9)):
        quiet(folder / name, range(n), graph)
    (segment,) = (folder / "damaged").glob("segment-*")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        for name in ("tqdm", "tqdm.auto"):  # its bar is not an error's line
            patch.setitem(sys.modules, name, None)
        # Checked elsewhere, and slow.
        nothing = selftest.SelftestReport([])
        patch.setattr(selftest, "selftest", lambda backends=None: nothing)
        # These would run what they are given.
        patch.setattr(launcher, "launch", refuse)
        patch.setattr(optimize, "optimize", refuse)
        patch.setattr(memory, "estimate_script", refuse)
        patch.setattr(eye.Eye, "look", interrupted)
        patch.setattr(monitor, "time", types.SimpleNamespace(sleep=lambda s: None))
        found = results(timing("numpy-adamw", n=2, rng=seeded()))
        patch.setattr(bench, "bench", lambda *job: found)
        yield folder
    sys.modules.pop("fuzzed_script", None)


def interrupted(self):
    raise KeyboardInterrupt


def refuse(*args, **kwargs):
    raise OSError("the test runs nothing")


def run(arguments):
    """Exit status, and what it has written to stdout and to stderr."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    error = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            status = cli.main(arguments)
        except SystemExit as end:  # argparse's
            status = end.code
    found = []
    for stream in (out, error):
        stream.flush()
        found.append(stream.buffer.getvalue().decode())
    return status, *found


@pytest.mark.forks  # by --workers
@settings(max_examples=200)
@given(LIKELY | ANY)
@example(["cache", "inspect", "cache", "--graph", str(2**63)])
@example(["cache", "stat", "lines\nof\nthem"])
@example(["cache", "build", "new", "fuzzed_script:objects"])
@example(["cache", "build", "bytes\udcff", "fuzzed_script:graphs"])
def test_any_command_line_ends_with_a_status_and_a_line(folder, arguments):
    status, out, error = run(arguments)
    assert status in (0, 1, 2)
    if status == 2:
        assert error.startswith("usage: ") and " error: " in error
    elif status == 1 and not out:
        assert error.startswith("trainfast ") and len(error.splitlines()) == 1
