"""The state of training, kept on the host and put back bit for bit."""

import copy
from collections.abc import Iterable
from typing import Any

import torch

from trainfast.torch.random_states import RandomStates


class Gradients:
    """Those that there are, copied to the host; `restore()` leaves the same tensors."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._all = [
            (p, p.grad, None if p.grad is None else _on_host(p.grad))
            for p in parameters
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, gradient, kept in self._all:
            parameter.grad = gradient
            if gradient is not None and kept is not None:
                gradient.copy_(kept)


class Snapshot:
    """Copies everything that training steps change; `restore()` undoes the steps.

    Weights, buffers, gradients, the optimizer's state and hyperparameters, the scaler,
    the schedulers, train or eval mode, and the random states of Python, NumPy and torch
    are kept. The tensors are the same objects afterwards.

    Args:
        model: a module.
        optimizer: its state may be empty: it is empty again after `restore()`.
        scaler: a GradScaler.
        schedulers: learning rate schedulers.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: Any = None,
        schedulers: Iterable[Any] = (),
    ) -> None:
        self._modules = [
            (m, m.training, dict(m._parameters), dict(m._buffers))
            for m in model.modules()
        ]
        tensors = [*model.parameters(), *model.buffers()]
        self._tensors = [(t, _on_host(t), t.requires_grad) for t in tensors]
        parameters: list[torch.Tensor] = list(model.parameters())
        if optimizer is not None:
            for group in optimizer.param_groups:
                parameters += group["params"]
        self._gradients = Gradients(dict.fromkeys(parameters))
        self._optimizer = optimizer
        if optimizer is not None:
            self._state = {
                param: {name: _kept(value) for name, value in state.items()}
                for param, state in optimizer.state.items()
            }
            self._groups = [
                {name: _kept(v) for name, v in group.items() if name != "params"}
                for group in optimizer.param_groups
            ]
        self._scaler, self._scaler_state = scaler, None
        if scaler is not None:
            self._scaler_state = copy.deepcopy(vars(scaler))
        self._schedulers = [(s, copy.deepcopy(s.state_dict())) for s in schedulers]
        self._random = RandomStates()

    @torch.no_grad()
    def restore(self) -> None:
        """May be called more than once."""
        for module, training, parameters, buffers in self._modules:
            module.training = training
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        for tensor, data, requires_grad in self._tensors:
            tensor.copy_(data)
            if tensor.is_leaf:
                tensor.requires_grad_(requires_grad)
        self._gradients.restore()
        if self._optimizer is not None:
            self._restore_optimizer(self._optimizer)
        if self._scaler is not None:
            vars(self._scaler).update(copy.deepcopy(self._scaler_state))
        for scheduler, state in self._schedulers:
            scheduler.load_state_dict(copy.deepcopy(state))
        self._random.restore()

    def _restore_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.state.clear()
        for param, state in self._state.items():
            optimizer.state[param] = {n: _restored(*kept) for n, kept in state.items()}
        for group, kept_group in zip(optimizer.param_groups, self._groups, strict=True):
            for name in group.keys() - kept_group.keys() - {"params"}:
                del group[name]
            group.update({n: _restored(*kept) for n, kept in kept_group.items()})


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _kept(value: Any) -> tuple[Any, Any]:
    """The object and a copy of what it holds."""
    if isinstance(value, torch.Tensor):
        return value, _on_host(value)
    return value, copy.deepcopy(value)


def _restored(value: Any, copied: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.copy_(copied)
    return copy.deepcopy(copied)
