"""torch's global switches that make training faster."""

import torch


def set_switches(
    precision: str | None, cudnn_benchmark: bool | None, tf32: bool
) -> tuple[list[str], list[str]]:
    """Sets what is not None; returns what is on and what has no effect here.

    Starts no CUDA in this process, which may fork later. The precision is set by
    `set_float32_matmul_precision` alone: torch raises where that and `fp32_precision`
    are both used.

    Args:
        precision: "highest", "high" or "medium".
        cudnn_benchmark: whether cuDNN times its algorithms for each shape.
        tf32: whether every GPU has TF32.
    """
    on, notes = [], []
    has_gpu = torch.cuda.device_count() > 0
    if precision is not None:
        torch.set_float32_matmul_precision(precision)
        if precision == "highest":
            on.append("Keeping full float32 precision in matrix products")
        elif has_gpu and tf32:
            on.append(f"Enabled TF32 for matrix products ({precision} precision)")
        else:
            reason = "a GPU here has none" if has_gpu else "no GPU"
            notes.append(f"TF32 is off: {reason}")
    if cudnn_benchmark is not None:
        torch.backends.cudnn.benchmark = cudnn_benchmark
        if not has_gpu:
            notes.append("cudnn_benchmark has no effect: no GPU")
        elif cudnn_benchmark:
            on.append("Enabled cuDNN's choice of convolutions by time")
    return on, notes
