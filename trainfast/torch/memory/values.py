"""Fake tensors that keep the values on which a step's shapes depend."""

from typing import Any

import torch

from trainfast.torch.private import (
    FakeTensor,
    TorchDispatchMode,
    tree_leaves,
    tree_map,
    unset_fake,
    without_dispatch_modes,
)

_MOST = 1 << 24  # elements that an operation may have to be computed really
_VALUE = "_trainfast_value"
_STALE = "_trainfast_stale"  # of a storage that something unknown was written to
_aten = torch.ops.aten
# Operations whose results have as many elements as their inputs at the most.
_AT_MOST_ALL = ("nonzero", "masked_select", "unique", "_unique2", "unique_dim")


class Values(TorchDispatchMode):
    """A dispatch mode above FakeTensorMode: small tensors are computed as well.

    Labels, masks, lengths and edges are small and known, so `item()`, `nonzero()` and
    indexing by a mask give what they would give. Where the value is unknown it is
    guessed, from above where that is possible, and counted in `guesses`.
    """

    def __init__(self, fake_mode: Any) -> None:
        super().__init__()
        self.guesses: dict[str, int] = {}
        self._fake_mode = fake_mode

    def fake(self, real: torch.Tensor) -> torch.Tensor:
        """The fake of a real tensor, with its values where it is small."""
        made: torch.Tensor = self._fake_mode.from_tensor(real)
        if real.numel() <= _MOST:
            with unset_fake(), torch.no_grad():
                setattr(made, _VALUE, real.detach().clone())
        return made

    def blank(self, real: torch.Tensor) -> torch.Tensor:
        """The fake of a real tensor, without its values."""
        made: torch.Tensor = self._fake_mode.from_tensor(real.detach())
        return made

    def suppose(self, fake: torch.Tensor, value: bool) -> None:
        """Gives a fake that has no values the same one everywhere."""
        if not self._has_value(fake) and fake.numel() <= _MOST:
            with without_dispatch_modes():
                setattr(fake, _VALUE, torch.full(fake.shape, value, dtype=fake.dtype))

    def real(self, fake: torch.Tensor) -> torch.Tensor:
        """The values of a fake; zeros where they are not known."""
        if self._has_value(fake):
            known: torch.Tensor = getattr(fake, _VALUE)
            return known
        self._guess("numbers")
        return torch.zeros(fake.shape, dtype=fake.dtype)

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        leaves = [t for t in tree_leaves((args, kwargs)) if _is_tensor(t)]
        name = function._schema.name.split("::")[-1]
        known = (
            all(self._has_value(t) for t in leaves)
            and sum(t.numel() for t in leaves) <= _MOST
        )
        if name == "_local_scalar_dense":
            if known:
                return self._computed(function, args, kwargs)
            return self._guessed_scalar(leaves[0])
        if name == "index":
            args = (args[0], self._without_masks(args[1]))
        elif torch.Tag.dynamic_output_shape in function.tags and (
            known or name in _AT_MOST_ALL
        ):
            return self._dynamic(function, name, known, args, kwargs)
        if name == "equal":
            return (
                self._computed(function, args, kwargs) if known else self._guess(name)
            )
        out = function(*args, **kwargs)
        results = [t for t in tree_leaves(out) if _is_tensor(t)]
        if known and sum(t.numel() for t in results) <= _MOST:
            real = tree_leaves(self._computed(function, args, kwargs))
            for made, value in zip(tree_leaves(out), real, strict=True):
                if isinstance(made, FakeTensor) and made.shape == value.shape:
                    setattr(made, _VALUE, value)
        elif function._schema.is_mutable:
            self._forget_written(function, args, kwargs)
        return out

    def _has_value(self, tensor: torch.Tensor) -> bool:
        if not isinstance(tensor, FakeTensor):
            return True
        return hasattr(tensor, _VALUE) and not hasattr(tensor.untyped_storage(), _STALE)

    def _computed(self, function: Any, args: Any, kwargs: Any) -> Any:
        def value(leaf: Any) -> Any:
            return getattr(leaf, _VALUE, leaf) if _is_tensor(leaf) else leaf

        with unset_fake(), torch.no_grad():
            return function(*tree_map(value, args), **tree_map(value, kwargs))

    def _forget_written(self, function: Any, args: Any, kwargs: Any) -> None:
        for place, argument in enumerate(function._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for leaf in tree_leaves(given):
                if isinstance(leaf, FakeTensor):
                    setattr(leaf.untyped_storage(), _STALE, True)

    def _dynamic(
        self, function: Any, name: str, known: bool, args: Any, kwargs: Any
    ) -> Any:
        """Operations whose result has a size that depends on values."""
        if known:
            real = self._computed(function, args, kwargs)
            return tree_map(lambda t: self.fake(t) if _is_tensor(t) else t, real)
        self._guess(name)
        count = args[0].numel()
        if name == "nonzero":
            return args[0].new_empty((count, args[0].dim()), dtype=torch.long)
        if name == "masked_select":
            return args[0].new_empty(count)
        indices = args[0].new_empty(count, dtype=torch.long)
        return args[0].new_empty(count), indices, indices.new_empty(count)

    def _without_masks(self, indices: Any) -> list[Any]:
        """Masks of an index as the numbers that they select."""
        found: list[Any] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            if self._has_value(index):
                mask = getattr(index, _VALUE, index)
            else:
                self._guess("mask")
                with unset_fake():
                    mask = torch.ones(index.shape, dtype=torch.bool)
            with unset_fake():
                numbers = mask.nonzero().unbind(1)
            found += [self.fake(number) for number in numbers]
        return found

    def _guess(self, name: str) -> bool:
        self.guesses[name] = self.guesses.get(name, 0) + 1
        return True

    def _guessed_scalar(self, tensor: torch.Tensor) -> bool | int | float:
        self._guess("item")
        if tensor.dtype == torch.bool:
            return False
        return 0.0 if tensor.dtype.is_floating_point else 1


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)
