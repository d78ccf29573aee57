"""Finding how many workers a loader of torch needs."""

from trainfast.torch.data.loaders import loader_kwargs
from trainfast.torch.data.workers import benchmark_dataloader, find_workers

__all__ = ["benchmark_dataloader", "find_workers", "loader_kwargs"]
