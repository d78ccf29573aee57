"""GraphBatch.dicts() and GraphRecipe: a batch's arrays by name, in one call."""

import gc
import sys
import weakref

import numpy as np
import pytest
import torch
from graph_core import PLAIN, cached, collate, plain_graph

from trainfast import _core

RECIPE = (
    {"x": 0, "edges": 1, "y": 2, "batch": 5, "ptr": 3},
    {"x": 0, "edges": 1, "y": 2, "again": 0, "text": 2},
    {"x": 2, "edges": 0, "y": 2, "again": 1, "text": 3},
)
CONSTANTS = ["zeros", None]


@pytest.fixture(params=[None, torch.Tensor, object], ids=["numpy", "torch", "capsule"])
def batch(request, tmp_path, rng):
    graphs = [plain_graph(rng, n, 2 * n) for n in (3, 1, 4)]
    cache = cached(tmp_path / "c", PLAIN, graphs)
    return collate(cache, [2, 0, 1], batch_of=[0], array_type=request.param)


def plain(value):
    """The array as NumPy's, over the same memory."""
    if isinstance(value, np.ndarray):
        return value
    is_tensor = isinstance(value, torch.Tensor)
    return (value if is_tensor else torch.from_dlpack(value)).numpy()


def test_dicts_have_the_arrays_of_the_recipe(batch):
    arrays, slices, starts = batch.dicts(*RECIPE, CONSTANTS)
    assert list(arrays) == ["x", "edges", "y", "batch", "ptr"]
    assert list(slices) == list(starts) == ["x", "edges", "y", "again", "text"]
    wanted = [*batch.fields, batch.batches[0], batch.ptrs[0]]
    for got, want in zip(arrays.values(), wanted, strict=True):
        assert type(got) is type(want)
        np.testing.assert_array_equal(plain(got), plain(want))
    nodes, edges = slices["x"], slices["edges"]
    assert slices["again"] is nodes  # made once
    assert slices["y"] == slices["text"] == "zeros"
    assert starts["x"] == starts["y"] == "zeros" and starts["text"] is None
    np.testing.assert_array_equal(plain(nodes), [0, 4, 7, 8])
    np.testing.assert_array_equal(plain(edges), [0, 8, 14, 16])
    np.testing.assert_array_equal(plain(starts["edges"]), [0, 4, 7])
    np.testing.assert_array_equal(plain(starts["again"]), [0, 8, 14])
    np.testing.assert_array_equal(plain(batch.starts(1)), [0, 8, 14])


def test_slices_have_memory_of_their_own(batch):
    arrays, slices, starts = batch.dicts(*RECIPE, CONSTANTS)
    ptr = plain(arrays["ptr"])
    ptr += 100
    np.testing.assert_array_equal(plain(slices["x"]), [0, 4, 7, 8])
    np.testing.assert_array_equal(plain(starts["edges"]), [0, 4, 7])
    np.testing.assert_array_equal(plain(batch.ptrs[0]), [100, 104, 107, 108])


def test_dicts_keep_the_batch_alive(tmp_path, rng):
    cache = cached(tmp_path / "c", PLAIN, [plain_graph(rng)])
    for kind in (None, torch.Tensor):
        batch = collate(cache, [0], batch_of=[0], array_type=kind)
        _, slices, starts = batch.dicts(*RECIPE, CONSTANTS)
        del batch
        gc.collect()
        others = [collate(cache, [0, 0]) for _ in range(4)]
        assert np.asarray(slices["x"]).tolist() == [0, 5]
        assert np.asarray(starts["edges"]).tolist() == [0]
        del others


def test_dicts_leak_nothing(batch):
    constant = ["a constant"]
    recipe = (*RECIPE[:2], RECIPE[2] | {"text": 2})
    before = sys.getrefcount(constant)
    for _ in range(50):
        batch.dicts(*recipe, [constant])
        with pytest.raises(ValueError, match="numbers of arrays"):
            batch.dicts(recipe[0] | {"ptr": 99}, *recipe[1:], [constant])
    assert sys.getrefcount(constant) == before


def test_any_number_of_arrays_keeps_the_batch(batch):
    # The batch has memory to remember the first ones.
    made = [array for _ in range(40) for array in batch.fields]
    wanted = [plain(array).copy() for array in batch.fields]
    kept = made[::7]
    del batch, made
    gc.collect()
    for i, array in enumerate(kept):
        np.testing.assert_array_equal(plain(array), wanted[7 * i % len(wanted)])


@pytest.mark.parametrize(
    ("place", "value", "error", "message"),
    [
        (0, {"x": 0, "ptr": 6}, ValueError, "numbers of arrays, got 6"),
        (0, {"ptr": -1}, ValueError, "numbers of arrays, got"),
        (0, {"ptr": "a"}, TypeError, "integer"),
        (0, {"ptr": 2**70}, OverflowError, "too large"),
        (1, {"x": 0, "text": -1}, ValueError, "numbers of arrays, got -1"),
        (2, {"text": 9}, IndexError, "range"),
        (1, ["x"], TypeError, "dict"),
    ],
)
def test_wrong_recipe_is_refused(batch, place, value, error, message):
    recipe = list(RECIPE)
    recipe[place] = value
    with pytest.raises(error, match=message):
        batch.dicts(*recipe, CONSTANTS)


# ---- Objects -----------------------------------------------------------------------


class Graph:
    def __init__(self):
        raise AssertionError("not to be called")

    def __setattr__(self, name, value):
        raise AssertionError("not to be called")


class Store(Graph):
    pass


INSIDE = dict.fromkeys(("first", "arrays", "graph", "n", "slices", "starts"), 7)
WHOLE = (Graph, {"common": RECIPE, "store": None}, Store, INSIDE, *RECIPE)


def recipe_of(parts=WHOLE, constants_of=lambda _: CONSTANTS, other=None):
    return _core.GraphRecipe(*parts, constants_of, other)


def test_graph_has_what_dicts_make(batch):
    graph = recipe_of()(batch)
    assert type(graph) is Graph and type(graph.store) is Store
    assert list(vars(graph)) == ["common", "store"] and graph.common is RECIPE
    store = vars(graph.store)
    assert list(store) == list(INSIDE) and store["first"] == 7
    assert store["n"] == 3 and store["graph"]() is graph
    wanted = batch.dicts(*RECIPE, CONSTANTS)
    for name, want in zip(("arrays", "slices", "starts"), wanted):
        assert list(store[name]) == list(want)
        # By identity: what was made once is there once, and a capsule is read once.
        pairs = {id(want[key]): (store[name][key], want[key]) for key in want}
        assert len({id(got) for got in store[name].values()}) == len(pairs)
        for got, other in pairs.values():
            assert type(got) is type(other)
            if isinstance(other, str | None):
                assert got == other
            else:
                np.testing.assert_array_equal(plain(got), plain(other))


def test_graphs_share_no_dict(batch):
    recipe = recipe_of()
    one, other = recipe(batch), recipe(batch)
    vars(one)["common"] = vars(one.store)["first"] = 8
    assert other.common is RECIPE and other.store.first == 7
    assert WHOLE[1] == {"common": RECIPE, "store": None} and set(INSIDE.values()) == {7}


def test_graph_is_freed_with_its_last_reference(batch):
    graph = recipe_of()(batch)
    reference = graph.store.graph
    gc.disable()
    try:
        del graph
        assert reference() is None
    finally:
        gc.enable()


def test_graph_leaks_nothing(batch):
    constant = ["a constant"]
    bad = (*WHOLE[:4], RECIPE[0] | {"ptr": 99}, *WHOLE[5:])
    right = (*WHOLE[:6], RECIPE[2] | {"text": 2})
    counted = (constant, Graph, Store, *WHOLE)
    before = [sys.getrefcount(one) for one in counted]
    for _ in range(50):
        recipe_of(right, lambda _: [constant])(batch)
        recipe_of(right)(batch, [constant])
        with pytest.raises(ValueError, match="numbers of arrays"):
            recipe_of(bad)(batch)
        for recipe in ((*WHOLE[:2], int, *WHOLE[3:]), (int, *WHOLE[1:])):
            with pytest.raises(TypeError):
                recipe_of(recipe)
    del recipe
    gc.collect()  # errors hold what raised them
    assert [sys.getrefcount(one) for one in counted] == before


def test_constants_are_made_for_each_number_of_graphs(tmp_path, rng):
    cache = cached(tmp_path / "c", PLAIN, [plain_graph(rng)])
    asked = []

    def constants_of(n):
        asked.append(n)
        return [f"of {n}", None]

    recipe = recipe_of(constants_of=constants_of)
    for n in (2, 2, 1, 1, 2):
        batch = collate(cache, [0] * n, batch_of=[0])
        assert recipe(batch).store.slices["y"] == f"of {n}"
        assert recipe(batch, ["given", None]).store.slices["y"] == "given"
    assert asked == [2, 1, 2]


def test_constants_may_use_the_recipe_as_they_die(tmp_path, rng):
    cache = cached(tmp_path / "c", PLAIN, [plain_graph(rng)])
    one, two = (collate(cache, [0] * n, batch_of=[0]) for n in (1, 2))
    made = []

    class Dying:
        def __del__(self):
            made.append(recipe(one).store.slices["y"])

    recipe = recipe_of(constants_of=lambda n: [Dying() if not made else n, None])
    recipe(one)
    made.append("first")
    recipe(two)
    assert made == ["first", 1]


def test_what_is_no_batch_is_made_by_the_other():
    recipe = recipe_of(other=lambda batch: ("made of", batch))
    assert recipe("a batch") == ("made of", "a batch")
    with pytest.raises(TypeError, match="by name"):
        recipe(batch="a batch")


def test_collector_frees_a_recipe_and_who_it_asks():
    class Owner:
        def __init__(self):
            self.recipe = recipe_of(other=self.other)

        def other(self, batch):
            return batch

    owner = Owner()
    reference = weakref.ref(owner)
    del owner
    gc.collect()
    assert reference() is None


def test_collector_frees_a_recipe_that_is_in_its_constants(batch):
    class Seen:
        pass

    recipes, seen = [], Seen()
    reference = weakref.ref(seen)
    given = [(*CONSTANTS, recipes, seen)]  # a tuple: the collector cannot empty it
    recipes.append(recipe_of(constants_of=lambda _: (*given.pop(), recipes.pop())))
    recipes[0](batch)
    assert not recipes and not given
    del seen
    gc.collect()
    assert reference() is None


class Made(Graph):
    def __new__(cls):
        raise AssertionError("not to be called")


@pytest.mark.parametrize(
    ("place", "value", "error", "message"),
    [
        (0, "a", TypeError, "type"),
        (0, Made, TypeError, "kind must be a class without __new__, got .*Made"),
        (0, object, TypeError, "kind must be a class without __new__"),
        (2, np.ndarray, TypeError, "kind must be a class without __new__"),
        (1, {}, ValueError, "names must be at least 1, got 0"),
        (3, dict.fromkeys("abcd"), ValueError, "names must be at least 5, got 4"),
        (3, [], TypeError, "dict"),
        (4, {"x": 6}, ValueError, "numbers of arrays, got 6"),
        (4, {"x": "a"}, TypeError, "integer"),
        (5, {"x": -1}, ValueError, "numbers of arrays, got -1"),
        (6, {"text": 9}, IndexError, "range"),
    ],
)
def test_wrong_recipe_of_a_graph_is_refused(batch, place, value, error, message):
    recipe = list(WHOLE)
    recipe[place] = value
    with pytest.raises(error, match=message):
        recipe_of(recipe)(batch)


def test_wrong_count_is_refused(batch):
    for count in (-1, 2):
        with pytest.raises(
            ValueError, match=rf"count must be in 0 \.\. 1, got {count}"
        ):
            batch.starts(count)
    with pytest.raises(TypeError):
        batch.starts("a")
