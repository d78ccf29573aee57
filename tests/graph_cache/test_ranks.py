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

path, shares = sys.argv[1:]
cache = gc.open(path)
before = gc.Loader(cache, 4)
dist.init_process_group("gloo")
rank = dist.get_rank()
loaders = [
    before,
    gc.Loader(cache, 4, shuffle=True),
    gc.Loader(cache, 4, sampler=[rank, 7]),
    gc.Loader(cache, 4, rank=0, world_size=1),
    gc.Loader(cache, 4, rank=rank, world_size=3),
    gc.Loader(cache, 4, world_size=1),
]
with open(f"{shares}/{rank}.json", "w") as file:
    json.dump([[(l.rank, l.world_size), epoch(l)] for l in loaders], file)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.forks  # torchrun starts processes of its own
def test_ranks_of_torch_distributed_are_the_default(cache, tmp_path):
    pytest.importorskip("torch.distributed").is_available() or pytest.skip("without it")
    script = tmp_path / "shares.py"
    script.write_text(SHARES)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*torchrun, "--nproc-per-node", "2", script, cache.path, tmp_path],
        env=environment(),
        check=True,
        timeout=240,
    )
    shares = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
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
