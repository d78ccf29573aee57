"""The graph cache as PyG's users know it: a dataset, a loader, and batches."""

from trainfast.torch.pyg_assemble import assembler
from trainfast.torch.pyg_dataset import CachedDataset, cached
from trainfast.torch.pyg_loader import DataLoader

__all__ = ["CachedDataset", "DataLoader", "assembler", "cached"]
