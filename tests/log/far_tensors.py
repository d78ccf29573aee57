"""Tensors that say they lie on a GPU, and a GPU that tells when it is waited for."""

import torch
from torch import Tensor

READS = ("item", "tolist", "__float__", "__int__", "__bool__", "__index__", "numpy")


class Gpu:
    """Counts what tests ask about; `finished` is whether copies have come."""

    def __init__(self):
        self.finished = False
        self.transfers = self.reads = self.waits = 0


GPU = Gpu()


class Far(Tensor):
    """A tensor of the host whose device is cuda:0."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__self__", None) is Tensor.device:
            return torch.device("cuda:0")
        if func.__name__ in READS:
            GPU.reads += 1
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.to and args[1] == "cpu":
            assert kwargs == {"non_blocking": True}
            GPU.transfers += 1
            return args[0].as_subclass(Tensor).clone()
        return super().__torch_function__(func, types, args, kwargs)


class Event:
    def record(self, stream):
        assert stream == "the stream"

    def query(self):
        return GPU.finished

    def synchronize(self):
        GPU.waits += not GPU.finished


def far(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype).as_subclass(Far)


def use_fake_gpu(monkeypatch):
    GPU.__init__()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    return GPU
