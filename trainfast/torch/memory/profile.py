"""The peaks of a training step's parts."""

import copy
from typing import Any

import torch

from trainfast.memory.trace import BACKWARD, FORWARD, STEP
from trainfast.torch.memory.estimate import estimate_memory


def profile_memory_usage(
    model: torch.nn.Module,
    input_shape: tuple[int, ...],
    device: Any = None,
    *,
    batch_size: int = 1,
) -> dict[str, int]:
    """Most bytes in tensors in the forward pass, the backward pass and AdamW's step.

    On a GPU the step runs there, on a copy of the model, and torch's allocator is
    asked. On the CPU nothing runs: `estimate_memory` counts. The loss is the mean of
    the output. The first step is what counts, with the optimizer's new state.

    Args:
        model: it stays as it is.
        input_shape: of one sample, of random numbers.
        device: None for the model's own.
        batch_size: samples.

    Returns:
        Bytes by "forward", "backward" and "optimizer step".
    """
    own = next((p.device for p in model.parameters()), torch.device("cpu"))
    device = torch.device(device) if device is not None else own
    if device.type != "cuda":
        batch = torch.randn(batch_size, *input_shape)
        estimate = estimate_memory(model, batch, device="cpu", steps=1)
        return estimate.moments
    model = copy.deepcopy(model).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(batch_size, *input_shape, device=device)
    found = {}

    def peak(moment: str) -> None:
        found[moment] = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)

    torch.cuda.reset_peak_memory_stats(device)
    loss = model(batch).float().mean()
    peak(FORWARD)
    loss.backward()
    peak(BACKWARD)
    optimizer.step()
    peak(STEP)
    return found
