"""The sums of a batch's counts (GraphBatch.slices and starts), and what keeps them."""

import gc

import numpy as np
import pytest
import torch

from tests.graph_cache.core_calls import PLAIN, cached, collate, plain_graph
from tests.torch_version import from_capsule


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
    return (value if is_tensor else from_capsule(value)).numpy()


def test_slices_and_starts_are_the_sums_of_each_count(batch):
    nodes, edges = (plain(array) for array in batch.slices)
    np.testing.assert_array_equal(nodes, [0, 4, 7, 8])
    np.testing.assert_array_equal(edges, [0, 8, 14, 16])
    nodes, edges = (plain(array) for array in batch.starts)
    np.testing.assert_array_equal(nodes, [0, 4, 7])
    np.testing.assert_array_equal(edges, [0, 8, 14])


def test_slices_have_memory_of_their_own(batch):
    slices, starts = batch.slices, batch.starts
    ptr = plain(batch.ptrs[0])
    ptr += 100
    np.testing.assert_array_equal(plain(slices[0]), [0, 4, 7, 8])
    np.testing.assert_array_equal(plain(starts[0]), [0, 4, 7])
    np.testing.assert_array_equal(plain(batch.ptrs[0]), [100, 104, 107, 108])


def test_slices_keep_the_batch_alive(tmp_path, rng):
    cache = cached(tmp_path / "c", PLAIN, [plain_graph(rng)])
    for kind in (None, torch.Tensor):
        batch = collate(cache, [0], batch_of=[0], array_type=kind)
        slices, starts = batch.slices, batch.starts
        del batch
        gc.collect()
        others = [collate(cache, [0, 0]) for _ in range(4)]
        assert np.asarray(slices[0]).tolist() == [0, 5]
        assert np.asarray(starts[1]).tolist() == [0]
        del others


def test_any_number_of_arrays_keeps_the_batch(batch):
    # The batch has memory to remember the first ones.
    made = [array for _ in range(40) for array in batch.fields]
    wanted = [plain(array).copy() for array in batch.fields]
    kept = made[::7]
    del batch, made
    gc.collect()
    for i, array in enumerate(kept):
        np.testing.assert_array_equal(plain(array), wanted[7 * i % len(wanted)])
