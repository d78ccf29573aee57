"""Building caches of graphs by a concurrent.futures executor."""

import os
import random
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor

import pytest

from tests.graph_samples import (
    assert_same,
    environment,
    graph,
    numbers,
    quiet,
    read,
    run_python,
    segments,
)
from trainfast.graph_cache import BuildError, executor

pytestmark = pytest.mark.usefixtures("stopped_clock")
N = 150


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def short(monkeypatch):
    """Tasks of few inputs."""
    monkeypatch.setattr(executor, "_TASK_LIMIT", 8)


def dies_once(n):
    """Kills its process at input 100, if `DIED` names no file yet."""
    if n == 100 and not os.path.exists(os.environ["DIED"]):
        open(os.environ["DIED"], "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return graph(n)


def same_as_alone(path, tmp_path, n=N):
    quiet(tmp_path / "alone", range(n), graph)
    assert_same(read(path), read(tmp_path / "alone"))


@pytest.mark.parametrize("kind", [ProcessPoolExecutor, ThreadPoolExecutor])
@pytest.mark.parametrize("n", [0, 3, 9, N])
def test_an_executor_makes_the_same_cache(path, tmp_path, kind, n, short):
    with kind(2) as pool:
        report = quiet(path, range(n), graph, executor=pool)
        assert (report.graphs, report.made) == (n, n)
        assert pool.submit(abs, -1).result() == 1  # it is not shut down
    same_as_alone(path, tmp_path, n)


def test_lists_of_graphs_are_sent(path):
    graphs = [graph(n) for n in range(40)]
    with ProcessPoolExecutor(2) as pool:
        quiet(path, graphs, executor=pool)
    assert_same(read(path), graphs)


class Careless:
    """Runs tasks late and in another order; loses some results, before or after the
    task has run, cancels others, and runs some twice."""

    def __init__(self, seed, lost=0.3):
        self.random, self.lost = random.Random(seed), lost
        self.waiting, self.repeated = [], []
        self.pool = ThreadPoolExecutor(1)

    def submit(self, function, *args):
        future = Future()
        self.waiting.append((future, function, args))
        self.pool.submit(self.step)
        return future

    def step(self):
        at = self.random.randrange(len(self.waiting))
        future, function, args = self.waiting.pop(at)
        luck = self.random.random()
        if luck < self.lost / 3:
            future.cancel()
        elif luck < 2 * self.lost / 3:
            future.set_exception(RuntimeError("lost before"))
        else:
            result = function(*args)
            if self.random.random() < 0.3:
                function(*args)
                self.repeated.append((function, args))
            if luck < self.lost:
                future.set_exception(RuntimeError("lost after"))
            else:
                future.set_result(result)


@pytest.mark.parametrize("seed", range(5))
def test_lost_repeated_and_reordered_tasks_change_nothing(path, tmp_path, seed, short):
    careless = Careless(seed, lost=0.2)
    report = quiet(path, range(N), graph, executor=careless, commit_every=3)
    careless.pool.shutdown()
    assert (report.graphs, report.made) == (N, N)
    same_as_alone(path, tmp_path)
    before = segments(path)
    for function, args in careless.repeated:  # also after the end
        function(*args)
    same_as_alone(path, tmp_path)
    assert segments(path) == before
    assert quiet(path, range(N), graph).made == 0


@pytest.mark.parametrize("seed", range(3))
def test_inputs_with_one_key_survive_lost_tasks(path, seed, short):
    def of_a_third(n):
        return graph(n // 3)

    careless = Careless(seed, lost=0.2)
    options = {"executor": careless, "key": lambda n: n // 3, "commit_every": 2}
    quiet(path, range(90), of_a_third, transform_id="thirds", **options)
    careless.pool.shutdown()
    assert_same(read(path), [graph(n // 3) for n in range(90)])


def test_a_task_that_is_always_lost_names_its_input(path, short):
    careless = Careless(1, lost=1.0)
    with pytest.raises(BuildError, match=r"input \d+ was lost 4 times") as caught:
        quiet(path, range(N), graph, executor=careless)
    assert caught.value.place is not None
    careless.pool.shutdown()
    assert quiet(path, range(N), graph).reused >= 1
    assert numbers(path) == list(range(N))


def test_a_killed_process_of_a_pool_is_an_error_and_the_next_build_resumes(
    path, tmp_path, monkeypatch, short
):
    monkeypatch.setenv("DIED", str(tmp_path / "died"))
    with ProcessPoolExecutor(2) as pool, pytest.raises(BuildError, match="was lost"):
        quiet(path, range(N), dies_once, executor=pool, commit_every=4)
    with ProcessPoolExecutor(2) as pool:
        report = quiet(path, range(N), dies_once, executor=pool)
    assert report.reused > 8 and report.reused + report.made == N
    same_as_alone(path, tmp_path)


def test_a_killed_build_resumes(path, tmp_path):
    code = f"""
        import os, signal
        from concurrent.futures import ThreadPoolExecutor
        from tests.graph_samples import graph, quiet
        def make(n):
            if n == 100:
                os.kill(os.getpid(), signal.SIGKILL)
            return graph(n)
        with ThreadPoolExecutor(2) as pool:
            quiet({str(path)!r}, range({N}), make, executor=pool, commit_every=4)
    """
    assert run_python(code).returncode == -signal.SIGKILL
    with ProcessPoolExecutor(2) as pool:
        report = quiet(path, range(N), graph, executor=pool, rebuild=False)
    assert report.reused > 8 and report.reused + report.made == N
    same_as_alone(path, tmp_path)


def fails(n):
    if n == 100:
        raise KeyError("lost")
    return graph(n)


def test_an_exception_of_make_names_the_input_and_keeps_the_others(path, short):
    with ProcessPoolExecutor(2) as pool:
        with pytest.raises(BuildError, match="failed on input 100: Key") as caught:
            quiet(path, range(N), fails, executor=pool)
        assert isinstance(caught.value.__cause__, KeyError)
        assert quiet(path, range(N), graph, executor=pool, rebuild=False).reused > 50
    assert numbers(path) == list(range(N))


def test_what_does_not_pickle_is_named(path):
    told = pytest.raises(TypeError, match=r"make and input .* must pickle")
    with ProcessPoolExecutor(1) as pool, told:
        quiet(path, range(N), lambda n: graph(n), executor=pool)


def test_arguments_that_do_not_fit(path):
    with pytest.raises(TypeError, match=r"executor must have submit\(\)"):
        quiet(path, range(N), graph, executor=3)
    told = pytest.raises(ValueError, match="cannot be combined")
    with ThreadPoolExecutor(1) as pool, told:
        quiet(path, range(N), graph, executor=pool, workers=2)


def test_interrupt_between_two_tasks_ends_the_build(path, monkeypatch):
    def interrupted(tasks, future):
        raise KeyboardInterrupt

    monkeypatch.setattr(executor._Tasks, "_take", interrupted)
    with ThreadPoolExecutor(2) as pool, pytest.raises(KeyboardInterrupt):
        quiet(path, range(N), graph, executor=pool)
    monkeypatch.undo()
    with ThreadPoolExecutor(2) as pool:
        assert quiet(path, range(N), graph, executor=pool).graphs == N


def test_ctrl_c_keeps_what_was_made(path):
    code = f"""
        import os, signal, threading, time
        from concurrent.futures import ThreadPoolExecutor
        from tests.graph_samples import graph, quiet
        def make(n):
            if n == 60:
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.002)
            return graph(n % 50)
        with ThreadPoolExecutor(2) as pool:
            quiet({str(path)!r}, range(10**6), make, executor=pool)
    """
    done = subprocess.run(
        *([sys.executable, "-c", textwrap.dedent(code)],),
        **dict(capture_output=True, text=True, env=environment(), timeout=240),
    )
    assert "\nKeyboardInterrupt\nWhat was made is kept" in done.stderr
    assert len(read(path, partial=True)) > 60
    assert not list(path.glob("open-*"))


@pytest.mark.slow
def test_dask_makes_the_graphs_of_killed_workers_again(tmp_path, monkeypatch, short):
    distributed = pytest.importorskip("distributed")
    path = tmp_path / "cache"
    monkeypatch.setenv("DIED", str(tmp_path / "died"))
    with (
        distributed.LocalCluster(2, threads_per_worker=1, dashboard_address=None) as c,
        distributed.Client(c) as client,
    ):
        pool = client.get_executor()
        report = quiet(path, range(N), dies_once, executor=pool, commit_every=4)
        assert (tmp_path / "died").exists()
        assert (report.graphs, report.made) == (N, N)

        def inputs():  # another build begins while this one runs
            with pytest.raises(OSError, match=r"another build .* is running"):
                quiet(path, range(3), graph, executor=pool)
            yield from range(N)

        quiet(path, inputs(), graph, executor=pool, rebuild=True)
    same_as_alone(path, tmp_path)
