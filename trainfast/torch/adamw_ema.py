"""The EMA of an optimizer's parameters: put in their place, and copied out."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class EmaWeights:
    """What trainfast's torch optimizers do with the EMA in their state."""

    param_groups: list[dict[str, Any]]
    state: Any
    _before_ema: list[tuple[Tensor, Tensor]]  # not empty while the EMA is in place

    @torch.no_grad()
    def swap_ema(self) -> None:
        """Puts the EMA into the parameters; called again, puts back what was there.

        Takes a copy of the parameters in between, in which step() refuses to run.
        Parameters without an EMA (no step yet) stay as they are.
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

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """The EMA is in the parameters inside the with block: for evaluation.

        A block inside another one leaves it there.
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
    def copy_ema_to(self, params: Iterable[Tensor] | None = None) -> None:
        """Copies the EMA into `params`, in the order of the optimizer's parameters.

        None: into the optimizer's own parameters, for good, and their master weights.
        Raises ValueError where there are not as many.
        """
        own = [p for group in self.param_groups for p in group["params"]]
        targets = own if params is None else list(params)
        if len(targets) != len(own):
            raise ValueError(f"params must be {len(own)} tensors, got {len(targets)}")
        for param, target in zip(own, targets, strict=True):
            state = self.state.get(param, {})
            if "ema" in state:
                target.copy_(state["ema"])
                if target is param and "master_param" in state:
                    state["master_param"].copy_(state["ema"])

    def _emas(self) -> Iterator[tuple[Tensor, Tensor]]:
        found = False
        for group in self.param_groups:
            for param in group["params"]:
                found = found or group["ema_decay"] is not None
                if "ema" in self.state.get(param, {}):
                    yield param, self.state[param]["ema"]
        if not found:
            raise RuntimeError("there is no EMA: give AdamW an ema_decay")
