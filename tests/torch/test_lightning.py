"""The unchanged loop under Lightning, with float16 AMP and clipping."""

import pytest
import torch

lightning = pytest.importorskip("lightning", reason="an adapter's test, by hand")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

import trainfast  # noqa: E402


class Model(lightning.LightningModule):
    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.make = torch.nn.Linear(8, 1), make

    def training_step(self, batch, _):
        return self.layer(batch[0]).float().square().mean()

    def configure_optimizers(self):
        return self.make(self.parameters(), lr=0.1)


def train(make, scaler):
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler("cpu", 64.0))
    return fit(make, gradient_clip_val=0.1, plugins=[plugin])


def fit(make, **options):
    """The weights after two epochs of Lightning's Trainer."""
    model = Model(make)
    gen = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(32, 8, generator=gen))
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8))
    return model.layer.weight.detach()


SCALERS = [torch.amp.GradScaler, trainfast.torch.GradScaler]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("amp_scaling", [None, False])
@pytest.mark.parametrize("scaler", SCALERS)
def test_clipping_is_torchs(scaler, amp_scaling):
    def ours(params, **options):
        return trainfast.torch.AdamW(params, amp_scaling=amp_scaling, **options)

    want = train(torch.optim.AdamW, torch.amp.GradScaler)
    torch.testing.assert_close(train(ours, scaler), want)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("option", ["fused", "amp_scaling"])
def test_lightning_refuses_to_clip_where_an_option_asks_for_the_flag(option):
    def ours(params, **options):
        return trainfast.torch.AdamW(params, **options, **{option: True})

    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        train(ours, trainfast.torch.GradScaler)


@pytest.mark.filterwarnings("ignore")
def test_patched_bfloat16_trainer_clips_as_before():
    def make(params, **options):
        return torch.optim.AdamW(params, **options)

    want = fit(make, gradient_clip_val=0.1, precision="bf16-mixed")
    with trainfast.patch():
        weights = fit(make, gradient_clip_val=0.1, precision="bf16-mixed")
    torch.testing.assert_close(weights, want)
