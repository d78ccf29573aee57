"""Ahead: batches made ahead of the one that is handed out, none lost or repeated."""

import dis
import functools
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

import trainfast.graph_cache as gc
from tests.graph_cache.core_calls import PLAIN, cached, plain_graph
from trainfast import _core
from trainfast.graph_cache import ahead

OURS = str(Path(ahead.__file__).parent)
# After these the interpreter looks whether a signal has come.
CHECKED = ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD")


class Iteration(ahead.Ahead):
    """The x of batches of lists of indices."""

    def __init__(self, source, cache, threads=1, ahead=2):
        super().__init__(source, ahead)
        selection = _core.GraphSelection(cache, [0])
        prefetch = self._prefetches[0] = _core.GraphPrefetch(selection, threads)
        prefetch.submit(0, [0] * 50_000)  # takes long: the next submit() starts threads
        prefetch.next(0)
        self._submitted = self._taken = 1
        self.most = 0

    def _plan(self, given):
        return self._prefetches[0], given, self._submitted

    def _assemble(self, batch):
        self.most = max(self.most, self._submitted - self._taken)
        return batch.fields[0]


@pytest.fixture
def graphs(rng):
    return [plain_graph(rng, n, 2 * n) for n in range(1, 8)]


@pytest.fixture
def cache(tmp_path, graphs):
    return cached(tmp_path / "c", PLAIN, graphs)


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_batches_come_in_order_and_no_more_are_made_ahead(
    cache, graphs, threads, ahead
):
    options = {"batch_size": 2, "shuffle": True, "seed": 5}
    order, same_order = (_core.GraphOrder(7, **options) for _ in range(2))
    iteration, places = Iteration(order, cache, threads, ahead), []
    for indices, x in zip(same_order, iteration, strict=True):
        want = np.concatenate([graphs[i]["x"] for i in indices])
        np.testing.assert_array_equal(x, want)
        places.append((iteration._place.position, iteration._place.done))
    assert places == [(number, False) for number in (1, 2, 3, 4)]
    assert iteration._place.done and next(iteration, None) is None
    assert iteration.most == min(ahead, 3) + 1


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_error_of_an_order_comes_once_and_after_the_batches_before_it(tmp_path, ahead):
    graphs = [plain_graph(np.random.default_rng(0), n) for n in (4, 5, 9, 4)]
    cache = cached(tmp_path / "c", PLAIN, graphs)
    order = _core.GraphOrder(4, batch_size=4, sizes=[[4, 5, 9, 4]], budgets=[6])
    iteration, rows = Iteration(order, cache, 0, ahead), []
    with pytest.raises(ValueError, match="graph 2 must be within budget 0"):
        for x in iteration:
            rows.append(len(x))
    assert rows == [4]
    assert next(iteration, None) is None


def test_error_of_a_batch_or_its_assembly_is_raised_once(cache):
    class Failing(Iteration):
        def _assemble(self, batch):
            if self._taken == 3:  # the first is 1
                raise RuntimeError("no batch 2")
            return super()._assemble(batch)

    iteration, got = Failing(iter([[0], [99], [1], [2]]), cache), []
    for _ in range(4):
        try:
            got.append(len(next(iteration)))
        except (ValueError, RuntimeError) as error:
            got.append(type(error))
    assert got == [1, ValueError, RuntimeError, 3]
    assert next(iteration, None) is None


def test_iteration_is_not_entered_twice_nor_pickled(cache):
    class Again(Iteration):
        def _begin(self):
            next(self)

    with pytest.raises(RuntimeError, match="must not be used by two threads at once"):
        next(Again(None, cache))
    with pytest.raises(TypeError, match="pickle its loader"):
        pickle.dumps(Iteration(iter([]), cache))


# ---- Ctrl-C at every point where the interpreter handles it --------------------------


class Interrupter:
    """Raises KeyboardInterrupt at one of the points at which Ctrl-C can come.

    at: how many points of the graph cache's Python code come before; -1: none.
    """

    def __init__(self, at):
        self.left = at

    @staticmethod
    @functools.cache
    def names(code):
        return {each.offset: each.opname for each in dis.get_instructions(code)}

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes = True
        before = None

        def trace(frame, event, _):
            nonlocal before
            if event == "exception":  # no check follows a call that failed
                before = None
            if event == "opcode":
                was, before = before, self.names(frame.f_code).get(frame.f_lasti)
                if was in CHECKED:
                    self.left -= 1
                    if self.left == -1:
                        raise KeyboardInterrupt
            return trace

        return trace


def drained(loader, at):
    """What a loader hands out when Ctrl-C comes at a point, and where it says it is."""
    iteration, got, interrupted = iter(loader), [], False
    interrupter = Interrupter(at)
    while True:
        sys.settrace(interrupter)
        try:
            batch = next(iteration, None)
        except KeyboardInterrupt:
            interrupted = True
            sys.settrace(None)
            if loader.state_dict()["epoch"] == 0:
                assert loader.state_dict()["position"] == sum(map(len, got))
            continue
        finally:
            sys.settrace(None)
        if batch is None:
            return got, interrupted
        real = batch.get("graph_mask", slice(None))
        got.append(batch["graph"][real].tolist())


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 2, "shuffle": True, "seed": 3},
        {"batch_size": 2, "shuffle": True, "seed": 3, "threads": 0},
        {"batch_size": 2, "shuffle": True, "seed": 3, "pad_to": [(3, 20, 50)]},
        {"batch_sampler": [[4], [0], (2,), np.array([1]), [3]]},
    ],
)
def test_ctrl_c_at_any_point_loses_and_repeats_no_batch(tmp_path, options):
    with gc.Writer(tmp_path / "c", durable=False) as writer:
        for i in range(5):
            edges = np.zeros((2, 1), np.int64)
            x = np.zeros((i + 1, 1), np.float32)
            writer.append({"x": x, "edge_index": edges, "graph": np.array([i])})
    cache = gc.open(tmp_path / "c")
    want, _ = drained(gc.Loader(cache, **options), -2)
    assert sorted(i for batch in want for i in batch) == [0, 1, 2, 3, 4]
    interruptions = at = 0
    while at == interruptions:  # until a point lies behind the last one
        got, interrupted = drained(gc.Loader(cache, **options), at)
        assert got == want, at
        interruptions += interrupted
        at += 1
    assert interruptions > 50
