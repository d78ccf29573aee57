"""A user's script, for the type checker alone: names resolve from `import trainfast`,
and results have the types that they have without trainfast."""

from collections.abc import Hashable
from typing import Any, assert_type

import numpy as np
import torch
from torch import Tensor

import trainfast


def train(model: torch.nn.Module, x: Tensor) -> None:
    optimizer = trainfast.torch.AdamW(model.parameters(), lr=1e-3, fused=True)
    assert_type(optimizer, trainfast.torch.AdamW)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    scaler = trainfast.torch.GradScaler("cpu")
    accumulator = trainfast.torch.Accumulator(
        optimizer, 2, scaler=scaler, scheduler=scheduler
    )
    for batch in accumulator.batches([x]):
        assert_type(batch, Tensor)
    assert_type(trainfast.torch.clip_grad_norm_(model.parameters(), 1.0), Tensor)


def attend(q: Tensor) -> None:
    assert_type(trainfast.torch.attention(q, q, q, is_causal=True), Tensor)
    both = trainfast.torch.attention(q, q, q, return_lse=True)
    assert_type(both, tuple[Tensor, Tensor])
    assert_type(trainfast.torch.scaled_dot_product_attention(q, q, q), Tensor)


def report(loader: list[Tensor]) -> None:
    epochs = trainfast.EpochReport(epochs=2, remaining=True)
    with trainfast.Logger(csv="log.csv", wandb={"project": "x"}) as logger:
        bar = trainfast.progress(loader, "epoch 1")
        for step, x in enumerate(bar):
            assert_type(x, Tensor)
            epochs.step(x.mean(), len(x))
            logger.log({"loss": x.mean()}, step)
            bar.postfix(loss=x.mean())
        logger.log({"train_loss": epochs.end_epoch().loss}, 1)


def load(path: str) -> None:
    with trainfast.graph_cache.open(path) as cache:
        assert_type(cache, trainfast.graph_cache.Cache)
        assert_type(cache[0], dict[Hashable, Any])
        assert_type(cache[2:5], trainfast.graph_cache.Subset)
        assert_type(cache[np.arange(3)][::2], trainfast.graph_cache.Subset)
    with trainfast.patch("adamw") as report:
        assert_type(report, trainfast.PatchReport)
