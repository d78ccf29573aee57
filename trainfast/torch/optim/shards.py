"""DTensors: their local tensors, and what the processes of a mesh must agree on."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from trainfast.stats import count_fallback
from trainfast.torch import private

REDISTRIBUTED = "a gradient is not placed as its parameter is: it was redistributed"
PARTIAL = "params must not be DTensors of placement Partial"
OTHER_MESH = "a gradient is on another DeviceMesh than its parameter"


def is_sharded(tensor: Any) -> bool:
    """True for a DTensor, whatever its placements are. Parameters have that very type,
    and asking for it allocates nothing, unlike isinstance()."""
    return type(tensor) is private.dtensor_class()


def any_sharded(tensors: Iterable[Any]) -> bool:
    cls = private.dtensor_class()
    return cls is not None and any(type(tensor) is cls for tensor in tensors)


def local(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor; another tensor unchanged."""
    return private.local_tensor(tensor) if is_sharded(tensor) else tensor


def locals_of(tensors: list[Tensor]) -> list[Tensor]:
    """local() of each, but for Partial tensors, whose sum is on no process."""
    if not any_sharded(tensors):
        return tensors
    return [t if _is_partial(t) else local(t) for t in tensors]


def _is_partial(tensor: Any) -> bool:
    return any(p.is_partial() for p in getattr(tensor, "placements", ()))


# ---- Placements ----------------------------------------------------------------------


def agree(param: Any, other: Any) -> bool:
    """Whether the elements of a DTensor are where those of the parameter are.

    NotImplementedError where neither the core nor redistribute() can handle the two.
    """
    if _is_partial(param):
        raise NotImplementedError(PARTIAL)
    if not is_sharded(other):
        return True  # the core compares its shape to that of the shard
    if param.device_mesh != other.device_mesh:
        raise NotImplementedError(OTHER_MESH)
    return _placed_alike(param, other)


def _placed_alike(one: Any, other: Any) -> bool:
    return one.placements == other.placements and (
        private.shard_order(one) == private.shard_order(other)
    )


def align_grads(params: Iterable[Any], capability: str) -> None:
    """Redistributes each gradient that is not placed as its parameter is.

    The redistributed one takes its place in `.grad`, so that what comes next (clipping,
    unscaling, the step) does not do the same again. Counted for the `capability` that
    asks first.
    """
    cls = private.dtensor_class()
    if cls is None:
        return
    for param in params:
        grad: Any = param.grad if type(param) is cls else None
        if type(grad) is not cls or param.device_mesh != grad.device_mesh:
            continue
        if _placed_alike(param, grad) or _is_partial(param):
            continue
        with torch.no_grad():
            param.grad = grad.redistribute(param.device_mesh, param.placements)
        count_fallback(capability, REDISTRIBUTED)


@torch.no_grad()
def conformed(
    like: Any, value: Any, relayout: Callable[[Tensor, Tensor], Tensor]
) -> Any:
    """A DTensor of the state with the placements and local strides of its parameter.

    `relayout(like, value)` copies a local tensor that has other strides.
    """
    if like.device_mesh != value.device_mesh:
        return value  # the step refuses it
    if not _placed_alike(like, value):
        value = value.redistribute(like.device_mesh, like.placements)
    here, shard = local(like), local(value)
    if shard.shape != here.shape or shard.stride() == here.stride():
        return value
    return type(value).from_local(
        relayout(here, shard),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=like.stride(),
    )


def caller_for(first: Tensor) -> Callable[..., Any]:
    """What calls the core where the first tensor is this one."""
    sharded = is_sharded(first)
    return private.without_functions if sharded else private.outside_modes


def reader() -> tuple[Any, ...] | None:
    """`wrapper` of _core.adamw_groups; None while there are no DTensors."""
    cls = private.dtensor_class()
    return None if cls is None else _reader_of(cls)


def _reader_of(cls: Any) -> tuple[Any, ...]:
    found = _readers.get(cls)
    if found is None:
        found = _readers[cls] = (cls, *private.dtensor_readers(cls), agree)
    return found


_readers: dict[Any, tuple[Any, ...]] = {}


# ---- Meshes --------------------------------------------------------------------------


@torch.no_grad()
def by_mesh(tensors: Sequence[Tensor]) -> dict[Any, list[Tensor]]:
    """The local tensors of each mesh; under None those that are no DTensors.

    What a mesh dimension replicates is only with the first process along it, so that a
    sum over all processes counts each element once: the lists of others lack it, and
    may be empty. Partial tensors are summed up first. The order is the same everywhere.
    """
    meshes: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if not is_sharded(tensor):
            meshes.setdefault(None, []).append(tensor)
            continue
        spread: Any = tensor
        if _is_partial(spread):
            spread = _without_partial(spread)
        mine = meshes.setdefault(spread.device_mesh, [])
        coordinate = spread.device_mesh.get_coordinate()
        if coordinate is not None and not any(
            at
            for at, p in zip(coordinate, spread.placements, strict=True)
            if p.is_replicate()
        ):
            mine.append(private.local_tensor(spread))
    return meshes


def _without_partial(tensor: Any) -> Any:
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return tensor.redistribute(tensor.device_mesh, placements)


def reduce(values: Tensor, mesh: Any, op: Any) -> Tensor:
    """`values` reduced over all processes of a mesh: one all-reduce.

    Of a mesh of several dimensions that is not the whole world, one for each dimension.
    """
    if mesh.get_coordinate() is None:
        return values  # this process is not of the mesh
    there = values.to(mesh.device_type)
    for group in _groups(mesh):
        distributed.all_reduce(there, op, group=group)
    return there.to(values.device)


def _groups(mesh: Any) -> list[Any]:
    groups = [mesh.get_group(i) for i in range(mesh.ndim) if mesh.size(i) > 1]
    if len(groups) > 1 and mesh.size() == distributed.get_world_size():
        world = distributed.group.WORLD
        backends = {distributed.get_backend(group) for group in (*groups, world)}
        if len(backends) == 1:
            return [world]
    return groups


@torch.no_grad()
def anywhere(flag: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """The largest `flag` of all processes of the DTensors' meshes."""
    sharded: list[Any] = [tensor for tensor in tensors if is_sharded(tensor)]
    for mesh in dict.fromkeys(tensor.device_mesh for tensor in sharded):
        flag = reduce(flag, mesh, distributed.ReduceOp.MAX)
    return flag


def replicated_as(value: Tensor, tensors: Sequence[Any]) -> Tensor:
    """`value` as a DTensor where all tensors are DTensors of one mesh, as torch has it;
    else `value`."""
    if not all(map(is_sharded, tensors)):
        return value
    mesh = tensors[0].device_mesh
    if any(tensor.device_mesh != mesh for tensor in tensors):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * mesh.ndim
    spread: Tensor = DTensor.from_local(value, mesh, everywhere, run_check=False)
    return spread
