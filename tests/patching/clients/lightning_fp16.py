"""Lightning in float16 with a GradScaler; one batch overflows."""

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        self.losses, self.rates = [], []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x).float(), y)
        if batch_idx == 3:
            loss = loss * 1e30
        self.losses.append(loss.item())
        self.rates.append(self.lr_schedulers().get_last_lr()[0])
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


L.seed_everything(1)
data = TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
model = Regression()
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
trainer = L.Trainer(
    max_epochs=2,
    accelerator="cpu",
    plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
    gradient_clip_val=0.5,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, DataLoader(data, batch_size=8))
torch.save(
    {
        "losses": model.losses,
        "rates": model.rates,
        "model": model.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "scaler": scaler.state_dict(),
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
    },
    "final.pt",
)
