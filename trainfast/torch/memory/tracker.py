"""Records when each storage of a training step comes and goes."""

import weakref
from typing import Any

import torch

from trainfast.memory.gpus import Gpu
from trainfast.memory.trace import Trace
from trainfast.torch.memory.scratch import scratch_of, workspace_of
from trainfast.torch.private import (
    FakeTensor,
    TorchDispatchMode,
    storage_key,
    tree_leaves,
)

_aten = torch.ops.aten
# torch's backward formulas write into fresh zeros, except for subclasses such as fakes.
_IN_PLACE = {
    _aten.index_add.default: _aten.index_add_.default,
    _aten.index_put.default: _aten.index_put_.default,
    _aten.scatter_add.default: _aten.scatter_add_.default,
}
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv")


class Tracker(TorchDispatchMode):
    """A dispatch mode that writes a `Trace`.

    It sees fake and real tensors alike. A storage counts from the operation that
    returns it until torch frees it, at the size that it has then.

    Args:
        gpu: whose kernels' scratch is added; None: the CPU's.
    """

    def __init__(self, gpu: Gpu | None = None) -> None:
        super().__init__()
        self.trace = Trace()
        self.kind = "other"
        self.modules: list[str] = []  # those whose forward() runs, the innermost last
        self._gpu = gpu
        self._have_workspace: set[bool] = set()
        self._numbers: dict[int, int] = {}  # of the storages that are alive
        self._open = True

    def see(self, tensor: torch.Tensor, kind: str | None = None) -> None:
        """Counts the tensor's storage, once; `kind` replaces the storage's kind."""
        try:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
        except (NotImplementedError, RuntimeError):  # sparse tensors have none
            return
        key = storage_key(storage)
        number = self._numbers.get(key)
        if number is not None and self.trace.sizes[number] != size:  # it was resized
            self.trace.release(number)
            number = None
        if number is None:
            module = self.modules[-1] if self.modules else ""
            number = self.trace.allocate(size, kind or self.kind, module)
            self._numbers[key] = number
            weakref.finalize(storage, self._gone, key, number).atexit = False
        elif kind is not None:
            self.trace.kinds[number] = kind

    def _see_argument(self, tensor: torch.Tensor) -> None:
        kind, self.kind = self.kind, "other"
        self.see(tensor)
        self.kind = kind

    def see_all(self, tree: Any, kind: str | None = None) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf, kind)

    def close(self) -> None:
        """Storages that go from now on are not recorded."""
        self._open = False

    def _gone(self, key: int, number: int) -> None:
        if self._open and self._numbers.get(key) == number:
            del self._numbers[key]
            self.trace.release(number)

    def name_modules(self, model: torch.nn.Module) -> None:
        """Lets every module of the model say when its forward() runs."""

        def enter(name: str) -> Any:
            return lambda *_: self.modules.append(name)

        def leave(*_: Any) -> None:
            self.modules.pop()

        for name, module in model.named_modules():
            if name:
                module.register_forward_pre_hook(enter(name))
                module.register_forward_hook(leave, always_call=True)

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            # A tensor that the step holds by itself, such as another model's weight.
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
                self._see_argument(leaf)
        if args and self.kind == "temporaries" and isinstance(args[0], FakeTensor):
            function = _IN_PLACE.get(function, function)
        out = function(*args, **(kwargs or {}))
        name = function.__name__
        scratch = scratch_of(name, args, out, self._gpu)
        if scratch and self._gpu is None:
            self.trace.scratch(scratch)  # oneDNN's, gone before the results are there
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        if self._gpu is not None and name.partition(".")[0] in _PRODUCTS:
            self._take_workspace(self._gpu)
        if scratch and self._gpu is not None:
            self.trace.scratch(scratch)
        return out

    def _take_workspace(self, gpu: Gpu) -> None:
        """cuBLAS's, which each thread takes at its first product and keeps: torch's
        backward pass has a thread of its own."""
        in_backward = self.kind == "temporaries"
        if in_backward not in self._have_workspace:
            self._have_workspace.add(in_backward)
            self.trace.allocate(workspace_of(gpu), "workspaces")
