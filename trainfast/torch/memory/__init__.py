"""How much memory a training step needs, and how to need less."""

from trainfast.torch.memory.checkpointing import enable_checkpointing
from trainfast.torch.memory.estimate import estimate_memory

__all__ = ["enable_checkpointing", "estimate_memory"]
