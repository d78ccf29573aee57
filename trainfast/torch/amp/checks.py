"""Checks of a GradScaler's arguments and of the state that it loads."""

import math
from typing import Any

import torch

_STATE_KEYS = (
    "scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "_growth_tracker",
)


def check_options(
    min_scale: float | None, max_scale: float | None, hysteresis: int
) -> None:
    for name, value in (("min_scale", min_scale), ("max_scale", max_scale)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be None or a number > 0, got {value}")
    if min_scale is not None and max_scale is not None and min_scale > max_scale:
        raise ValueError(
            f"min_scale must be <= max_scale ({max_scale}), got {min_scale}"
        )
    if not (isinstance(hysteresis, int) and 1 <= hysteresis < 2**31):
        raise ValueError(f"hysteresis must be an int >= 1, got {hysteresis!r}")


def check_init_scale(
    init_scale: float, min_scale: float | None, max_scale: float | None
) -> None:
    if not 0 < init_scale < math.inf:
        raise ValueError(f"init_scale must be a number > 0, got {init_scale}")
    low = 0.0 if min_scale is None else min_scale
    high = math.inf if max_scale is None else max_scale
    if not low <= init_scale <= high:
        raise ValueError(
            f"init_scale must be in [{low}, {high}], the bounds, got {init_scale}"
        )


def check_state(state_dict: dict[str, Any]) -> None:
    missing = [name for name in _STATE_KEYS if name not in state_dict]
    if missing:
        raise KeyError(
            f"a GradScaler's state must have {', '.join(_STATE_KEYS)}, got one "
            f"without {', '.join(missing)}"
        )
    whole = ("growth_interval", "_growth_tracker", "_hysteresis_tracker")
    for name in (*_STATE_KEYS, "_hysteresis_tracker"):
        if name in state_dict:
            value = state_dict[name]
            dtype = torch.int32 if name in whole else torch.float32
            try:
                torch.zeros((), dtype=dtype).fill_(value)
                (int if name in whole else float)(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(
                    f"{name} in a GradScaler's state must be a number, got {value!r}"
                ) from error
