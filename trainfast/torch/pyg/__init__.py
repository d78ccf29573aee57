"""The graph cache as PyG's users know it: a dataset, a loader, and batches; and graphs
of neighbours, by PyG's names."""

from trainfast.torch.pyg.assemble import assembler
from trainfast.torch.pyg.dataset import CachedDataset, cached
from trainfast.torch.pyg.loader import DataLoader
from trainfast.torch.pyg.neighbours import knn, knn_graph, radius, radius_graph

__all__ = [
    "CachedDataset",
    "DataLoader",
    "assembler",
    "cached",
    "knn",
    "knn_graph",
    "radius",
    "radius_graph",
]
