"""DTensors in worlds of two and four processes."""

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from tests.torch.distributed import four_ranks, one_rank, two_ranks
from tests.torch.distributed.worlds import names_of, run_world

pytestmark = [pytest.mark.slow, pytest.mark.forks]
WORLDS = {2: two_ranks, 4: four_ranks, 1: one_rank}  # checkpoints go on in this order


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    return {size: run_world(module, size, folder) for size, module in WORLDS.items()}


@pytest.mark.parametrize(
    ("size", "case"),
    [(size, name) for size, module in WORLDS.items() for name in names_of(module)],
)
def test_ranks(said, size, case):
    assert not said[size][case], said[size][case]
