"""Floating-point operations of a training step."""

from collections.abc import Callable

from torch.utils.flop_counter import FlopCounterMode


def count_flops(step: Callable[[], object]) -> int:
    """Those of one call, by torch's formulas for products, convolutions and attention.

    Raises:
        RuntimeError: there were none, so that the step's work is not what torch counts.
    """
    with FlopCounterMode(display=False) as counter:
        step()
    flops = counter.get_total_flops()
    if not flops:
        raise RuntimeError(
            "no operation of the step was counted; pass `flops_per_sample` instead"
        )
    return int(flops)
