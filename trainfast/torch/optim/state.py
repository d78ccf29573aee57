"""The options and the state of trainfast's torch optimizers: made, checked, loaded."""

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from trainfast.torch import private
from trainfast.torch.optim import codes, half, shards
from trainfast.torch.optim.half import HALF

# What a param group has besides torch's own entries.
OPTIONS: dict[str, Any] = {
    "state_dtype": None,
    "ema_decay": None,
    "weight_copy_dtype": None,
    "master_weights": False,
    "rounding": "nearest",
    "compensation": None,
    "zero_grad": False,
    "write_back_grads": False,
}
_DTYPES = (None, torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MOMENTS = ("exp_avg", "exp_avg_sq")
# What a warning says that the optimizer has no option for.
_DROPPED = {
    "ema": "ema_decay",
    "master_param": "master_weights=True",
    "master_remainder": 'master_weights="split"',
    "compensation": "compensation",
}
NO_CHECKS = "No inf checks were recorded for this optimizer."  # torch's message
_CONSTANTS = (int, float, bool, str, torch.dtype, type(None))
_EXTRAS = ("master_param", "weight_copy", *half.TAILS.values(), "ema")


def bump_versions(tensors: Iterable[Any]) -> None:
    """Tells autograd that the tensors among these were written in place."""
    written = [t for t in tensors if isinstance(t, Tensor)]
    if written:
        torch.autograd.graph.increment_version(written)


@torch.no_grad()
def relayout(like: Tensor, value: Tensor) -> Tensor:
    """A copy of `value` with the strides of `like`, which must be dense."""
    copy = torch.empty_strided(
        like.shape, like.stride(), dtype=value.dtype, device=value.device
    )
    return copy.copy_(value)


def conformed(like: Tensor, value: Tensor) -> Tensor:
    """State with the strides of its parameter, whose shape it has; of DTensors with the
    parameter's placements, and the strides of its local tensor."""
    if shards.is_sharded(like) and shards.is_sharded(value):
        return shards.conformed(like, value, relayout)
    return value if value.stride() == like.stride() else relayout(like, value)


def recording_relayout(
    copies: list[tuple[Tensor, Tensor]],
) -> Callable[[Tensor, Tensor], Tensor]:
    """relayout() that remembers what it copied, so that it can be copied back."""

    def record(like: Tensor, value: Tensor) -> Tensor:
        copy = relayout(like, value)
        copies.append((value, copy))
        return copy

    return record


def has_grads(groups: Iterable[dict[str, Any]]) -> bool:
    return any(p.grad is not None for group in groups for p in group["params"])


# ---- Options -------------------------------------------------------------------------


def check_options(group: dict[str, Any]) -> None:
    """Raises ValueError for an option out of range, and for contradicting options."""
    if group["state_dtype"] not in (*_DTYPES, "int8"):
        raise ValueError(
            'state_dtype must be None, a floating dtype of torch or "int8", '
            f"got {group['state_dtype']}"
        )
    if group["weight_copy_dtype"] not in _DTYPES:
        raise ValueError(
            "weight_copy_dtype must be None or a floating dtype of torch, "
            f"got {group['weight_copy_dtype']}"
        )
    decay = group["ema_decay"]
    if decay is not None and not 0.0 <= decay < 1.0:
        raise ValueError(f"ema_decay must be None or in [0, 1), got {decay}")
    half.check(group)
    if group["master_weights"] and group["weight_copy_dtype"] is not None:
        raise ValueError(
            "master_weights and weight_copy_dtype must not be given together: with "
            "master weights the parameter is the copy"
        )
    if group["zero_grad"] and group["write_back_grads"]:
        raise ValueError(
            "zero_grad and write_back_grads must not be given together: one gradient "
            "cannot be both zeroed and kept"
        )
    changed = [name for name, plain in OPTIONS.items() if group[name] != plain]
    if group["differentiable"] and changed:
        raise ValueError(
            f"differentiable=True must not be given with {', '.join(changed)}"
        )


def complete(group: dict[str, Any], defaults: dict[str, Any], is_adam: bool) -> None:
    """Adds the options that a group lacks; checks all of them."""
    for name, plain in OPTIONS.items():
        group.setdefault(name, defaults.get(name, plain))
    check_options(group)
    if not private.ADAM_DECOUPLES:
        check_decoupled(is_adam and group.get("decoupled_weight_decay", False))
        group["decoupled_weight_decay"] = not is_adam  # as torch has it from 2.7 on


def check_decoupled(value: bool) -> None:
    """Raises ValueError if this torch has no decoupled Adam."""
    if value and not private.ADAM_DECOUPLES:
        raise ValueError(
            "decoupled_weight_decay of Adam must be False in torch before 2.7, got "
            f"{value} with torch {torch.__version__}; use AdamW"
        )


def needs_scaling(groups: list[dict[str, Any]], offered: bool | None) -> bool:
    """True where an option asks for a step() that unscales and skips by itself.

    zero_grad does, since a scaler does not call a step that it skips, and so do options
    for half parameters, since torch's scaler unscales no float16 gradients. ValueError
    for zero_grad where scalers are told not to.
    """
    if offered is False and any(group["zero_grad"] for group in groups):
        raise ValueError(
            "zero_grad and amp_scaling=False must not be given together: a scaler that "
            "skips a step does not call it then, and infinities would stay"
        )
    return any(group["zero_grad"] or half.keeps_weights(group) for group in groups)


def has_master(param: Tensor, group: dict[str, Any]) -> bool:
    """True where the parameter is a rounded copy of a float32 one in the state."""
    return group["master_weights"] is True and param.dtype in HALF


def _extra_dtypes(param: Tensor, group: dict[str, Any]) -> dict[str, torch.dtype]:
    """The arrays that the options add to a parameter's state, and their dtypes."""
    wide = torch.float32 if param.dtype in HALF else param.dtype
    extras = {}
    if has_master(param, group):
        extras["master_param"] = torch.float32
    if group["weight_copy_dtype"] is not None:
        extras["weight_copy"] = group["weight_copy_dtype"]
    extras.update(half.tail_of(param, group))
    if group["ema_decay"] is not None:
        extras["ema"] = wide
    return extras


def _moment_names(group: dict[str, Any], coded: bool) -> tuple[str, ...]:
    names = (*_MOMENTS, "max_exp_avg_sq") if group["amsgrad"] else _MOMENTS
    return (*(codes.NAMES[n] for n in names), codes.SCALES) if coded else names


def _moment_dtype(param: Tensor, group: dict[str, Any]) -> torch.dtype:
    """The dtype of float moments, which with "int8" small parameters keep."""
    wanted: torch.dtype = group["state_dtype"] or param.dtype
    if group["state_dtype"] == "int8":
        wanted = torch.float32 if param.dtype in HALF else param.dtype
    return wanted


# ---- Making it -----------------------------------------------------------------------


def new_step(device: torch.device) -> Tensor:
    """A step counter at 0, without a copy from the host to a GPU."""
    if device.type in ("cpu", "meta"):  # fake tensors know its value; torch reads it
        return torch.tensor(0.0, dtype=torch.float32, device="cpu")
    return torch.zeros((), dtype=torch.float32, device=device)


@torch.no_grad()
def make_state(group: dict[str, Any], all_state: dict[Tensor, Any]) -> None:
    """Creates missing state of the group's parameters that have gradients.

    Moments are made all at once, as torch does, or not at all; a master weight, a copy
    and an EMA that are missing start as the parameter is now.
    """
    for param in group["params"]:
        if param.grad is None:
            continue
        state = all_state[param]
        if not state:
            state["step"] = new_step(param.device)
            if codes.wanted(param, group):
                state.update(codes.new(param, group["amsgrad"]))
            else:
                dtype = _moment_dtype(param, group)
                for name in _moment_names(group, False):
                    state[name] = torch.zeros_like(param, dtype=dtype)
        for name in ("step", *_moment_names(group, codes.is_coded(state))):
            if name not in state:
                raise KeyError(f"state of a parameter has no {name!r}")
        for name, dtype in _extra_dtypes(param, group).items():
            if name not in state:
                source = state.get("master_param", param) if name == "ema" else param
                state[name] = torch.empty_like(param, dtype=dtype).copy_(source)
                if name in half.TAILS.values():
                    state[name].zero_()


@torch.no_grad()
def mend_state(groups: list[dict[str, Any]], all_state: dict[Tensor, Any]) -> bool:
    """Converts state that other code has left in another form; True if any was.

    Arrays that are laid out differently from their parameter, and counters that are no
    float32 on its device: torch's own may be on the host, and float64.
    """
    mended = False
    for param, group in [(p, g) for g in groups for p in g["params"]]:
        if _is_stale(all_state.get(param, {}), param, group):
            state = all_state[param]
            again = codes.encode(codes.decode(state), param, group["amsgrad"])
            state.clear()
            state.update(again)
            mended = True
        for name, value in all_state.get(param, {}).items():
            if not isinstance(value, Tensor):
                continue
            if name == "step":
                new = value.to(device=param.device, dtype=torch.float32)
            elif value.shape == param.shape:
                new = conformed(param, value)
            else:
                continue
            mended = mended or new is not value
            all_state[param][name] = new
    return mended


def _is_stale(state: dict[str, Any], param: Tensor, group: dict[str, Any]) -> bool:
    """True for codes of blocks in another layout, or with a maximum that has no use."""
    if not codes.is_coded(state):
        return False
    names = [name for name in codes.NAMES.values() if name in state]
    return (codes.NAMES["max_exp_avg_sq"] in names and not group["amsgrad"]) or any(
        state[name].stride() != param.stride() for name in names
    )


def check_devices(group: dict[str, Any], all_state: dict[Tensor, Any]) -> None:
    """Raises ValueError for state on another device, where torch would step halfway.

    torch's counters may be on the host.
    """
    for param in group["params"]:
        for name, value in all_state.get(param, {}).items():
            if param.grad is None or not isinstance(value, Tensor):
                continue
            fine = [param.device, torch.device("cpu")] if name == "step" else []
            if value.device not in (fine or [param.device]):
                raise ValueError(
                    f"{name} in the state of a parameter must be on {param.device}, "
                    f"got {value.device}; move the state with the model"
                )


@torch.no_grad()
def match_masters(groups: list[dict[str, Any]], all_state: dict[Tensor, Any]) -> None:
    """Sets master weights that do not round to their parameter to the parameter.

    For those of a checkpoint: other weights may have been loaded since, or torch's
    AdamW, which keeps masters but does not step them, has had the state in between.
    """
    for group in groups:
        for param in group["params"]:
            state = all_state.get(param, {})
            if half.convert(param, state, _extra_dtypes(param, group)):
                continue
            master = state.get("master_param")
            if not (has_master(param, group) and isinstance(master, Tensor)):
                continue
            if master.shape != param.shape:
                continue  # the step names it
            same = master.to(param.dtype) == param
            matched = torch.where(same, master, param)
            if master.is_inference():
                all_state[param]["master_param"] = matched
            else:
                master.copy_(matched)


# ---- Loading it ----------------------------------------------------------------------


def load_state_dict(
    optimizer: Any, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]
) -> None:
    """Loads by torch's `load`, but gives every array the dtype that is wanted here.

    torch casts all state to the parameter's dtype and takes all options of the groups
    from what was saved; the optimizer's own `OPTIONS` stay, and the state follows them.
    """
    own = [{name: g[name] for name in OPTIONS} for g in optimizer.param_groups]
    dropped = _load_plain(optimizer, state_dict, own)
    if dropped is None:
        dropped = _load_by_torch(optimizer, state_dict, own, load)
    for name, option in _DROPPED.items():
        if name in dropped:  # nothing brings it back, as it does a copy
            warnings.warn(
                f"the saved {name} is dropped where parameters have no {option}",
                stacklevel=2,
            )


def _load_plain(
    optimizer: Any, state_dict: dict[str, Any], own: list[dict[str, Any]]
) -> set[str] | None:
    """Loads what torch's load() has neither hooks, errors nor names for, in less time;
    returns the names of the entries that it drops. None for the rest, with no change.
    """
    groups, saved_groups = optimizer.param_groups, state_dict.get("param_groups", ())
    if (
        optimizer._optimizer_load_state_dict_pre_hooks
        or optimizer._optimizer_load_state_dict_post_hooks
        or len(groups) != len(saved_groups)
        or "state" not in state_dict
    ):
        return None
    saved, places, loaded = state_dict["state"], [], []
    for group, saved_group, options in zip(groups, saved_groups, own, strict=True):
        params = saved_group["params"]
        if (
            len(params) != len(group["params"])
            or "param_names" in group
            or "param_names" in saved_group
        ):
            return None
        places += params
        new = {**saved_group, **options, "params": group["params"]}
        for name, value in saved_group.items():
            if name not in ("params", *options) and not _is_constant(value):
                new[name] = copy.deepcopy(value)
        loaded.append(new)
    if not saved.keys() <= set(places) or not all(map(_is_plain, saved.values())):
        return None
    _check_steps(saved)
    optimizer.__setstate__({"state": defaultdict(dict), "param_groups": loaded})
    return _place_states(optimizer, saved, places)


def _is_constant(value: Any) -> bool:
    """True for what a copy may share."""
    return type(value) in _CONSTANTS or (
        type(value) is tuple and all(type(item) is float for item in value)
    )


def _load_by_torch(
    optimizer: Any,
    state_dict: dict[str, Any],
    own: list[dict[str, Any]],
    load: Callable[[dict[str, Any]], None],
) -> set[str]:
    """Loads by torch's `load`; returns the names of the entries that it drops."""
    saved: dict[Any, Any] = {}  # the states of places
    places: list[Any] = []
    dropped: set[str] = set()

    def take(_: Any, final: dict[str, Any]) -> dict[str, Any]:
        places.extend(i for group in final["param_groups"] for i in group["params"])
        saved.update(final["state"])
        _check_steps(saved)
        known = set(places)  # torch, which searches lists for them, gets the others
        rest = {k: v for k, v in saved.items() if k not in known or not _is_plain(v)}
        loaded = final["param_groups"]
        if len(loaded) == len(own):  # otherwise torch says so
            loaded = [{**g, **options} for g, options in zip(loaded, own, strict=True)]
        return {**final, "state": rest, "param_groups": loaded}

    def cast(_: Any) -> None:
        dropped.update(_place_states(optimizer, saved, places))

    before = optimizer.register_load_state_dict_pre_hook(take)
    after = optimizer.register_load_state_dict_post_hook(cast, prepend=True)
    try:
        load(state_dict)
    finally:
        before.remove()
        after.remove()
    return dropped


@torch.no_grad()
def _place_states(optimizer: Any, saved: dict[Any, Any], places: list[Any]) -> set[str]:
    """Gives the parameters their saved states, cast as the groups' own options want;
    returns the names of the entries that it drops."""
    dropped: set[str] = set()
    pairs = [(p, g) for g in optimizer.param_groups for p in g["params"]]
    for place, (param, group) in zip(places, pairs, strict=True):
        if saved.get(place):
            state = optimizer.state[param]
            dropped.update(_cast_state(state, saved[place], param, group))
    return dropped


def _is_plain(state: Any) -> bool:
    """True for the state of a parameter that is nothing but tensors."""
    return (
        isinstance(state, dict)
        and bool(state)
        and all(isinstance(value, Tensor) for value in state.values())
    )


def _check_steps(states: dict[Any, Any]) -> None:
    """Raises ValueError for a counter that is no number, before anything is loaded."""
    for place, state in states.items():
        step = state.get("step", 0.0) if isinstance(state, dict) else 0.0
        try:
            fine = step.numel() == 1 if isinstance(step, Tensor) else float(step) >= 0
        except (TypeError, ValueError):
            fine = False
        if not fine:
            raise ValueError(f"step of parameter {place} must be a number, got {step}")


def _cast_state(
    state: dict[str, Any], saved: dict[str, Any], param: Tensor, group: dict[str, Any]
) -> set[str]:
    """Puts the saved state of a parameter in place; returns the names of what it drops.

    `state` is what torch has loaded of it: nothing, or all.
    """
    dropped = set()
    device = param.device
    wanted = _moment_dtype(param, group)
    saved = _recoded(saved, param, group)
    for name in (*codes.NAMES, *codes.NAMES.values(), codes.SCALES):
        if name not in saved:
            state.pop(name, None)  # torch has loaded the other form
    extras = _extra_dtypes(param, group)
    for name, value in saved.items():
        other = half.OTHER_FORM.get(name)
        if name in _EXTRAS and name not in extras and other in extras:
            state[name] = conformed(param, value.to(device))  # the first step converts
        elif name in _EXTRAS and name not in extras:
            state.pop(name, None)  # of a layout that this optimizer does not have
            dropped.add(name)
        elif name == "step":
            state[name] = _cast_step(value, device)
        elif name == codes.SCALES or name in codes.NAMES.values():
            state[name] = value.to(device)
        elif isinstance(value, Tensor):
            floating = value.is_floating_point()
            if floating:
                dtype = extras.get(name, wanted)
            else:  # entries of others, as torch casts them
                dtype = param.dtype if param.is_floating_point() else value.dtype
            if value.dtype != dtype or value.device != device:
                value = value.to(device=device, dtype=dtype)
            if floating and value.shape == param.shape:
                value = conformed(param, value)
            state[name] = value
    return dropped


def _recoded(
    saved: dict[str, Any], param: Tensor, group: dict[str, Any]
) -> dict[str, Any]:
    """The saved state with 8-bit moments where the group wants them, else floats."""
    coded, wanted = codes.is_coded(saved), codes.wanted(param, group)
    if coded and (not wanted or _is_stale(saved, param, group)):
        saved, coded = codes.decode(saved), False
    fits = all(
        isinstance(saved.get(name), Tensor) and saved[name].shape == param.shape
        for name in _moment_names(group, False)
    )
    if coded or not wanted or not fits:
        return saved
    return codes.encode(saved, param, group["amsgrad"])


def _cast_step(value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor) and value.dtype == torch.float32 and not value.ndim:
        return value if value.device == device else value.to(device)
    return torch.as_tensor(value, dtype=torch.float32, device=device).reshape(())
