"""Loss scaling for NumPy and JAX loops: keep float16 gradients from underflowing."""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainfast import _core
from trainfast.numpy.adamw import AdamW
from trainfast.numpy.adamw_state import check_scale, plain
from trainfast.numpy.arrays import (
    FLOATS,
    HALVES,
    Array,
    dense,
    dtype_name,
    number,
    scalar,
)
from trainfast.report import attributes, one_line
from trainfast.stats import count_call

_KEYS = (
    "scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "_growth_tracker",
)


@dataclass
class _Progress:
    """How far one optimizer is in this iteration."""

    optimizer: Any  # kept alive, for it is known by its id
    unscaled: bool = False
    stepped: bool = False
    found: list[float] = field(default_factory=list)  # a flag for each look


class LossScaler:
    """torch.amp.GradScaler for lists of arrays::

        scaled_loss, grads = value_and_grad(lambda w: scaler.scale(loss(w)))(weights)
        scaler.step(optimizer, grads)
        scaler.update()

    Args:
        init_scale: what the loss is multiplied by at first.
        growth_factor, growth_interval: the scale is multiplied by this factor after so
            many steps in a row without overflow.
        backoff_factor: and by this one after an overflow.
        min_scale, max_scale: where backing off and growing stop.
        hysteresis: how many overflows in a row make the scale back off.

    As there, each optimizer's gradients are unscaled and stepped with once between two
    calls of update(); between `unscale_` and `step` they may be changed, in place or
    into other arrays. The scale lives on the host, so a step waits for arrays on a GPU.

    Raises ValueError for an argument out of range, or bounds that `init_scale` breaks.
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
    ) -> None:
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        whole = {"growth_interval": growth_interval, "hysteresis": hysteresis}
        for name, given in whole.items():
            if not hasattr(given, "__index__") or given.__index__() >= 2**31:
                raise ValueError(f"{name} must be an int < 2^31, got {given!r}")
        self.min_scale = min_scale
        self.max_scale = max_scale
        self.hysteresis = hysteresis
        self._scale = np.full(1, check_scale("init_scale", init_scale), np.float32)
        self._growth_tracker = np.zeros(1, np.int32)
        self._hysteresis_tracker = np.full(1, hysteresis, np.int32)
        self._workspace = _core.Workspace()
        self._progress: dict[int, _Progress] = {}  # since the last update()
        _update(self, [arrays.copy() for arrays in self._arrays()], 0.0)
        low = 0.0 if min_scale is None else min_scale
        high = math.inf if max_scale is None else max_scale
        if not low <= init_scale <= high:
            raise ValueError(
                f"init_scale must be in [{low}, {high}], the bounds, got {init_scale}"
            )

    def __repr__(self) -> str:
        names = "growth_factor backoff_factor growth_interval min_scale max_scale "
        names += "hysteresis"
        scale = self.get_scale() if "_scale" in vars(self) else None
        return one_line(self, scale=scale, **attributes(self, names))

    def __getstate__(self) -> dict[str, Any]:
        if self._progress:
            raise AssertionError(
                "A LossScaler may only be copied at the beginning of an iteration, or "
                "at the end after update()."
            )
        return {n: copy(value) for n, value in vars(self).items() if n != "_workspace"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._workspace = _core.Workspace()

    def _arrays(self) -> list[np.ndarray]:
        return [self._scale, self._growth_tracker, self._hysteresis_tracker]

    def _progress_of(self, optimizer: Any) -> _Progress:
        return self._progress.setdefault(id(optimizer), _Progress(optimizer))

    # ---- An iteration --------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiplies losses by the scale.

        Float16 and bfloat16 become float32, in which 65536 times a loss is finite. The
        scale changes between steps, but jax.jit would compile it as a constant: pass
        `get_scale()` to the compiled function as an argument.

        Args:
            outputs: a number, an array, or a list or tuple of them.

        Returns:
            The same structure.
        """
        if isinstance(outputs, (list, tuple)):
            return type(outputs)([self.scale(output) for output in outputs])
        if dtype_name(outputs) in HALVES:
            outputs = outputs.astype(np.float32)
        if dtype_name(outputs) in FLOATS:
            return outputs * self._scale[0]
        return outputs * self.get_scale()

    def unscale_(self, optimizer: Any, grads: Sequence[Array]) -> bool:
        """Divides the optimizer's gradients by the scale in place.

        `step` does not need it. Call it to read or change the unscaled gradients: then
        `step` takes its gradients as unscaled. Float16 gradients become 0 if the
        quotient is below 2^-25, and lose digits below 2^-14; AdamW's step divides in
        registers, in float32.

        Args:
            optimizer: the optimizer that will step with the gradients.
            grads: writable arrays.

        Returns:
            Whether all gradients are finite.

        Raises:
            RuntimeError: the optimizer's gradients were unscaled, or it has stepped,
                since the last update().
            ValueError: read-only arrays, or a scale that has backed off to 0.
        """
        progress = self._progress_of(optimizer)
        if progress.stepped:
            raise RuntimeError("unscale_() is being called after step().")
        if progress.unscaled:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last "
                "update()."
            )
        grads = list(grads)
        if grads:
            progress.found.append(number(self._divide(grads)))
        progress.unscaled = True
        return not any(progress.found)

    def _divide(self, grads: list[Array]) -> Array:
        """Unscales in place and returns the flag."""
        like = grads[0]
        found = scalar(like, 0.0)
        scale = scalar(like, self._usable_scale())
        options = {"grad_scale": scale, "rewrite": "multiply"}
        try:
            _core.amp_grads(grads, self._workspace, found_inf=found, **options)
        except NotImplementedError:
            if not all(getattr(g, "flags", None) and g.flags.writeable for g in grads):
                raise
            copies = dense(grads, "amp")
            _core.amp_grads(copies, self._workspace, found_inf=found, **options)
            for grad, copy in zip(grads, copies, strict=True):
                if copy is not grad:
                    grad[...] = copy
        count_call("amp", _core.backend_in_use())
        return found

    def _usable_scale(self) -> float:
        """The scale; not 0, by which every gradient would become NaN without notice."""
        return check_scale("the loss scale", self.get_scale())

    def step(self, optimizer: Any, grads: Sequence[Array]) -> bool:
        """Steps the optimizer unless a gradient is not finite.

        trainfast.numpy.AdamW reads the gradients twice and unscales in registers. Other
        optimizers get gradients that are unscaled in place, as `step(grads)`. After
        `unscale_` gradients are taken as they are, without another check.

        Args:
            optimizer: trainfast.numpy.AdamW, or any object with `step(grads)`.
            grads: one array for each parameter.

        Returns:
            Whether the optimizer has stepped.

        Raises:
            RuntimeError: the optimizer has stepped since the last update().
            AssertionError: there are no gradients.
            ValueError: the scale has backed off to 0.
        """
        progress = self._progress_of(optimizer)
        if progress.stepped:
            raise RuntimeError(
                "step() has already been called since the last update()."
            )
        grads, fused = list(grads), isinstance(optimizer, AdamW)
        if not (progress.unscaled or fused):
            self.unscale_(optimizer, grads)
        if not (progress.found if progress.unscaled else grads):
            raise AssertionError("No inf checks were recorded for this optimizer.")
        if not progress.unscaled:
            done = optimizer.step_checked(grads, self._usable_scale())
            progress.found.append(float(not done))
        else:
            done = not any(progress.found)
            if fused:
                optimizer.step_checked(grads, None, float(not done))
            elif done:
                optimizer.step(grads)
        progress.stepped = True
        return done

    def update(self, new_scale: float | None = None) -> None:
        """Ends the iteration: the scale grows, backs off, or is set.

        Args:
            new_scale: the new scale; None: torch's rule decides.

        Raises:
            AssertionError: no optimizer has stepped or unscaled its gradients.
        """
        found = [flag for each in self._progress.values() for flag in each.found]
        if new_scale is not None:
            self._scale[0] = check_scale("new_scale", new_scale)
        elif not found:
            raise AssertionError("No inf checks were recorded prior to update.")
        else:
            _update(self, self._arrays(), float(any(found)))
        self._progress = {}

    def get_scale(self) -> float:
        """The current scale."""
        return float(self._scale[0])

    # ---- State ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What torch.amp.GradScaler's has, and the hysteresis where there is one."""
        state = {
            "scale": self.get_scale(),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self._growth_tracker[0]),
        }
        if self.hysteresis > 1:
            state["_hysteresis_tracker"] = int(self._hysteresis_tracker[0])
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state of this class or of torch.amp.GradScaler.

        Args:
            state: what `state_dict` returned.

        Raises:
            RuntimeError: an empty state, as a disabled torch scaler saves it.
            KeyError, ValueError: a state that is incomplete or out of range.
            Nothing has changed when it raises.
        """
        if not state:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved "
                "from a disabled instance of GradScaler."
            )
        missing = [key for key in _KEYS if key not in state]
        if missing:
            raise KeyError(f"state must have the keys {_KEYS}, lacks {missing}")
        state = {name: plain(value) for name, value in state.items()}
        made = LossScaler(
            state["scale"],
            state["growth_factor"],
            state["backoff_factor"],
            state["growth_interval"],
            hysteresis=self.hysteresis,
        )
        saved = state.get("_hysteresis_tracker", self.hysteresis)
        try:
            made._growth_tracker[0] = state["_growth_tracker"]
            made._hysteresis_tracker[0] = min(saved, self.hysteresis)
        except (OverflowError, TypeError) as error:
            raise ValueError(f"the trackers in the state must be int32: {error}") from (
                error
            )
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            setattr(self, name, state[name])
        for mine, new in zip(self._arrays(), made._arrays(), strict=True):
            mine[...] = new


def _update(scaler: LossScaler, arrays: list[np.ndarray], found: float) -> None:
    """torch's rule, with bounds and hysteresis: tfast_amp_update in csrc/tfast.h."""
    scale, growth, hysteresis = arrays
    _core.amp_update(
        scale,
        growth,
        [np.full(1, found, np.float32)],
        growth_factor=scaler.growth_factor,
        backoff_factor=scaler.backoff_factor,
        growth_interval=scaler.growth_interval,
        min_scale=0.0 if scaler.min_scale is None else scaler.min_scale,
        max_scale=math.inf if scaler.max_scale is None else scaler.max_scale,
        hysteresis=scaler.hysteresis,
        hysteresis_tracker=hysteresis,
    )
