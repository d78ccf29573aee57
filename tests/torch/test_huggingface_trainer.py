"""trainfast.AdamW clips in transformers' Trainer, which is told not to."""

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")

import trainfast  # noqa: E402
from tests.torch.trainers import (  # noqa: E402
    ACCUMULATED,
    BATCH,
    CLIP,
    STEPS,
    Net,
    items,
    trained,
)


class Norms(transformers.TrainerCallback):
    def __init__(self):
        self.norms = []

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        self.norms.append(optimizer.optimizer.grad_norm)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def logged(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


def plain():
    """The weights of a plain loop on the same batches."""
    model = Net()
    optimizer = trainfast.AdamW(
        model.parameters(), lr=1e-2, weight_decay=0.0, max_grad_norm=CLIP
    )
    data, norms = items(), []
    for step in range(STEPS):
        for part in range(ACCUMULATED):
            begin = (step * ACCUMULATED + part) * BATCH
            batch = data[begin : begin + BATCH]
            x, y = (torch.stack([item[key] for item in batch]) for key in batch[0])
            (model(x, y)["loss"] / ACCUMULATED).backward()
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
        optimizer.zero_grad()
    return weights(model), norms


def test_gradients_are_clipped_once_and_the_logged_norm_is_the_optimizers(
    tmp_path, monkeypatch
):
    torchs, asked = nn.utils.clip_grad_norm_, []

    def watched(parameters, max_norm, *args, **kwargs):
        parameters = list(parameters)
        before = [p.grad.clone() for p in parameters]
        norm = torchs(parameters, max_norm, *args, **kwargs)
        asked.append(max_norm)
        assert all(torch.equal(p.grad, b) for p, b in zip(parameters, before))
        return norm

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", watched)
    norms = Norms()
    trainer = trained(tmp_path, callbacks=[norms])
    wanted, wanted_norms = plain()
    assert max(wanted_norms) > CLIP > min(wanted_norms)
    assert torch.equal(weights(trainer.model), wanted)
    assert set(asked) <= {float("inf")}  # Trainer measures, and does not clip
    found = [float(norm) for norm in norms.norms]
    assert found == wanted_norms
    assert logged(trainer, "grad_norm") == pytest.approx(found, rel=1e-6)


def test_weights_are_within_rounding_of_those_that_trainer_clips(tmp_path):
    ours = trained(tmp_path)
    kwargs = {"lr": 1e-2, "weight_decay": 0.0}
    torchs = trained(
        tmp_path, optimizer=(torch.optim.AdamW, kwargs), max_grad_norm=CLIP
    )
    torch.testing.assert_close(weights(ours.model), weights(torchs.model))
    assert logged(ours, "grad_norm") == pytest.approx(
        logged(torchs, "grad_norm"), rel=1e-4
    )
