"""How much memory a training step needs, and how to need less."""

from trainfast.torch.memory.checkpointing import enable_checkpointing
from trainfast.torch.memory.estimate import estimate_memory
from trainfast.torch.memory.find_batch import find_batch_size, find_max_batch_size
from trainfast.torch.memory.gpu_memory import print_gpu_memory
from trainfast.torch.memory.micro_batches import auto_micro_batch
from trainfast.torch.memory.profile import profile_memory_usage

__all__ = [
    "auto_micro_batch",
    "enable_checkpointing",
    "estimate_memory",
    "find_batch_size",
    "find_max_batch_size",
    "print_gpu_memory",
    "profile_memory_usage",
]
