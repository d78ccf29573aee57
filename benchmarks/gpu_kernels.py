"""One call of each kernel that matters on a GPU, for a profiler.

    ncu --profile-from-start off python -m benchmarks.gpu_kernels
    python -m benchmarks.gpu_kernels --dry      tiny calls on the CPU: does it run

Attention forward and backward at D 64 and 128 (causal, bf16, 16,384 tokens), AdamW of
50 million f32 and bf16 parameters, and the norm of 50 million gradients. The profiler
sees them after a first call of each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch

import trainfast.torch
from benchmarks.attention import Problem, make_inputs

TOKENS, WIDTH, NUMEL = 16384, 2048, 50_000_000


def attention_of(dim: int, device: str, dry: bool) -> list[Callable[[], object]]:
    """Return a forward and a backward."""
    problem = Problem(
        *("", "", TOKENS // 4096, WIDTH // dim, 4096, dim),
        dtype=torch.bfloat16,
        is_causal=True,
    )
    inputs = make_inputs(problem.shrunk() if dry else problem, device)
    forward = partial(trainfast.torch.attention, *inputs.leaves, is_causal=True)
    out = forward()
    backward = partial(
        torch.autograd.grad, out, inputs.leaves, inputs.dout, retain_graph=True
    )
    return [forward, backward]


def adamw_of(dtype: torch.dtype, device: str, numel: int) -> Callable[[], object]:
    param = torch.nn.Parameter(torch.zeros(numel, dtype=dtype, device=device))
    param.grad = torch.ones_like(param)
    return trainfast.torch.AdamW([param]).step


def calls(device: str, dry: bool) -> list[Callable[[], object]]:
    numel = 1000 if dry else NUMEL
    grads = [torch.ones(numel, device=device)]
    return [
        *attention_of(64, device, dry),
        *attention_of(128, device, dry),
        adamw_of(torch.float32, device, numel),
        adamw_of(torch.bfloat16, device, numel),
        partial(trainfast.torch.get_total_norm, grads),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu_kernels")
    parser.add_argument("--dry", action="store_true", help="tiny calls on the CPU")
    args = parser.parse_args(argv)
    every = calls("cpu" if args.dry else "cuda", args.dry)
    for call in every:
        call()
    if not args.dry:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    for call in every:
        call()
    if not args.dry:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    print(trainfast.stats())
    if trainfast.stats().fallbacks:
        raise SystemExit("every call must run on a kernel, got torch's path above")


if __name__ == "__main__":
    main()
