"""Half parameters that keep what rounding would lose: `rounding`, `compensation` and
`master_weights` of AdamW.

csrc/adamw_half.h has the arithmetic.
"""

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed

from trainfast.stats import count_fallback
from trainfast.torch import private
from trainfast.torch.optim import shards

HALF = (torch.float16, torch.bfloat16)
# What the state has beside a parameter, by rounding.
TAILS = {"kahan": "compensation", "split": "master_remainder"}
MASTER = "master_param"
# Groups, by what they keep of their parameters: a value of TAILS, or MASTER.
Tailed: TypeAlias = list[tuple[str, dict[str, Any]]]
SEED = "rounding_seed"  # in a param group
WRITTEN = "a parameter was written between two steps: its state of rounding was dropped"
_NOT_AFFINE = "params must not be DTensors that are sharded in two inner dimensions"


def rounding_of(group: dict[str, Any]) -> str:
    """How the core rounds the half parameters of a group that have no master."""
    if group["master_weights"] == "split":
        return "split"
    rounding: str = group["compensation"] or group["rounding"]
    return rounding


def keeps_weights(group: dict[str, Any]) -> bool:
    """Whether an option of the group keeps what rounding its parameters would lose."""
    return bool(group["master_weights"]) or rounding_of(group) != "nearest"


def check(group: dict[str, Any]) -> None:
    """Raises ValueError for one of the three options out of range, and for two."""
    choices = {
        "rounding": ("nearest", "stochastic"),
        "compensation": (None, "kahan"),
        "master_weights": (False, True, "split"),
    }
    for name, allowed in choices.items():
        if group[name] not in allowed:
            texts = ", ".join(map(repr, allowed[:-1]))
            raise ValueError(
                f"{name} must be {texts} or {allowed[-1]!r}, got {group[name]!r}"
            )
    chosen = [name for name, (plain, *_) in choices.items() if group[name] != plain]
    if len(chosen) > 1:
        raise ValueError(
            f"{' and '.join(chosen)} must not be given together: each is a way to keep "
            "what rounding would lose"
        )
    if group["state_dtype"] == torch.float64 and rounding_of(group) != "nearest":
        raise ValueError(
            f"state_dtype must not be float64 with {chosen[0]}={group[chosen[0]]!r}"
        )


def tail_of(param: Tensor, group: dict[str, Any]) -> dict[str, torch.dtype]:
    """The array beside a parameter in the state, by name, and its dtype; or nothing."""
    name = TAILS.get(rounding_of(group))
    if name is None or param.dtype not in HALF:
        return {}
    if name == "master_remainder" and param.dtype != torch.bfloat16:
        raise ValueError(
            f"params must not be {str(param.dtype).removeprefix('torch.')} with "
            'master_weights="split", which is for bfloat16; use master_weights=True'
        )
    return {name: param.dtype}


# ---- Master weights in the other form ------------------------------------------------

# What the state of an optimizer with master_weights=True has, and with "split".
OTHER_FORM = {
    "master_param": "master_remainder",
    "master_remainder": "master_param",
}


def convert(param: Tensor, state: dict[str, Any], wanted: Iterable[str]) -> bool:
    """Turns a loaded master weight into the form that is wanted; True if there was one.

    Called at the first step: the parameter may be loaded after the state.
    """
    name = next((n for n in OTHER_FORM if n in wanted and n not in state), None)
    if name is None or OTHER_FORM[name] not in state:
        return False
    other = state.pop(OTHER_FORM[name])
    convert_to = _remainder if name == "master_remainder" else _master
    state[name] = convert_to(param, other)
    return True


def _bits(param: Tensor) -> Tensor:
    """Of the float32 weight that the shard of a bfloat16 parameter is."""
    return shards.local(param).detach().view(torch.int16).int() << 16


def _remainder(param: Tensor, master: Tensor) -> Tensor:
    """0 where the parameter is no rounded copy of the master."""
    rest = shards.local(master).view(torch.int32) - _bits(param)
    near = (rest >= -0x8000) & (rest <= 0x8000)  # a tie to even may be 0x8000
    rest = torch.where(near, rest, 0).clamp(max=0x7FFF).short()
    remainder = torch.zeros_like(param)
    shards.local(remainder).copy_(rest.view(torch.bfloat16))
    return remainder


def _master(param: Tensor, remainder: Tensor) -> Tensor:
    bits = _bits(param) + shards.local(remainder).view(torch.int16).int()
    master = torch.zeros_like(param, dtype=torch.float32)
    shards.local(master).copy_(bits.view(torch.float32))
    return master


# ---- Rounding at random --------------------------------------------------------------


def draw_seed(groups: Iterable[dict[str, Any]]) -> None:
    """Gives groups that round at random a seed, the same to all and in all processes.

    It comes from torch's generator of process 0, once in the life of an optimizer.
    """
    groups = [g for g in groups if g["rounding"] == "stochastic"]
    seeds = [g[SEED] for g in groups if isinstance(g.get(SEED), int)]
    if len(seeds) == len(groups):
        return
    seed = seeds[0] if seeds else _drawn(groups[0]["params"][0].device)
    for group in groups:
        group[SEED] = group.get(SEED, seed)


def _drawn(device: torch.device) -> int:
    with private.unset_fake():
        seed = torch.randint(1 << 62, (1,), dtype=torch.int64)
        if distributed.is_available() and distributed.is_initialized():
            seed = seed.to(device)
            distributed.broadcast(seed, 0)
        return int(seed.item())


def _shard_of(param: Any, index: int) -> tuple[int, int, int, int]:
    """Where a DTensor's shard stands: `origins` of _core.adamw_groups."""
    shape, start = private.shard_of(param)
    whole = tuple(param.shape)
    cut = [d for d in range(len(whole)) if shape[d] != whole[d]]
    if not cut:
        return index, 0, 0, 0
    last = cut[-1]
    inner = math.prod(whole[last + 1 :])
    if last == 0:
        return index, start[0] * inner, 0, 0
    if any(0 < d < last for d in cut):
        raise NotImplementedError(_NOT_AFFINE)
    stride = whole[last] * inner
    first = start[0] * math.prod(whole[1:last]) if 0 in cut else 0
    return index, first * stride + start[last] * inner, shape[last] * inner, stride


class Places:
    """What an optimizer remembers of its half parameters between steps."""

    def __init__(self) -> None:
        self._origins: dict[Tensor, Any] = {}
        self._versions: dict[Tensor, int] = {}

    def origins(
        self, groups: list[dict[str, Any]], group: dict[str, Any]
    ) -> list[Any] | None:
        """Where the group's parameters stand among those of all groups."""
        if rounding_of(group) != "stochastic":
            return None
        known = self._origins
        if any(param not in known for param in group["params"]):
            everything = [param for other in groups for param in other["params"]]
            for index, param in enumerate(everything):
                sharded = shards.is_sharded(param)
                known[param] = _shard_of(param, index) if sharded else index
        return [known[param] for param in group["params"]]

    @torch.no_grad()
    def drop_stale(self, tailed: Tailed, state: dict[Tensor, Any]) -> None:
        """Zeroes the tails of parameters that others have written to since the step;
        whole masters take what was written."""
        for name, group in tailed:
            for param in group["params"]:
                before = self._versions.get(param)
                if before is None or before == param._version:
                    continue
                del self._versions[param]
                kept = state.get(param, {}).get(name)
                if kept is None:
                    continue
                if name == MASTER:
                    kept.copy_(torch.where(kept.to(param.dtype) == param, kept, param))
                else:
                    kept.zero_()
                count_fallback("adamw", WRITTEN)

    def record(self, tailed: Tailed) -> None:
        """Remembers that the parameters have just been stepped."""
        for _, group in tailed:
            self._versions.update((p, p._version) for p in group["params"])

    def forget_writes(self) -> None:
        """What was written so far is no reason to drop anything."""
        self._versions.clear()


def with_tails(groups: Iterable[dict[str, Any]]) -> Tailed:
    found = []
    for group in groups:
        whole = MASTER if group["master_weights"] is True else None
        name = TAILS.get(rounding_of(group), whole)
        if name is not None:
            found.append((name, group))
    return found
