"""Which graphs each rank gets, and where rank and world size come from."""

import json
import subprocess
import sys

import pytest

from tests.graph_cache.loading import N, epoch, flat
from tests.graph_cache.worlds import molecules
from tests.graph_samples import environment, run_python
from trainfast import graph_cache as gc


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return gc.open(molecules(N).write(tmp_path_factory.mktemp("ranks") / "cache"))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_ranks_share_all_graphs_evenly(cache, world_size, shuffle):
    shares = [
        epoch(gc.Loader(cache, 4, shuffle=shuffle, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert sorted(flat(flat(shares))) == list(range(N))
    assert len({len(share) for share in shares}) == 1
    assert min(len(batch) for batch in flat(shares)) > 0


# Prints the loader's share without arguments, with a sampler, and with arguments.
SHARES = """
import json, sys
import torch, torch.distributed as dist
from tests.graph_cache.loading import epoch
from trainfast import graph_cache as gc

path, store, rank = sys.argv[1:]
cache = gc.open(path)
before = gc.Loader(cache, 4)
store = dist.FileStore(store, 2)
dist.init_process_group("gloo", store=store, rank=int(rank), world_size=2)
loaders = [
    before,
    gc.Loader(cache, 4, shuffle=True),
    gc.Loader(cache, 4, sampler=[int(rank), 7]),
    gc.Loader(cache, 4, rank=0, world_size=1),
    gc.Loader(cache, 4, rank=int(rank), world_size=3),
    gc.Loader(cache, 4, world_size=1),
]
print(json.dumps([[(l.rank, l.world_size), epoch(l)] for l in loaders]))
dist.destroy_process_group()
"""


def test_ranks_of_torch_distributed_are_the_default(cache, tmp_path):
    pytest.importorskip("torch.distributed").is_available() or pytest.skip("without it")
    command = [sys.executable, "-c", SHARES, str(cache.path), str(tmp_path / "store")]
    processes = [
        subprocess.Popen(
            [*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment()
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    shares = [json.loads(text.splitlines()[-1]) for text in printed]  # after gloo's own
    whole = epoch(gc.Loader(cache, 4))
    for rank, share in enumerate(shares):
        before, default, sampled, alone, given, undivided = share
        assert before == [[0, 1], whole]
        assert default[0] == [rank, 2]
        assert sampled == [[0, 1], [[rank, 7]]]
        assert alone == undivided == [[0, 1], whole]
        assert given[0] == [rank, 3]
    first, second = (default[1] for _, default, *_ in shares)
    assert len(first) == len(second)
    assert sorted(flat(first + second)) == list(range(N))


def test_ranks_without_torch_are_one(cache):
    code = f"""
    import sys
    from trainfast import graph_cache as gc
    loader = gc.Loader(gc.open({str(cache.path)!r}), 4)
    print(loader.rank, loader.world_size, len(loader), "torch" in sys.modules)
    """
    assert run_python(code).stdout.split() == ["0", "1", "14", "False"]
