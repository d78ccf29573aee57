"""What only a GPU shows: memory that runs out for real, and its allocator's counts."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional

import trainfast

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

MOST = 2 << 30  # bytes that torch may take


@pytest.fixture
def little_memory():
    """As if the GPU had 2 GiB: above it torch's allocator fails as on a full one."""
    gc.collect()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(MOST / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def model_of():
    torch.manual_seed(0)
    layers = [nn.Linear(256, 2048), nn.GELU(), nn.BatchNorm1d(2048), nn.Linear(2048, 8)]
    return nn.Sequential(*layers).cuda()


def batch_of(n):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 256, generator=generator)
    return x.cuda(), torch.randint(8, (n,), generator=generator).cuda()


def states(model, optimizer):
    tensors = [*model.state_dict().values()]
    for state in optimizer.state.values():
        tensors += state.values()
    return [t.clone() for t in tensors if isinstance(t, torch.Tensor)]


def train(model, optimizer, n):
    x, y = batch_of(n)
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_batch_size_that_was_found_runs_and_a_quarter_more_does_not(little_memory):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 64)
    before = states(model, optimizer)
    report = trainfast.find_batch_size(
        model,
        batch_of,
        optimizer,
        loss_fn=functional.cross_entropy,
        target=1.0,
        max_batch_size=1 << 20,
    )
    found = report.batch_size
    for one, other in zip(states(model, optimizer), before, strict=True):
        assert torch.equal(one, other)
    torch.cuda.empty_cache()
    train(model, optimizer, found)
    torch.cuda.empty_cache()
    with pytest.raises(torch.OutOfMemoryError):
        train(model, optimizer, found * 5 // 4)


def test_micro_batches_after_memory_ran_out(little_memory):
    model = nn.Sequential(*[layer for i, layer in enumerate(model_of()) if i != 2])
    x, y = batch_of(1 << 17)  # a GiB for each layer's output
    expected = []
    for part, right in zip(x.split(1 << 14), y.split(1 << 14), strict=True):
        functional.cross_entropy(model(part), right, reduction="sum").backward()
    for p in model.parameters():
        expected.append(p.grad / len(x))
        p.grad = None

    @trainfast.auto_micro_batch(model)
    def step(batch):
        inputs, targets = batch
        return functional.cross_entropy(model(inputs), targets)

    torch.cuda.empty_cache()
    with pytest.warns(UserWarning, match="ran out"):
        loss = step((x, y))
    assert loss.isfinite()
    for p, right in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, right, rtol=1e-3, atol=1e-6)


def test_advice_for_a_real_error(little_memory):
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    advice = trainfast.oom_advice(raised.value, batch_size=32)
    failure = advice.failure
    assert failure.requested == 3 << 30 and failure.allowed == pytest.approx(MOST, 0.02)
    assert advice.remedies


@pytest.mark.parametrize("amp", [None, "bf16"])
def test_estimate_is_what_the_allocator_counts(amp):
    torch.manual_seed(0)
    layers = [nn.Linear(512, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(4096, 10))
    batch = torch.randn(4096, 512), torch.randint(10, (4096,))
    found = trainfast.estimate_memory(
        model, batch, loss_fn=functional.cross_entropy, amp=amp, gpu="H100"
    )
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        x, y = (t.cuda() for t in batch)
        with torch.autocast("cuda", torch.bfloat16, enabled=amp is not None):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del x, y, loss
    assert found.allocated == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.1)


def test_print_gpu_memory(capsys):
    held = torch.ones(1 << 20, device="cuda")
    trainfast.print_gpu_memory()
    said = capsys.readouterr().out
    assert torch.cuda.get_device_name() in said and "reserved by torch" in said
    del held
