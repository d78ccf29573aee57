"""What tests of the loader share: reading epochs, comparing batches."""

from tests.graph_cache.reference import collate, same

N = 53  # graphs: enough for several batches, and no multiple of anything

LONG = 4000  # graphs of a batch that takes so long that threads start


def long_batches(cache):
    """A data set of seven batches of LONG graphs."""
    return cache[[i % N for i in range(7 * LONG)]]


def rows(batch):
    """The graphs of a batch: y is their number."""
    return batch["y"].astype(int).tolist()


def epoch(loader):
    return [rows(batch) for batch in loader]


def flat(batches):
    return [row for batch in batches for row in batch]


def assert_is_batch_of(world, batch, graphs):
    counts = [world.counts[i] for i in graphs]
    want = collate(world.schema, [world.graphs[i] for i in graphs], counts)
    for key, truth in zip(world.schema.keys, want.fields):
        assert same(batch[key], truth), key
    assert same(batch["batch"], want.batches[0])
    assert same(batch["ptr"], want.ptrs[0])
