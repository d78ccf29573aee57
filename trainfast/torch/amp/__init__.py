"""Loss scaling, gradient accumulation, and schedulers that know of skipped steps."""

from trainfast.torch.amp.accumulator import Accumulator
from trainfast.torch.amp.grad_scaler import CudaGradScaler, GradScaler
from trainfast.torch.amp.scheduler import SkipAwareScheduler

__all__ = ["Accumulator", "CudaGradScaler", "GradScaler", "SkipAwareScheduler"]
