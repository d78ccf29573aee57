"""What tests of the loader share: reading epochs, comparing batches."""

from tests.graph_cache.reference import collate, same

N = 53  # graphs: enough for several batches, and no multiple of anything


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
