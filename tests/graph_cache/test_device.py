"""Batches on a device. There is no CUDA here: a stand-in notes what would be asked of
it, and tensors without data (the meta device) show shapes and places."""

import contextlib

import numpy as np
import pytest
import torch

from tests.graph_cache.worlds import molecules
from trainfast import graph_cache as gc
from trainfast.torch.graphs import device as graph_device


@pytest.fixture
def cache(tmp_path):
    return gc.open(molecules(9).write(tmp_path / "cache"))


class FakeStream:
    def __init__(self, cuda, name, device=None):
        self.cuda, self.name, self.device = cuda, name, device

    def wait_stream(self, other):
        self.cuda.log.append(f"{self.name} waits for {other.name}")


class FakeCuda:
    """torch.cuda's part in moving a batch, as a list of what happened."""

    def __init__(self):
        self.log = []
        self.current = 0
        self.consumer = FakeStream(self, "consumer")

    def Stream(self, device):
        self.log.append("new stream")
        return FakeStream(self, "mover", self.indexed(device))

    def current_stream(self, device):
        assert self.indexed(device) == torch.device("cuda:0")
        return self.consumer

    def indexed(self, device):
        return torch.device("cuda", self.current) if device.index is None else device

    @contextlib.contextmanager
    def stream(self, stream):
        self.log.append(f"on {stream.name}")
        yield
        self.log.append("off")


class FakeArena(torch.Tensor):
    """A CPU tensor that notes being pinned, copied and recorded."""

    @staticmethod
    def of(tensor, log):
        arena = tensor.as_subclass(FakeArena)
        arena.log = log
        return arena

    def pin_memory(self):
        self.log.append(f"pinned {self.numel()}")
        return FakeArena.of(self.as_subclass(torch.Tensor).clone(), self.log)

    def to(self, device, non_blocking=False):
        self.log.append(f"copied {self.numel()} {'without' if non_blocking else 'and'}")
        return FakeArena.of(self.as_subclass(torch.Tensor).clone(), self.log)

    def record_stream(self, stream):
        self.log.append(f"recorded {stream.name}")


class FakeBatch:
    def __init__(self, batch, log):
        for name in ("n_graphs", "n_slots", "totals", "nbytes", "offsets"):
            setattr(self, name, getattr(batch, name))
        self.fields, self.ptrs, self.batches = batch.fields, batch.ptrs, batch.batches
        self.arena = FakeArena.of(graph_device._arena(batch), log)


def core_batch(cache, graphs=4):
    kept = []

    def output(plan):
        return lambda batch: kept.append(batch)

    output.array_type = torch.Tensor
    next(iter(gc.Loader(cache, graphs, output=output)))
    return kept[0]


@pytest.mark.parametrize("device", ["cuda:0", "cuda"])
def test_cuda_mover_copies_once_on_its_stream_and_consumer_waits(cache, device):
    cuda = FakeCuda()
    move = graph_device._CudaMover(torch.device(device), cuda)
    batch = core_batch(cache)
    for _ in range(2):
        moved = move(FakeBatch(batch, cuda.log))
        cuda.current = 1  # "cuda" stays the GPU that was current at the first batch
    once = [
        "on mover",
        f"pinned {batch.nbytes}",
        f"copied {batch.nbytes} without",
        "off",
        "consumer waits for mover",
        "recorded consumer",
    ]
    assert cuda.log == ["new stream", *once, *once]
    for mine, theirs in zip(moved.fields, batch.fields):
        assert torch.equal(mine, theirs)
    base = moved.arena.untyped_storage().data_ptr()
    assert {t.untyped_storage().data_ptr() for t in moved.fields} == {base}


@pytest.mark.parametrize("output", ["dict", lambda plan: lambda batch: vars_of(batch)])
def test_device_gives_tensors_there_with_the_same_shapes(cache, output):
    here = list(gc.Loader(cache, 4, output=output, device="cpu"))
    there = list(gc.Loader(cache, 4, output=output, device="meta"))
    assert len(here) == len(there) == 3
    for mine, theirs in zip(here, there):
        assert list(mine) == list(theirs)
        for key, tensor in mine.items():
            assert tensor.device.type == "cpu" and theirs[key].device.type == "meta"
            assert tensor.shape == theirs[key].shape
            assert tensor.stride() == theirs[key].stride()
            assert tensor.dtype == theirs[key].dtype


def vars_of(batch):
    return {str(i): t for i, t in enumerate([*batch.fields, *batch.ptrs])}


def test_views_of_moved_arena_lie_where_the_arrays_lay(cache):
    batch = core_batch(cache)
    arena = graph_device._arena(batch).clone()
    moved = graph_device.MovedBatch(batch, arena)
    groups = ((moved.fields, batch.fields), (moved.ptrs, batch.ptrs))
    for mine, theirs in (*groups, (moved.batches, batch.batches)):
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs):
            assert torch.equal(a, b)
            assert a.untyped_storage().data_ptr() == arena.data_ptr()
    assert (moved.n_graphs, moved.totals) == (batch.n_graphs, batch.totals)


def test_cpu_device_gives_the_values_of_numpy(cache):
    for mine, theirs in zip(gc.Loader(cache, 4, device="cpu"), gc.Loader(cache, 4)):
        assert list(mine) == list(theirs)
        for key, array in theirs.items():
            assert isinstance(mine[key], torch.Tensor)
            assert np.array_equal(mine[key].numpy(), array)


def test_padding_and_followed_keys_are_tensors_on_the_device(cache):
    loader = gc.Loader(cache, 4, device="cpu", pad_to="max", follow_batch=["y", "x"])
    for batch in loader:
        assert {type(value) for value in batch.values()} == {torch.Tensor}
        assert batch["graph_mask"].dtype == torch.bool
        assert batch["y_batch"].tolist() == list(range(5))


def test_pinned_batches_are_pinned_where_an_accelerator_is(cache):
    if not torch.accelerator.is_available():
        with pytest.warns(UserWarning, match="pin_memory does nothing"):
            loader = gc.Loader(cache, 4, pin_memory=True)
        assert {type(v) for v in next(iter(loader)).values()} == {torch.Tensor}
        return
    batch = next(iter(gc.Loader(cache, 4, pin_memory=True)))
    assert all(value.is_pinned() for value in batch.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_batches_on_cuda_have_the_values(cache):
    for _ in range(20):
        loader = gc.Loader(cache, 4, device="cuda", shuffle=True, seed=0)
        for batch, here in zip(loader, gc.Loader(cache, 4, shuffle=True, seed=0)):
            for key, array in here.items():
                assert np.array_equal(batch[key].cpu().numpy(), array)
