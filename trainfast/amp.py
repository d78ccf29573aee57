"""Loss scaling for NumPy and JAX loops: keep float16 gradients from underflowing."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainfast import _core
from trainfast.adamw import AdamW
from trainfast.arrays import FLOATS, Array, dense, dtype_name, number, scalar
from trainfast.stats import count_call

_KEYS = (
    "scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "_growth_tracker",
)


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

    The scale lives on the host, so a step waits for arrays on a GPU.

    Raises ValueError for an argument out of range.
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
        self.min_scale = min_scale
        self.max_scale = max_scale
        self.hysteresis = hysteresis
        self._scale = np.full(1, _checked("init_scale", init_scale), np.float32)
        self._growth_tracker = np.zeros(1, np.int32)
        self._hysteresis_tracker = np.full(1, hysteresis, np.int32)
        self._workspace = _core.Workspace()
        self._forget()
        _update(self, [arrays.copy() for arrays in self._arrays()], 0.0)

    def _arrays(self) -> list[np.ndarray]:
        return [self._scale, self._growth_tracker, self._hysteresis_tracker]

    def _forget(self) -> None:
        """Starts an iteration: nothing unscaled, nothing stepped."""
        self._found: list[float] = []
        self._unscaled: dict[int, tuple[Array, float]] = {}  # by id, kept alive
        self._stepped: dict[int, Any] = {}  # optimizers and gradients

    # ---- An iteration --------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """A loss times the scale: a number, an array, or a list or tuple of them."""
        if isinstance(outputs, (list, tuple)):
            return type(outputs)([self.scale(output) for output in outputs])
        if dtype_name(outputs) in FLOATS:
            # in float32, where 65536 does not overflow as in float16
            return (outputs * self._scale[0]).astype(outputs.dtype)
        return outputs * self.get_scale()

    def unscale_(self, grads: Sequence[Array]) -> bool:
        """Divides the gradients by the scale in place; True if all are finite.

        Not needed before `step`, only to look at the gradients, or to change them in
        place. `step` knows them again by identity: it must get these very arrays.

        Raises RuntimeError if that was done since the last update(), or they have been
        stepped with; ValueError for read-only arrays, and once the scale has backed off
        to 0.
        """
        grads = list(grads)
        if any(id(grad) in self._stepped for grad in grads):
            raise RuntimeError("unscale_() is being called after step().")
        if any(id(grad) in self._unscaled for grad in grads):
            raise RuntimeError(
                "unscale_() has already been called on these gradients since the last "
                "update()."
            )
        if not grads:
            return True
        self._check_scale()
        found = number(self._divide(grads))
        self._unscaled.update({id(grad): (grad, found) for grad in grads})
        self._found.append(found)
        return found == 0

    def _check_scale(self) -> None:
        """Refuses a scale by which every gradient would become NaN without notice."""
        _checked("the loss scale", self.get_scale())

    def _divide(self, grads: list[Array]) -> Array:
        """Unscales in place and returns the flag."""
        like = grads[0]
        found = scalar(like, 0.0)
        options = {"grad_scale": scalar(like, self.get_scale()), "rewrite": "multiply"}
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

    def step(self, optimizer: Any, grads: Sequence[Array]) -> bool:
        """Steps unless a gradient is not finite; returns whether it did.

        trainfast.AdamW reads the gradients twice and unscales in registers; any other
        optimizer gets them unscaled in place, by its `step(grads)`.

        Raises RuntimeError if the optimizer was stepped since the last update(), or
        only some of the gradients have been unscaled; ValueError once the scale has
        backed off to 0.
        """
        grads = list(grads)
        if id(optimizer) in self._stepped:
            raise RuntimeError(
                "step() has already been called since the last update()."
            )
        if not grads:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        known = [self._unscaled.get(id(grad)) for grad in grads]
        if any(known) and not all(known):
            raise RuntimeError("step() got gradients of which only some are unscaled.")
        fused = isinstance(optimizer, AdamW)
        if not fused and not any(known):
            self.unscale_(grads)
            known = [self._unscaled[id(grad)] for grad in grads]
        if not any(known):
            self._check_scale()
            done = optimizer.step_checked(grads, self.get_scale())
            self._found.append(float(not done))
        else:
            found = float(any(flag != 0 for _, flag in known))
            done = found == 0
            if fused:
                optimizer.step_checked(grads, None, found)
            elif done:
                optimizer.step(grads)
        for stepped in (optimizer, *grads):
            self._stepped[id(stepped)] = stepped
        return done

    def update(self, new_scale: float | None = None) -> None:
        """Ends the iteration: grows the scale, backs it off, or sets a new one.

        Raises AssertionError if nothing was stepped or unscaled.
        """
        if new_scale is not None:
            self._scale[0] = _checked("new_scale", new_scale)
        elif not self._found:
            raise AssertionError("No inf checks were recorded prior to update.")
        else:
            _update(self, self._arrays(), float(any(f != 0 for f in self._found)))
        self._forget()

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
        """Takes what `state_dict` gave here, or torch's.

        Raises RuntimeError for an empty one, as a disabled torch scaler saves; KeyError
        and ValueError for one that is incomplete or out of range. Nothing has changed
        then.
        """
        if not state:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved "
                "from a disabled instance of GradScaler."
            )
        missing = [key for key in _KEYS if key not in state]
        if missing:
            raise KeyError(f"state must have the keys {_KEYS}, lacks {missing}")
        made = LossScaler(
            state["scale"],
            state["growth_factor"],
            state["backoff_factor"],
            state["growth_interval"],
            min_scale=self.min_scale,
            max_scale=self.max_scale,
            hysteresis=self.hysteresis,
        )
        made._growth_tracker[0] = state["_growth_tracker"]
        saved = state.get("_hysteresis_tracker", self.hysteresis)
        made._hysteresis_tracker[0] = min(saved, self.hysteresis)
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            setattr(self, name, state[name])
        for mine, new in zip(self._arrays(), made._arrays(), strict=True):
            mine[...] = new


def _checked(name: str, scale: float) -> float:
    with np.errstate(over="ignore"):
        rounded = float(np.float32(scale))
    if not 0 < rounded < math.inf:
        raise ValueError(f"{name} must be a float32 > 0 and finite, got {scale}")
    return rounded


def _update(scaler: LossScaler, arrays: list[np.ndarray], found: float) -> None:
    """torch's rule, with bounds and hysteresis: tfast_amp_update in csrc/tfast.h."""
    scale, growth, hysteresis = arrays
    _core.amp_update(
        scale,
        growth.view(np.float32),
        [np.full(1, found, np.float32)],
        growth_factor=scaler.growth_factor,
        backoff_factor=scaler.backoff_factor,
        growth_interval=scaler.growth_interval,
        min_scale=0.0 if scaler.min_scale is None else scaler.min_scale,
        max_scale=math.inf if scaler.max_scale is None else scaler.max_scale,
        hysteresis=scaler.hysteresis,
        hysteresis_tracker=hysteresis.view(np.float32),
    )
