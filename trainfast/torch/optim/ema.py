"""The EMA of an optimizer's parameters: put in their place, and copied out."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainfast.torch.optim.half import Places

_NO_EMA = "there is no EMA: give AdamW an ema_decay"


class EmaWeights:
    """The methods of trainfast's torch optimizers for the EMA in their state."""

    param_groups: list[dict[str, Any]]
    state: Any
    _before_ema: list[tuple[Tensor, Tensor]]  # not empty while the EMA is in place
    _places: Places

    @torch.no_grad()
    def swap_ema(self) -> None:
        """Sets the parameters to their EMA; a second call restores them.

        Until then a copy of the parameters is kept, and step() raises RuntimeError.
        Parameters without an EMA (no step yet) are not changed.
        """
        if self._before_ema:
            self._put_back()
            return
        emas = list(self._emas())
        self._before_ema = [(param, param.detach().clone()) for param, _ in emas]
        try:
            for param, ema in emas:
                param.copy_(ema)
        except BaseException:
            self._put_back()
            raise

    def _put_back(self) -> None:
        for param, value in self._before_ema:
            param.copy_(value)
        self._before_ema = []
        self._places.forget_writes()

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Sets the parameters to their EMA inside the with block, for evaluation.

        A block inside another one changes nothing.
        """
        if self._before_ema:
            yield
            return
        self.swap_ema()
        try:
            yield
        finally:
            if self._before_ema:  # else nobody had an EMA then, or it was put back
                self.swap_ema()

    @torch.no_grad()
    def copy_ema_to(self, target: Any = None, source: Any = None) -> None:
        """Copies the EMA into the parameters of another model, or into the own ones.

            optimizer.copy_ema_to(ema_model, source=model)

        Args:
            target: a module, its named_parameters() or state_dict(): each parameter
                gets the EMA of the one of the same name. Or tensors alone: of the
                optimizer's parameters, in any order, or, of an optimizer with a single
                param group, as many others in that group's order. None: the
                optimizer's own parameters, for good, and their master weights.
            source: the trained module or its named_parameters(), for the names. Not
                needed where the optimizer knows them: AdamW(model.named_parameters()).

        Buffers, and parameters without an EMA (frozen, or without a step so far), are
        left as they are. Raises ValueError where a parameter has no counterpart or one
        of another shape; nothing is written then.
        """
        if not any(group["ema_decay"] is not None for group in self.param_groups):
            raise RuntimeError(_NO_EMA)
        pairs = self._counterparts(target, source)
        for param, other, name in pairs:
            if other.shape != param.shape:
                raise ValueError(
                    f"{name} must have shape {tuple(param.shape)}, "
                    f"got {tuple(other.shape)}; give a target of the same architecture"
                )
        for param, other, _ in pairs:
            state = self.state.get(param, {})
            if "ema" in state:
                other.copy_(state["ema"])
                if other is param and "master_param" in state:
                    state["master_param"].copy_(state["ema"])

    def _counterparts(
        self, target: Any, source: Any
    ) -> list[tuple[Tensor, Tensor, str]]:
        """Each parameter with its tensor in `target`, and what to call that."""
        own = [p for group in self.param_groups for p in group["params"]]
        if target is None:
            return [(p, p, "params") for p in own]
        named, tensors = _named(target)
        known = {id(p) for p in own}
        if tensors and all(id(tensor) in known for tensor in tensors):
            return [(tensor, tensor, "params") for tensor in tensors]
        if named is not None:
            return _by_name(own, self._names_of(source), named)
        if len(self.param_groups) > 1 or source is not None:
            raise ValueError(
                "target must be a module or its named_parameters(), got tensors "
                "without names, whose order may not be that of the param groups; use "
                "copy_ema_to(ema_model, source=model)"
            )
        if len(tensors) != len(own):
            raise ValueError(
                f"target must have {len(own)} tensors, got {len(tensors)}; use "
                "copy_ema_to(ema_model, source=model)"
            )
        places = range(len(own))
        return [(own[i], tensors[i], f"target[{i}]") for i in places]

    def _names_of(self, source: Any) -> dict[int, list[str]]:
        """The names of the optimizer's parameters, by their ids."""
        names: dict[int, list[str]] = {}
        if source is not None:
            named, _ = _named(source)
            if named is None:
                raise ValueError(
                    "source must be a module or its named_parameters(), got tensors "
                    "without names"
                )
            for name, tensor in named:
                names.setdefault(id(tensor), []).append(name)
            return names
        for group in self.param_groups:
            if "param_names" not in group:
                raise ValueError(
                    "source must be given where the optimizer knows no names; use "
                    "copy_ema_to(ema_model, source=model)"
                )
            for name, param in zip(group["param_names"], group["params"], strict=True):
                names.setdefault(id(param), []).append(name)
        return names

    def _emas(self) -> Iterator[tuple[Tensor, Tensor]]:
        found = False
        for group in self.param_groups:
            for param in group["params"]:
                found = found or group["ema_decay"] is not None
                if "ema" in self.state.get(param, {}):
                    yield param, self.state[param]["ema"]
        if not found:
            raise RuntimeError(_NO_EMA)


def _named(model: Any) -> tuple[list[tuple[str, Tensor]] | None, list[Tensor]]:
    """Names and tensors of a module, pairs or a mapping; None for tensors alone."""
    if isinstance(model, torch.nn.Module):
        model = model.named_parameters(remove_duplicate=False)
    pairs = list(model.items() if isinstance(model, Mapping) else model)
    if pairs and all(isinstance(pair, tuple) for pair in pairs):
        return pairs, [tensor for _, tensor in pairs]
    return None, pairs


def _by_name(
    own: list[Tensor], names: dict[int, list[str]], named: list[tuple[str, Tensor]]
) -> list[tuple[Tensor, Tensor, str]]:
    targets = dict(named)
    pairs = []
    for i, param in enumerate(own):
        if id(param) not in names:
            raise ValueError(
                f"source must be the model that the optimizer steps, got one without "
                f"its parameter {i}"
            )
        found = [name for name in names[id(param)] if name in targets]  # tied: many
        if not found:
            raise ValueError(
                f"target must have the parameter {names[id(param)][0]!r}, got "
                f"{len(targets)} others; give a target of the same architecture"
            )
        pairs += [(param, targets[name], name) for name in found]
    return pairs
