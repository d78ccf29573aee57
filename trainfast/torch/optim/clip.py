"""torch.nn.utils' clipping on trainfast's kernel, and the pass over gradients below it.

Gradients that the core refuses (sparse, complex, with gaps) go torch's way, device by
device, and are counted in trainfast.stats(). Of DTensors each process reads its shards;
the norm and the flag are then reduced over their mesh.
"""

import math
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.nn.utils import clip_grad as torchs  # not patched, unlike torch.nn.utils

from trainfast import _core
from trainfast.stats import CallTally, count_fallback
from trainfast.torch.optim import shards
from trainfast.torch.optim.release import refuse_clipping
from trainfast.torch.private import (
    cuda_stream,
    increment_version,
    outside_modes,
    total_norm,
)

_REFUSALS = (NotImplementedError, ValueError)  # the core has changed nothing then
# Workspaces that no call is in, so that warm calls allocate nothing in the core. A
# workspace has one stream, since its next call writes over what this one still reads,
# and lives on when the thread ends, since a captured graph may read it.
_idle: dict[Any, list[_core.Workspace]] = {}


# ---- Calls into the core -------------------------------------------------------------


def call_core(
    tally: CallTally, grads: list[Tensor], rewrite: str = "read", **arguments: Any
) -> None:
    """_core.amp_grads on the caller's stream; what it rewrites, autograd learns."""
    device = grads[0].device
    stream = current_stream(device)
    idle = _idle.setdefault((rewrite, device, stream), [])
    try:
        workspace = idle.pop()
    except IndexError:  # other threads are in all that there are
        workspace = _core.Workspace()
    try:
        outside_modes(
            _core.amp_grads,
            grads,
            workspace,
            rewrite=rewrite,
            stream=stream,
            **arguments,
        )
    finally:
        idle.append(workspace)
    if rewrite != "read":
        increment_version(grads)
    tally.count_call("cuda" if device.type == "cuda" else _core.backend_in_use())


def current_stream(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return cuda_stream(device.index)


def each_device(
    tally: CallTally,
    grads: list[Tensor],
    on_core: Callable[[list[Tensor]], Any],
    by_torch: Callable[[list[Tensor]], Any],
) -> list[Any]:
    """Calls `on_core` with the gradients of each device; `by_torch` where it refuses.

    Returns their results, that of the first gradient's device first.
    """
    try:
        return [on_core(grads)]  # on one device, as a rule
    except _REFUSALS:
        parts: dict[torch.device, list[Tensor]] = {}
        for grad in grads:
            parts.setdefault(grad.device, []).append(grad)
    results = []
    for part in parts.values():
        try:
            results.append(on_core(part))
        except _REFUSALS as reason:
            tally.count_fallback(str(reason))
            results.append(by_torch(part))
    return results


# ---- Measuring -----------------------------------------------------------------------


class Measured(NamedTuple):
    """The results of one pass over gradients; None for what was not asked for."""

    found_inf: Tensor | None  # float32: 1 where an element is not finite, else 0
    total_norm: Tensor | None  # float32; float64 if a gradient is
    clip_coef: Tensor | None  # float64


def measure(
    grads: Sequence[Tensor],
    *,
    norm_type: float = 2.0,
    max_norm: float | None = None,
    grad_scale: Tensor | None = None,
    find_inf: bool = True,
) -> Measured:
    """Reads gradients once: for infinities, and with `max_norm` for the norm.

    The norm is that of the gradients divided by `grad_scale`. Results are on the first
    gradient's device; there must be one. Waits for nothing. Of DTensors all processes
    get the same, as plain tensors.
    """
    wide = max_norm is not None and torch.float64 in {grad.dtype for grad in grads}
    tally = CallTally("amp")
    how = _Measuring(norm_type, max_norm, grad_scale, find_inf, tally, wide)
    return how.over(list(grads))


class _Measuring(NamedTuple):
    norm_type: float
    max_norm: float | None
    grad_scale: Tensor | None
    find_inf: bool
    tally: CallTally
    wide: bool = False  # the norm in float64

    def over(self, grads: list[Tensor]) -> Measured:
        if shards.any_sharded(grads):
            return self.over_meshes(grads)
        found = each_device(self.tally, grads, self.on_core, self.by_torch)
        return found[0] if len(found) == 1 else self.combine(found)

    @torch.no_grad()
    def over_meshes(self, grads: list[Tensor]) -> Measured:
        """The same for DTensors among the gradients: one reduction for each mesh.

        Other tensors count once, as if every process had the same.
        """
        infinite, p = math.isinf(self.norm_type), self.norm_type
        op = distributed.ReduceOp.MAX if infinite else distributed.ReduceOp.SUM
        rows = []
        for mesh, part in shards.by_mesh(grads).items():
            row = self.power_sum(part, grads[0].device)
            rows.append(row if mesh is None else shards.reduce(row, mesh, op))
        here = torch.stack([row.to(rows[0].device) for row in rows])
        total, not_finite, nans = (here.amax(0) if infinite else here.sum(0)).unbind()
        found = (not_finite > 0).float() if self.find_inf else None
        if self.max_norm is None:
            return Measured(found, None, None)
        norm = total.abs() if infinite else total.pow(1 / p)
        norm = torch.where(nans > 0, torch.nan, norm)
        if not self.wide:
            norm = norm.float()
        return Measured(found, norm, self.coef(norm))

    def power_sum(self, grads: list[Tensor], device: torch.device) -> Tensor:
        """In float64 what the processes reduce: the sum of |x|^p, or for p = inf the
        largest |x|, for -inf the smallest negated; whether one is not finite; is NaN.
        """
        p = self.norm_type
        if not any(grad.numel() for grad in grads):
            none = -math.inf if p == -math.inf else 0.0
            return torch.tensor([none, 0, 0], dtype=torch.float64).to(device)
        most = self.max_norm and math.inf
        how = self._replace(max_norm=most, find_inf=True, wide=True)
        parts = each_device(self.tally, grads, how.on_core, how.by_torch)
        measured = parts[0] if len(parts) == 1 else how.combine(parts)
        assert measured.found_inf is not None
        found = measured.found_inf.double()
        if measured.total_norm is None:
            return torch.stack([found, found, torch.zeros_like(found)])
        norm = measured.total_norm.double()
        if math.isinf(p):
            nan = norm.isnan().double()
            extreme = norm.nan_to_num(nan=0, posinf=math.inf) * math.copysign(1, p)
            return torch.stack([extreme, found, nan])
        return torch.stack([norm.pow(p), found, torch.zeros_like(found)])

    def on_core(self, grads: list[Tensor]) -> Measured:
        device = grads[0].device
        found = norm = coef = scale = None
        results: dict[str, Any] = {}
        if self.find_inf:
            found = torch.empty((), dtype=torch.float32, device=device)
        if self.max_norm is not None:
            name = "total_norm_f64" if self.wide else "total_norm"
            dtype = torch.float64 if self.wide else torch.float32
            norm = results[name] = torch.empty((), dtype=dtype, device=device)
            coef = torch.empty_like(norm, dtype=torch.float64)
            results["max_norm"] = self.max_norm
        if self.grad_scale is not None:
            scale = moved(self.grad_scale, device, torch.float32)
        call_core(
            self.tally,
            grads,
            found_inf=found,
            clip_coef=coef,
            norm_type=self.norm_type,
            grad_scale=scale,
            **results,
        )
        return Measured(found, norm, coef)

    @torch.no_grad()
    def by_torch(self, grads: list[Tensor]) -> Measured:
        found = norm = None
        if self.find_inf:
            found = _found_inf(grads)
        if self.max_norm is not None:
            norm = total_norm(grads, self.norm_type)
            if norm.dtype != torch.float64:
                norm = norm.float()
            if self.grad_scale is not None:
                norm = norm / moved(self.grad_scale, norm.device)
        return Measured(found, norm, self.coef(norm))

    def coef(self, norm: Tensor | None) -> Tensor | None:
        if norm is None or self.max_norm is None:
            return None
        return torch.clamp(self.max_norm / (norm + 1e-6), max=1.0).double()

    @torch.no_grad()
    def combine(self, parts: list[Measured]) -> Measured:
        """Of several devices, on the first one."""
        flags = [part.found_inf for part in parts if part.found_inf is not None]
        norms = [part.total_norm for part in parts if part.total_norm is not None]
        found = norm = None
        if flags:
            found = combine_flags(flags)
        if norms:
            here = [each.to(norms[0].device) for each in norms]
            norm = torch.linalg.vector_norm(torch.stack(here), self.norm_type)
        return Measured(found, norm, self.coef(norm))


def moved(
    number: Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """The number on a device, without waiting if that is a GPU. A copy to the host that
    does not wait may be read there before it has ended."""
    return number.to(device, dtype, non_blocking=device.type != "cpu")


def combine_flags(flags: Sequence[Tensor], device: Any = None) -> Tensor:
    """The maximum of the flags, on the given device or the first flag's."""
    device = flags[0].device if device is None else device
    here = [moved(flag, device) for flag in flags]
    return here[0] if len(here) == 1 else torch.stack(here).amax()


def _found_inf(grads: list[Tensor]) -> Tensor:
    """1 where an element is not finite."""
    finite = [torch.isfinite(_values(grad)).all() for grad in grads]
    return (~torch.stack(finite).all()).float()


def _values(grad: Tensor) -> Tensor:
    return grad._values() if grad.is_sparse else grad


# ---- torch.nn.utils ------------------------------------------------------------------


def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch.nn.utils.get_total_norm: the norm of all tensors as one vector.

    The sum is computed in float32 (float64 if a tensor is) and in a fixed order, with
    the same bits for any number of threads.

    Args:
        tensors, norm_type, error_if_nonfinite: as in torch.nn.utils.get_total_norm.
        foreach: ignored where trainfast's kernel runs.

    Returns:
        The norm, a tensor of no dimensions, of the dtype that torch returns.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
    """
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    norm_type = float(norm_type)
    if not tensors:
        return torch.tensor(0.0)
    if torch.compiler.is_compiling() or not _is_ours(norm_type):
        return total_norm(tensors, norm_type, error_if_nonfinite, foreach)
    dtypes = {tensor.dtype for tensor in tensors}
    total, _ = _norm_of(tensors, dtypes, norm_type, math.inf, CallTally("clip"))
    _check_finite(total, norm_type, error_if_nonfinite)
    return shards.replicated_as(_as_torchs(total, dtypes), tensors)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_: scales gradients down to `max_norm` in place.

    Gradients are not written if their norm is at most `max_norm`. Only
    `error_if_nonfinite` waits for the GPU.

    Args:
        parameters, max_norm, norm_type, error_if_nonfinite: as in
            torch.nn.utils.clip_grad_norm_.
        foreach: ignored where trainfast's kernel runs.

    Returns:
        The norm before clipping, as get_total_norm.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
    """
    is_generator = isinstance(parameters, types.GeneratorType)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if is_generator and not parameters:
        warnings.warn(
            "`parameters` is an empty generator, no gradient clipping will occur.",
            stacklevel=2,
        )
    norm_type, max_norm = float(norm_type), float(max_norm)
    if torch.compiler.is_compiling() or not _is_ours(norm_type):
        return torchs.clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach
        )
    shards.align_grads(parameters, "clip")
    grads = [grad for p in parameters if (grad := p.grad) is not None]
    if len(grads) < len(parameters):
        refuse_clipping(parameters)
    if not grads:
        return torch.tensor(0.0)
    tally = CallTally("clip")
    dtypes = {grad.dtype for grad in grads}
    total, coef = _norm_of(grads, dtypes, norm_type, max_norm, tally)
    _check_finite(total, norm_type, error_if_nonfinite)
    if coef.is_cuda or float(coef) != 1:  # on a GPU asking would wait; the kernel sees
        _multiply(grads, coef, total.dtype, tally)
    return shards.replicated_as(_as_torchs(total, dtypes), grads)


def clip_grad_value_(
    parameters: Tensor | Iterable[Tensor],
    clip_value: float,
    foreach: bool | None = None,
) -> None:
    """torch.nn.utils.clip_grad_value_: clamps gradients to +-clip_value in place.

    Args:
        parameters, clip_value: as in torch.nn.utils.clip_grad_value_.
        foreach: ignored where trainfast's kernel runs.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    clip_value = float(clip_value)
    grads = [grad for p in parameters if (grad := p.grad) is not None]
    if len(grads) < len(parameters):
        refuse_clipping(parameters)
    if torch.compiler.is_compiling() or not clip_value >= 0:  # torch takes any number
        parts: list[Any] = [_Holder(grad) for grad in grads]
        return torchs.clip_grad_value_(parts, clip_value, foreach)
    if not grads:
        return None
    if shards.any_sharded(grads):
        shards.align_grads(parameters, "clip")
        grads = [grad for p in parameters if (grad := p.grad) is not None]
    tally = CallTally("clip")

    def on_core(part: list[Tensor]) -> None:
        call_core(tally, part, "clamp", clip_value=clip_value)

    def by_torch(part: list[Tensor]) -> None:
        parts: list[Any] = [_Holder(grad) for grad in part]
        torchs.clip_grad_value_(parts, clip_value)

    _rewrite(tally, grads, on_core, by_torch)
    return None


def _rewrite(
    tally: CallTally,
    grads: list[Tensor],
    on_core: Callable[[list[Tensor]], Any],
    by_torch: Callable[[list[Tensor]], Any],
) -> None:
    """Writes the gradients in place, of DTensors their local tensors."""
    parts = shards.locals_of(grads)
    each_device(tally, parts, on_core, by_torch)
    if parts is not grads:
        increment_version(grads)


class _Holder(NamedTuple):
    """Stands for a parameter whose gradient has been read already."""

    grad: Tensor


def _is_ours(norm_type: float) -> bool:
    if norm_type != 0 and not math.isnan(norm_type):
        return True
    if not torch.compiler.is_compiling():
        count_fallback("clip", f"norm_type is {norm_type}")
    return False


def _norm_of(
    grads: list[Tensor],
    dtypes: set[torch.dtype],
    norm_type: float,
    max_norm: float,
    tally: CallTally,
) -> tuple[Tensor, Tensor]:
    """The norm, and what to multiply by."""
    wide = torch.float64 in dtypes
    measured = _Measuring(norm_type, max_norm, None, False, tally, wide).over(grads)
    total, coef = measured.total_norm, measured.clip_coef
    assert total is not None and coef is not None  # asked for with max_norm
    return total, coef


def _as_torchs(total: Tensor, dtypes: set[torch.dtype]) -> Tensor:
    """The norm in torch's dtype: half if all tensors have the same half dtype."""
    for half in (torch.float16, torch.bfloat16):
        if dtypes == {half}:
            return total.type(half)  # in two thirds of the time of to()
    return total


def _check_finite(total_norm: Tensor, norm_type: float, wanted: bool) -> None:
    if wanted and not torch.isfinite(total_norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from "
            "`parameters` is non-finite, so it cannot be clipped. To disable "
            "this error and scale the gradients by the non-finite norm anyway, "
            "set `error_if_nonfinite=False`"
        )


@torch.no_grad()
def _multiply(
    grads: list[Tensor], coef: Tensor, narrow: torch.dtype, tally: CallTally
) -> None:
    def on_core(part: list[Tensor]) -> None:
        factor = moved(coef, part[0].device)
        call_core(tally, part, "multiply", factor=factor)

    def by_torch(part: list[Tensor]) -> None:
        factor = moved(coef, part[0].device, narrow)
        for grad in part:
            grad.mul_(factor)

    _rewrite(tally, grads, on_core, by_torch)
