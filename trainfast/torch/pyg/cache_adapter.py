"""What the graph cache asks of PyG's adapter; see trainfast.adapters."""

from trainfast.torch.pyg.assemble import assembler
from trainfast.torch.pyg.rules import Flattener

__all__ = ["Flattener", "assembler"]
