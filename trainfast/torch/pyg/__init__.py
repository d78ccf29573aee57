"""The graph cache as PyG's users know it: a dataset, a loader, and batches."""

from trainfast.torch.pyg.assemble import assembler
from trainfast.torch.pyg.dataset import CachedDataset, cached
from trainfast.torch.pyg.loader import DataLoader

__all__ = ["CachedDataset", "DataLoader", "assembler", "cached"]
