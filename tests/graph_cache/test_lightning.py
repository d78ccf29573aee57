"""The loader under Lightning: epochs, and going on from a checkpoint's middle."""

import pytest
import torch

from tests.graph_cache.loading import N
from tests.graph_cache.worlds import molecules

lightning = pytest.importorskip("lightning", reason="an adapter's test, by hand")

from trainfast import graph_cache as gc  # noqa: E402


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.seen = torch.nn.Linear(3, 1), []

    def training_step(self, batch, _):
        self.seen.append(batch["y"].tolist())
        return self.layer(batch["x"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(path, loader, **keywords):
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **keywords,
    )
    trainer.fit(model, loader, ckpt_path=path)
    return model, trainer


@pytest.fixture
def cache(tmp_path):
    return gc.open(molecules(N).write(tmp_path / "cache"))


def new_loader(cache, **options):
    return gc.Loader(cache, 8, shuffle=True, device="cpu", **options)


def test_epochs_under_lightning_are_the_loaders(cache):
    loader = new_loader(cache, seed=7)
    want = [batch["y"].tolist() for _ in range(3) for batch in loader]
    assert fit(None, new_loader(cache, seed=7), max_epochs=3)[0].seen == want


def test_state_of_the_loader_is_in_the_checkpoint_and_used(cache, tmp_path):
    class Saver(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 10:
                trainer.save_checkpoint(tmp_path / "stop.ckpt")

    whole = fit(None, new_loader(cache), max_epochs=3, callbacks=[Saver()])[0].seen
    assert len(whole) == 21
    again, _ = fit(tmp_path / "stop.ckpt", new_loader(cache), max_epochs=3)
    assert again.seen == whole[10:]
