"""A LightningModule with callbacks and checkpoints: `python lightning_module.py
[--resume]`."""

import sys

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AutoEncoder(L.LightningModule):
    def __init__(self, width=16, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, width))
        self.decoder = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 64))
        self.losses = []

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss, prog_bar=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        return [optimizer], [scheduler]


L.seed_everything(5)
data = torch.randn(96, 64)
train = DataLoader(TensorDataset(data[:64]), batch_size=16)
val = DataLoader(TensorDataset(data[64:]), batch_size=16)
model = AutoEncoder()
checkpoint = ModelCheckpoint(dirpath="checkpoints", save_top_k=-1, filename="{epoch}")
trainer = L.Trainer(
    max_epochs=4,
    accelerator="cpu",
    logger=False,
    callbacks=[checkpoint, EarlyStopping("val_loss", patience=3)],
    enable_progress_bar=False,
    gradient_clip_val=1.0,
)
resume = "checkpoints/epoch=1.ckpt" if "--resume" in sys.argv else None
trainer.fit(model, train, val, ckpt_path=resume)
last = torch.load(f"checkpoints/epoch={trainer.current_epoch - 1}.ckpt")
torch.save(
    {
        "losses": model.losses[-8:],
        "val_loss": trainer.callback_metrics["val_loss"],
        "model": last["state_dict"],
        "optimizer": last["optimizer_states"],
        "scheduler": last["lr_schedulers"],
    },
    "final.pt",
)
