"""Bytes that a kernel takes from the allocator and gives back, besides its results.

For GPUs the sizes follow torch's sources (ATen/native/cuda/Reduce.cuh; GradQTempStorage
of the memory-efficient attention's backward pass) and, for cuDNN, the allocator's
history on an H200 with torch 2.11, with which all were compared.
"""

from math import ceil, prod
from typing import Any

import torch

from trainfast.memory.gpus import MIB, Gpu

_TILE = 64  # queries, and columns, that the efficient backward pass sums together
_STORAGE = 4 * _TILE * _TILE + 16


def workspace_of(gpu: Gpu) -> int:
    """cuBLAS's default: 32 MiB from Hopper on, else 2 x 4 MiB and 8 x 16 KiB."""
    return 32 * MIB if gpu.capability >= 90 else 8 * MIB + 128 * 1024


def scratch_of(name: str, args: tuple[Any, ...], out: Any, gpu: Gpu | None) -> int:
    """Of the operation `name`, such as "sum.dim_IntList".

    Args:
        name: as torch's dispatcher calls it.
        args: the operation's.
        out: what it returned.
        gpu: None: on the CPU.
    """
    if gpu is None:
        return _of_onednn(*args[:3]) if name.startswith("convolution_backward") else 0
    if name == "convolution.default":
        return _of_cudnn(args[0], out, args[1], args[8], gpu)
    if name == "convolution_backward.default":
        return _of_cudnn(args[1], args[0], args[2], args[9], gpu)
    if name.startswith(("sum.dim", "mean.dim")):
        return _of_sum(args[0], args[1], gpu)
    if "efficient_attention_backward" in name:
        batch, heads, queries, width = args[1].shape
        tiles = ceil(queries / _TILE) * ceil(width / _TILE)
        return int(batch * heads * tiles * _STORAGE)
    if "flash_attention_backward" in name:  # the queries' gradient in float32
        return args[1].numel() * 4
    return 0


def _of_onednn(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> int:
    """It computes in a layout of its own, and copies to and from it."""
    return sum(t.numel() * t.element_size() for t in (gradient, x, x, weight))


def _of_cudnn(
    x: torch.Tensor, out: torch.Tensor, weight: torch.Tensor, groups: int, gpu: Gpu
) -> int:
    """Tensor cores take channels last: what comes otherwise is copied to and fro."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    tensor_cores = gpu.capability >= (70 if half else 80)
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    if not tensor_cores or last or groups > 1 or x.dim() != 4:
        return 0
    copied = [x, out] if weight.shape[2:].numel() == 1 else [x, out, weight]
    return sum(t.numel() * t.element_size() for t in copied)


def _of_sum(x: torch.Tensor, dims: Any, gpu: Gpu) -> int:
    """Partial sums of blocks that share columns: a bias's gradient, mostly.

    Only for sums over the first dimensions of a dense tensor.
    """
    over = sorted(d % x.dim() for d in dims or ())
    if not x.is_contiguous() or over != list(range(len(over))) or len(over) >= x.dim():
        return 0
    rows, columns = prod(x.shape[: len(over)]), prod(x.shape[len(over) :])
    if not rows or not columns:
        return 0
    vector = next(n for n in (4, 2, 1) if columns % n == 0)
    threads = 512 // vector
    across = _power_of_2_in(columns // vector)
    width = min(across, 32)
    height = min(_power_of_2_in(rows), threads // width)
    width = min(across, threads // height)
    values = ceil(rows / height)
    grid = ceil(columns / vector / width)
    room = gpu.processors * (_threads_of_processor(gpu) // (width * height))
    if values < 256 or grid > room:
        return 0
    blocks = max(min(ceil(room / grid), ceil(values / 16)), ceil(values / 256))
    return 4 * columns * blocks * width * vector if blocks > 1 else 0


def _power_of_2_in(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def _threads_of_processor(gpu: Gpu) -> int:
    return {75: 1024, 86: 1536, 89: 1536, 120: 1536}.get(gpu.capability, 2048)
