"""transformers' Trainer on a small net, with trainfast.AdamW that clips."""

import torch
import transformers
from torch import nn

import trainfast

CLIP, BATCH, ACCUMULATED, STEPS = 1.5, 4, 2, 12


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.losses = []  # of all batches in training
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x, labels=None):
        out = self.net(x)
        loss = nn.functional.mse_loss(out, labels)
        if self.training:
            self.losses.append(loss.detach())
        return {"loss": loss, "logits": out}


def items(count=BATCH * ACCUMULATED * STEPS):
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(count, 16, generator=gen)
    y = torch.randn(count, 1, generator=gen)
    return [{"x": x[i], "labels": y[i]} for i in range(count)]


class InOrder(transformers.Trainer):
    """Takes the batches in the order of the data set."""

    def _get_train_sampler(self, *_):
        return None


def trained(folder, resume=None, **options):
    """The Trainer after its train()."""
    trainer = make_trainer(folder, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def make_trainer(
    folder,
    cls=InOrder,
    callbacks=(),
    data=None,
    evaluate=None,
    optimizer=None,
    **options,
):
    settings = {
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATED,
        "num_train_epochs": 1,
        "max_grad_norm": 0,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
    }
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **settings | options,
    )
    kwargs = {"lr": 1e-2, "weight_decay": 0.0, "max_grad_norm": CLIP}
    return cls(
        Net(),
        args,
        train_dataset=items() if data is None else data,
        eval_dataset=evaluate,
        optimizer_cls_and_kwargs=optimizer or (trainfast.AdamW, kwargs),
        callbacks=list(callbacks),
    )
