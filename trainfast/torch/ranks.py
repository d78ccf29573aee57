"""The ranks of torch.distributed, and what they tell one another."""

from typing import Any

import torch
from torch import distributed


def is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def rank() -> int:
    """This process's, or 0 without torch.distributed."""
    return distributed.get_rank() if is_distributed() else 0


def highest(numbers: list[int], group: Any = None) -> list[int]:
    """The highest of each number over all ranks, which must all call it."""
    return _reduced(numbers, distributed.ReduceOp.MAX, group)


def lowest(number: int) -> int:
    """The lowest of the ranks' numbers."""
    return _reduced([number], distributed.ReduceOp.MIN, None)[0]


def total(numbers: list[float]) -> list[float]:
    """The sum of each number over all ranks, in float64."""
    return _reduced(numbers, distributed.ReduceOp.SUM, None, torch.float64)


def _reduced(
    numbers: Any, how: Any, group: Any, dtype: torch.dtype = torch.int64
) -> list[Any]:
    device = "cuda" if distributed.get_backend(group) == "nccl" else "cpu"
    values = torch.tensor(numbers, dtype=dtype, device=device)
    distributed.all_reduce(values, how, group)
    return list(values.tolist())
