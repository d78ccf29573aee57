"""The user's step asks for "cuda"; its fakes are on the CPU."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainfast.torch.memory.values import Values
from trainfast.torch.private import FakeTensor, without_dispatch_modes


class _OnCpu(TorchFunctionMode):
    """Reads the device "cuda" as "cpu" in every function of torch."""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "backward" and isinstance(args[0], torch.Tensor):
            if "gradient" in kwargs:
                kwargs["grad_tensors"] = kwargs.pop("gradient")
            with self:  # checkpoints run their forward pass in there
                return torch.autograd.backward(*args, **kwargs)
        if name == "cuda":
            return args[0]
        if function is torch.device:  # the script may ask for its type
            return function(*args, **kwargs)
        args = tuple(map(_to_cpu, args))
        return function(*args, **{k: _to_cpu(v) for k, v in kwargs.items()})


def _to_cpu(value: Any) -> Any:
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


class _CopyFakes(TorchFunctionMode):
    """A deep copy of a fake is a new fake; nn.TransformerEncoder copies its layer."""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(function, "__name__", "") != "__deepcopy__":
            return function(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            copy = tensor.detach().clone()
            if isinstance(tensor, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, tensor.requires_grad)
            memo[id(tensor)] = copy
        return memo[id(tensor)]


# What these say of numbers that are not known: that they are finite, and that checks of
# them pass.
_SUPPOSED = {
    "isfinite": True,
    "isnan": False,
    "isinf": False,
    "all": True,
    "any": False,
}


class _Numbers(TorchFunctionMode):
    """numpy(), tolist() and isfinite() of fakes: of their values where they are known,
    else of zeros."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("numpy", "tolist", "__array__") and isinstance(args[0], FakeTensor):
            with without_dispatch_modes():
                real = self._values.real(args[0])
                return real.tolist() if name == "tolist" else real.numpy()
        out = function(*args, **(kwargs or {}))
        if name in _SUPPOSED and isinstance(out, FakeTensor):
            self._values.suppose(out, _SUPPOSED[name])
        return out


@contextlib.contextmanager
def numbers_of_fakes(values: Values) -> Iterator[None]:
    with _Numbers(values):
        yield


@contextlib.contextmanager
def cuda_means_cpu() -> Iterator[None]:
    """For as long as it lasts "cuda" is the CPU, for tensors and for autocast."""
    usual = torch.autocast.__init__

    def on_cpu(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        *args: Any,
        **k: Any,
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        usual(self, device_type, dtype, *args, **k)

    torch.autocast.__init__ = on_cpu  # type: ignore[method-assign]
    try:
        with _OnCpu():
            yield
    finally:
        torch.autocast.__init__ = usual  # type: ignore[method-assign]


@contextlib.contextmanager
def copied_as_fakes() -> Iterator[None]:
    with _CopyFakes():
        yield
