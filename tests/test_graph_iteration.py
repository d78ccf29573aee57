"""GraphIteration: what hands out a loader's batches."""

import numpy as np
import pytest
from graph_core import PLAIN, cached, plain_graph

from trainfast import _core


def batches_of(order):
    """The indices of an order's batches."""
    while (indices := order.next()) is not None:
        yield indices.tolist()


class Place:
    position = 0


class Following(_core.GraphIteration):
    """Hands out the x of an order's batches."""

    def __init__(self, prefetch, order, ahead):
        self.given, self.ahead = (prefetch, order), ahead
        self.place, self.asked = Place(), []

    def _begin(self):
        self._follow(*self.given, lambda batch: batch.fields[0], self.place)

    def _fill(self):
        while len(self.asked) < self.ahead:
            self.asked.append(self._submit())

    def _other(self):
        raise StopIteration


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_iteration_hands_out_the_orders_batches(tmp_path, rng, threads, ahead):
    graphs = [plain_graph(rng, n, 2 * n) for n in range(1, 8)]
    cache = cached(tmp_path / "c", PLAIN, graphs)
    prefetch = _core.GraphPrefetch(_core.GraphSelection(cache, [0]), threads)
    options = {"batch_size": 3, "shuffle": True, "seed": 5}
    order, same_order = (_core.GraphOrder(7, **options) for _ in range(2))
    iteration, positions = Following(prefetch, order, ahead), []
    for indices, x in zip(batches_of(same_order), iteration, strict=True):
        np.testing.assert_array_equal(
            x, np.concatenate([graphs[i]["x"] for i in indices])
        )
        positions.append(iteration.place.position)
        assert prefetch.pending == min(ahead, 3 - len(positions))
    assert positions == [3, 6, 7] and order.position == 7
    assert iteration.asked == [True, True, True, False, False][:ahead]
    assert next(iteration, None) is None


def test_iteration_follows_one_order_of_the_right_type(tmp_path, rng):
    cache = cached(tmp_path / "c", PLAIN, [plain_graph(rng)])
    prefetch = _core.GraphPrefetch(_core.GraphSelection(cache, [0]), 0)
    order = _core.GraphOrder(1, batch_size=1)
    for given, message in (
        ((prefetch, [1, 2]), "order must be a GraphOrder"),
        ((order, order), "prefetch must be a GraphPrefetch"),
    ):
        with pytest.raises(TypeError, match=message):
            next(Following(*given, 1))
    iteration = Following(prefetch, order, 1)
    iteration._begin()
    with pytest.raises(RuntimeError, match="follows one order"):
        next(iteration)
    prefetch.close()
    iteration = Following(prefetch, order, 1)
    with pytest.raises(ValueError, match="prefetch must be open"):
        next(iteration)
    assert next(iteration, None) is None
    with pytest.raises(AttributeError, match="_begin"):
        next(_core.GraphIteration())


@pytest.mark.parametrize("ahead", [1, 5])
def test_orders_error_comes_after_its_batches_whatever_else_fails(tmp_path, rng, ahead):
    class Frozen(Following):
        def _fill(self):
            super()._fill()
            self.frozen = True

        def __setattr__(self, name, value):
            if "frozen" in self.__dict__:
                raise MemoryError(name)
            super().__setattr__(name, value)

    cache = cached(tmp_path / "c", PLAIN, [plain_graph(rng, n) for n in (4, 5, 9, 4)])
    prefetch = _core.GraphPrefetch(_core.GraphSelection(cache, [0]), 0)
    sizes = {"sizes": [[4, 5, 9, 4]], "budgets": [6]}
    order = _core.GraphOrder(4, batch_size=4, **sizes)
    iteration, rows = Frozen(prefetch, order, ahead), []
    with pytest.raises(ValueError, match="graph 2 must be within budget 0"):
        for x in iteration:
            rows.append(len(x))
    assert rows == [4]
    assert next(iteration, None) is None


def test_iteration_is_not_entered_twice(tmp_path, rng):
    cache = cached(tmp_path / "c", PLAIN, [plain_graph(rng)])
    prefetch = _core.GraphPrefetch(_core.GraphSelection(cache, [0]), 0)

    class Again(Following):
        def _begin(self):
            next(self)

    with pytest.raises(RuntimeError, match="must not be used by two threads at once"):
        next(Again(prefetch, _core.GraphOrder(1, batch_size=1), 1))
