"""The case for one process, which worlds.py runs."""

import torch

from tests.torch.distributed import two_ranks as cases
from tests.torch.distributed.resume import load, train_on


def case_a_checkpoint_of_four_goes_on(folder):
    model, optimizer = load(folder / "from-4")
    assert all(state["step"] == 4 for state in optimizer.state.values())
    train_on(model, optimizer)
    cases.assert_same(model.parameters(), torch.load(folder / "want-last.pt"))
    emas = [state["ema"] for state in optimizer.state.values()]
    assert all(ema.device_mesh.size() == 1 for ema in emas)
