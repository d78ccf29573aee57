"""`profile_memory_usage`: the peaks of a step's parts."""

import pytest

torch = pytest.importorskip("torch")
import trainfast  # noqa: E402


def test_peaks_by_moment():
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh())
    found = trainfast.profile_memory_usage(model, (64,), batch_size=100)
    assert list(found) == ["forward", "backward", "optimizer step"]
    weights, activations = 4 * (64 * 512 + 512), 2 * 4 * 100 * 512
    assert found["forward"] == pytest.approx(weights + activations, rel=0.1)
    assert found["backward"] > found["forward"]
    # Weights, gradients, two moments.
    assert found["optimizer step"] >= 4 * weights
    assert model[0].weight.grad is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_peaks_on_a_gpu():
    model = torch.nn.Linear(64, 512)
    found = trainfast.profile_memory_usage(model, (64,), "cuda", batch_size=100)
    assert found["backward"] > 0 and model.weight.device.type == "cpu"
