"""Estimates of memory beside what torch's profiler counts, and their edges."""

import json

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import trainfast  # noqa: E402
from benchmarks.estimates import gpu, published, truth  # noqa: E402
from benchmarks.estimates.models import MODELS  # noqa: E402
from trainfast.memory.gpus import gpu_of  # noqa: E402
from trainfast.memory.knobs import largest_batch, savings  # noqa: E402
from trainfast.torch.memory.scratch import scratch_of  # noqa: E402

MIB = 1 << 20


def small(batch=64):
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 10))
    return model, (torch.randn(batch, 256), torch.randint(10, (batch,)))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        slow("gpt"),
        slow("gpt_bf16"),  # emulated on most processors
        slow("gpt_checkpointed"),
        slow("unet"),
        "lstm",
        "experts",
        "sage",
    ],
)
def test_estimate_is_what_the_profiler_counts(name):
    if name == "sage":
        pytest.importorskip("torch_geometric")
    torch.manual_seed(0)
    model, batch, options = MODELS[name]()
    estimate = trainfast.estimate_memory(model, batch, device="cpu", **options)
    assert estimate.allocated == pytest.approx(truth.profiled_peak(name), rel=0.005)
    assert estimate.exact == (name not in ("lstm", "experts"))


@pytest.mark.parametrize("name", ["bert", "llama", slow("t5"), slow("swin")])
def test_models_of_transformers_are_what_the_profiler_counts(name):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, batch, options = MODELS[name]()
    estimate = trainfast.estimate_memory(model, batch, device="cpu", **options)
    assert estimate.allocated == pytest.approx(truth.profiled_peak(name), rel=0.005)
    assert estimate.exact


def test_everything_stays_as_it_was():
    model, batch = small()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    rng = torch.get_rng_state()
    trainfast.estimate_memory(model, batch, loss_fn=functional.cross_entropy)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.training and bool((model[0].weight.grad == 1).all())
    assert torch.equal(torch.get_rng_state(), rng)
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks
    # CUDA's rules end with the estimate.
    x = torch.ones(1000, requires_grad=True)
    torch.manual_seed(0)
    assert functional.dropout(x, 0.5).grad_fn.name() == "MulBackward0"
    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.ones(2, dtype=torch.bfloat16).softmax(0)).dtype == torch.bfloat16


def test_parts_of_a_known_model():
    """Sizes that can be computed by hand."""
    model, batch = small()
    estimate = trainfast.estimate_memory(
        model, batch, loss_fn=functional.cross_entropy, device="cpu"
    )
    weights = 4 * (256 * 1024 + 1024 + 1024 * 10 + 10)
    assert estimate.kinds["weights"] == weights
    assert estimate.kinds["optimizer state"] == pytest.approx(2 * weights, abs=64)
    at_forward = trainfast.estimate_memory(
        model, batch, loss_fn=functional.cross_entropy, device="cpu", optimizer="sgd"
    ).activations
    assert at_forward["0"] == at_forward["1"] == 4 * 64 * 1024
    assert "optimizer state" not in estimate.again(optimizer="sgd").kinds


def test_a_model_larger_than_the_memory_is_built_from_fakes():
    def build():
        return nn.Sequential(*(nn.Linear(16384, 16384) for _ in range(40)))

    estimate = trainfast.estimate_memory(
        build, torch.zeros(2, 16384), optimizer="sgd", gpu="A100"
    )
    assert estimate.kinds["weights"] > 40 * 2**30
    assert estimate.verdict == "does not fit" and not estimate.fits
    assert estimate.failed == "start"


def test_builder_may_convert_its_model():
    def build():
        model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False))
        model[1].weight = model[0].weight  # stays tied
        return model.half().to(torch.bfloat16).bfloat16()

    estimate = trainfast.estimate_memory(build, torch.zeros(2, 8, dtype=torch.int64))
    assert estimate.method == "fake tensors"
    assert estimate.kinds["weights"] == 1000 * 64 * 2


def test_published_figures_are_met():
    rows = json.loads(published.PATH.read_text())["figures"]
    assert [row["name"] for row in rows] == [f.name for f in published.FIGURES]
    for row in rows:
        error = row["estimate"] / row["published"] - 1
        assert row["error"] == pytest.approx(error, abs=1e-6)
    errors = sorted(abs(row["error"]) for row in rows)
    assert errors[len(errors) // 2] < 0.05 and errors[-3] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT-L/16 fp16 autocast 64", "ViT-L/16 bf16 16"])
def test_published_estimates_are_still_what_they_were(name):
    (row,) = (
        row
        for row in json.loads(published.PATH.read_text())["figures"]
        if row["name"] == name
    )
    (figure,) = (figure for figure in published.FIGURES if figure.name == name)
    assert published.estimated(figure)["estimate"] == pytest.approx(
        row["estimate"], rel=0.01
    )


@pytest.mark.parametrize(
    "name", ["mlp", "transformer_encoder", slow("gpt"), slow("unet"), "sage", "t5"]
)
def test_estimate_is_what_torchs_allocator_counted_on_an_h200(name):
    if name == "sage":
        pytest.importorskip("torch_geometric")
    if name == "t5":  # transformers 4 allocates other tensors
        pytest.importorskip("transformers", minversion="5")
    counted = json.loads(gpu.PATH.read_text())["models"][name]["trained"]
    found = gpu.estimated(name)
    assert found["allocated"] == pytest.approx(counted["allocated"], rel=0.005)
    most = 0.1 if name == "unet" else 0.012  # cuDNN's workspaces
    assert found["reserved"] == pytest.approx(counted["reserved"], rel=most)


# As torch's history has them from an H200, in MiB.
SUMS = [((2048, 2048), 32), ((8192, 2000), 125), ((4736, 1024), 37), ((51200, 128), 50)]


@pytest.mark.parametrize("shape, size", SUMS)
def test_scratch_of_sums_over_rows(shape, size):
    x = torch.empty(shape, device="meta")
    args = ("sum.dim_IntList", (x, [0], True), None)
    assert scratch_of(*args, gpu_of("H200")) == size * MIB
    assert scratch_of(*args, gpu_of("T4")) < size * MIB  # fewer blocks share the rows
    assert scratch_of(*args, None) == 0
    for other in ((x, [1]), (x, [0, 1]), (x.T, [0]), (x[:100], [0]), (x[:0], [0])):
        assert scratch_of("sum.dim_IntList", other, None, gpu_of("H200")) == 0


@pytest.mark.parametrize(
    "batch, heads, length, size", [(64, 8, 128, 16.015625), (128, 8, 37, 16.015625)]
)
def test_scratch_of_the_efficient_backward_pass(batch, heads, length, size):
    q = torch.empty(batch, heads, length, 32, device="meta")
    name = "_scaled_dot_product_efficient_attention_backward.default"
    assert scratch_of(name, (q, q), None, gpu_of("H200")) == size * MIB


@pytest.mark.slow
def test_knobs_and_the_largest_batch():
    torch.manual_seed(0)
    model, batch, options = MODELS["gpt"]()
    estimate = trainfast.estimate_memory(model, batch, gpu="2GB", **options)
    found = savings(estimate)
    assert found["autocast to fp16"].total < estimate.total
    assert found["batch 4, twice the accumulation"].batch_size == 4
    coded = found['trainfast.AdamW(state_dtype="int8")']
    assert coded.kinds["optimizer state"] < 0.3 * estimate.kinds["optimizer state"]
    released = found["trainfast.AdamW with release_gradients()"]
    assert released.total <= found["trainfast.AdamW"].total
    assert 'trainfast.patch("attention")' not in found  # torch's keeps no scores either
    best = largest_batch(estimate)
    assert estimate.again(batch_size=best).fits
    assert not estimate.again(batch_size=best + 1).fits


def test_attention_backends_by_gpu_and_dtype():
    """Scores are materialised where no fused backend of torch takes the call."""
    model, batch, options = MODELS["gpt"]()
    scores = 6 * 8 * 8 * 256 * 256 * 2  # layers, batch, heads, queries, keys, bytes

    def activations(gpu):
        estimate = trainfast.estimate_memory(
            model, batch, gpu=gpu, amp="bf16", optimizer="sgd", **options
        )
        return sum(estimate.activations.values())

    assert activations("T4") - activations("A100") > scores


def test_attention_patch_keeps_no_scores_where_torch_does():
    model, batch, options = MODELS["gpt"]()
    scores = 6 * 8 * 8 * 256 * 256 * 2
    options |= {"gpu": "T4", "amp": "bf16", "optimizer": "sgd"}
    torchs = trainfast.estimate_memory(model, batch, **options)
    ours = torchs.again(attention_patch=True)
    assert ours.exact
    saved = sum(torchs.activations.values()) - sum(ours.activations.values())
    assert saved > scores


def test_released_gradients_are_never_all_there():
    """Eight matrices and few samples: gradients are a quarter of the memory."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    options = {"optimizer": "trainfast", "gpu": "T4"}
    estimate = trainfast.estimate_memory(model, torch.randn(4, 512), **options)
    released = estimate.again(release_gradients=True)
    assert estimate.allocated - released.allocated > 6 * 512 * 512 * 4
    assert released.kinds["optimizer state"] == estimate.kinds["optimizer state"]
    assert not any(p.grad is not None for p in model.parameters())
    with pytest.raises(ValueError, match="needs an optimizer of trainfast"):
        estimate.again(release_gradients=True, optimizer="sgd")


def test_validation_is_a_moment_of_its_own():
    model, batch = small()
    validation = (torch.randn(8192, 256), torch.randint(10, (8192,)))
    estimate = trainfast.estimate_memory(
        model, batch, loss_fn=functional.cross_entropy, validation=validation
    )
    assert max(estimate.moments, key=estimate.moments.get) == "validation"
    assert model.training


class Custom(torch.autograd.Function):
    """What fakes cannot run: it reads its data."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 512)

    def forward(self, x):
        y = self.inner(x)
        if type(y).__name__ == "FakeTensor":
            raise RuntimeError("no data here")
        return Custom.apply(y)


def test_what_fakes_cannot_run_is_run_with_two_small_batches():
    estimate = trainfast.estimate_memory(Reads(), torch.randn(1000, 64), device="cpu")
    assert estimate.method == "two small steps, a line" and not estimate.exact
    assert "no data here" in estimate.notes[0]
    assert estimate.activations["inner"] == 1000 * 512 * 4


def test_errors_of_the_step_are_its_own():
    model, batch = small()

    def step(model, batch):
        raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        trainfast.estimate_memory(model, batch, step=step)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainfast.estimate_memory(model, torch.randn(4, 7))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu": "T5"}, "`gpu` must be a number of bytes, a size such as '16GB'"),
        ({"gpu": -1}, "positive number of bytes"),
        ({"gpu": 1.5}, "a name or a number of bytes"),
        ({"device": "tpu"}, '"cuda" or "cpu"'),
        ({"amp": "fp8"}, 'None, "bf16" or "fp16"'),
        ({"steps": 0}, "positive integer"),
        ({"optimizer": "lion"}, "`optimizer` must be"),
        ({"loss_fn": len, "step": len}, "cannot be combined"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    model, batch = small(4)
    with pytest.raises((TypeError, ValueError), match=message):
        trainfast.estimate_memory(model, batch, **arguments)


def test_wrong_models_are_named():
    with pytest.raises(TypeError, match="a module or a function"):
        trainfast.estimate_memory(7, torch.ones(2))
    with pytest.raises(TypeError, match="the function returned int"):
        trainfast.estimate_memory(lambda: 7, torch.ones(2))


def test_a_frozen_model_and_an_empty_batch():
    model, batch = small()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    estimate = trainfast.estimate_memory(model, batch, loss_fn=functional.cross_entropy)
    assert "gradients" not in estimate.kinds and estimate.fits
    empty = (torch.empty(0, 256), torch.empty(0, dtype=torch.long))
    estimate = trainfast.estimate_memory(
        small()[0], empty, loss_fn=lambda out, _: out.sum()
    )
    assert estimate.fits


def test_report_is_text_html_json_and_a_picture(tmp_path):
    model, batch = small()
    options = {"loss_fn": functional.cross_entropy, "gpu": "T4"}
    estimate = trainfast.estimate_memory(model, batch, **options)
    assert "A training step on T4" in str(estimate)
    assert "optimizer state" in str(estimate)
    assert estimate._repr_html_().count("<table") == 5
    assert '"verdict": "fits"' in estimate.to_json()
    pytest.importorskip("matplotlib")
    estimate.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
