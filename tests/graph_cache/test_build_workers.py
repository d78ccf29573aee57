"""Building caches of graphs in several processes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from tests.graph_samples import (
    assert_same,
    environment,
    graph,
    numbers,
    quiet,
    read,
    run_python,
)
from trainfast.graph_cache import BuildError

pytestmark = pytest.mark.usefixtures("stopped_clock")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


class Noting:
    """A `make` that notes each graph that it has made, in whatever process."""

    def __init__(self, file, make=graph):
        self.file, self.make = file, make

    def __call__(self, n):
        made = self.make(n)
        with open(self.file, "ab") as file:
            file.write(b".")
        return made

    def __len__(self):
        return self.file.stat().st_size


def make_with_process(n):
    return graph(n) | {"process": os.getpid()}


@pytest.mark.parametrize("n", [0, 5, 9, 200])
def test_workers_make_the_same_cache(path, n):
    report = quiet(path, range(n), make_with_process, workers=2)
    assert (report.graphs, report.made) == (n, n)
    found = read(path)
    processes = {one.pop("process") for one in found}
    assert_same(found, [graph(i) for i in range(n)])
    assert len(processes) <= 3 and (n < 200 or processes - {os.getpid()})


def test_workers_start_by_spawn_too(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import multiprocessing
        from tests.graph_cache.test_build_workers import make_with_process, quiet
        if __name__ == "__main__":
            multiprocessing.set_start_method("spawn")
            path = {str(tmp_path / "cache")!r}
            print(quiet(path, range(60), make_with_process, workers=2).made)
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert (done.stdout, done.returncode) == ("60\n", 0), done.stderr
    assert numbers(tmp_path / "cache") == list(range(60))


def test_graphs_in_workers_may_widen_the_schema(path):
    def widens(n):
        return graph(n) | {"extra": np.zeros(2 + n // 30)}

    quiet(path, range(100), widens, workers=2)
    assert_same(read(path), [widens(n) for n in range(100)])


@pytest.mark.parametrize("at", [3, 150])
def test_an_exception_in_a_worker_names_the_input(path, tmp_path, at):
    def fails(n):
        if n == at:
            raise KeyError("lost")
        return graph(n)

    make = Noting(tmp_path / "made", fails)
    with pytest.raises(BuildError, match=f"failed on input {at}: KeyError") as caught:
        quiet(path, range(200), make, workers=2)
    assert caught.value.place == at
    assert isinstance(caught.value.__cause__, KeyError)
    report = quiet(path, range(200), graph, workers=2, rebuild=False)
    assert report.reused == len(make) > 0
    assert numbers(path) == list(range(200))


def test_a_worker_that_is_killed_is_an_error_and_loses_little(path, tmp_path):
    def dies(n):
        if n == 100:
            os.kill(os.getpid(), signal.SIGKILL)
        return graph(n)

    make = Noting(tmp_path / "made", dies)
    with pytest.raises(
        BuildError, match=r"a worker was killed by signal 9 while making"
    ):
        quiet(path, range(300), make, workers=2, commit_every=4)
    report = quiet(path, range(300), graph, rebuild=False)
    assert len(make) - 4 < report.reused <= len(make)
    assert report.made + report.reused == 300
    assert numbers(path) == list(range(300))


def test_ctrl_c_that_finds_a_worker_at_its_start_is_the_parents(path):
    code = f"""
        import multiprocessing, signal
        from multiprocessing.process import BaseProcess
        from tests.graph_samples import graph, quiet
        def interrupted(*args, **options):
            signal.raise_signal(signal.SIGINT)
            return bootstrap(*args, **options)
        bootstrap, BaseProcess._bootstrap = BaseProcess._bootstrap, interrupted
        multiprocessing.set_start_method("fork")
        print(quiet({str(path)!r}, range(50), graph, workers=2).made)
    """
    done = run_python(code)
    assert (done.stdout, done.stderr) == ("50\n", "")


def test_inputs_that_do_not_pickle_are_named(path):
    inputs = [lambda n=n: n for n in range(20)]
    with pytest.raises(TypeError, match=r"inputs \d+ .. \d+ must pickle to be sent"):
        quiet(path, inputs, lambda number: graph(number()), workers=2)
    quiet(path, inputs, lambda number: graph(number()))
    assert numbers(path) == list(range(20))


def test_a_make_that_does_not_pickle_is_named_if_it_must(path, monkeypatch):
    spawn = multiprocessing.get_context("spawn")
    monkeypatch.setattr(multiprocessing, "get_context", lambda: spawn)
    with pytest.raises(TypeError, match=r'make must pickle for workers .* "spawn"'):
        quiet(path, range(20), lambda n: graph(n), workers=2)


def test_workers_end_when_their_parent_is_killed(path):
    """What the workers had made by then they commit, but for the graph in hand."""
    code = f"""
        import os, signal, time
        from tests.graph_samples import graph, quiet
        parent = os.getpid()
        made = os.open({str(path) + ".made"!r}, os.O_CREAT | os.O_RDWR | os.O_APPEND)
        def make(n):
            if os.getpid() != parent:
                os.write(made, b".")
                if os.fstat(made).st_size == 120:
                    os.kill(parent, signal.SIGKILL)
            time.sleep(0.001)
            return graph(n % 50)
        quiet({str(path)!r}, range(100000), make, workers=2)
    """
    assert run_python(code).returncode == -signal.SIGKILL
    for _ in range(600):
        try:
            report = quiet(path, range(1000), lambda n: graph(n % 50), rebuild=False)
            break
        except BlockingIOError:  # the workers still hold the lock
            time.sleep(0.1)
    assert report.reused >= 118 and report.graphs == 1000
    assert_same(read(path), [graph(n % 50) for n in range(1000)])


def test_a_graph_that_cannot_be_cached_names_its_input_from_a_worker(path):
    with pytest.raises(ValueError, match=r"input 50: .*x"):
        quiet(
            *(path, range(100)),
            lambda n: graph(n) | ({"x": np.zeros(3)} if n == 50 else {}),
            workers=2,
        )


def test_ctrl_c_ends_the_workers_and_keeps_what_they_made(path, tmp_path):
    code = f"""
        import time
        from itertools import count
        from pathlib import Path
        from tests.graph_samples import graph, quiet
        from tests.graph_cache.test_build_workers import Noting
        def make(n):
            if n == 40:
                print("ready", flush=True)
            time.sleep(0.002)
            return graph(n % 50)
        noting = Noting(Path({str(tmp_path / "made")!r}), make)
        quiet({str(path)!r}, count(), noting, workers=2)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    assert child.stdout.readline() == "ready\n"
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does: to all of them
    error = child.communicate(timeout=240)[1]
    assert "\nKeyboardInterrupt\nWhat was made is kept" in error
    assert len(read(path, partial=True)) == len(Noting(tmp_path / "made")) > 8
    assert not list(path.glob("open-*"))
