"""trainfast.torch.Muon beside torch's, and beside a float64 iteration."""

import copy
import importlib
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import trainfast
from tests.torch_loops import make_params, set_grads, train
from trainfast.torch import Muon, private
from trainfast.torch.optim import muon as muon_module
from trainfast.torch.optim import newton_schulz
from trainfast.torch.optim.newton_schulz import NS_DTYPES, orthogonalize, resolve_dtype

TORCHS = getattr(torch.optim, "Muon", None)
BESIDE_TORCHS = pytest.mark.skipif(TORCHS is None, reason="torch before 2.9 has none")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Several of one shape, tall and wide, some above the bound of a batch, one empty.
SHAPES = [*5 * [(16, 16)], *3 * [(24, 7)], (7, 24), *2 * [(190, 180)], (0, 4)]
OPTIONS = [
    {},
    {"nesterov": False},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0, "momentum": 0.5},
    {"lr": torch.tensor(0.1), "ns_steps": 2, "eps": 0.5, "ns_coefficients": (2, -1, 1)},
]


@pytest.fixture(autouse=True)
def forget_stats():
    torch.manual_seed(0)
    trainfast.reset_stats()


def reference(grad, steps=5):
    """The iteration in float64, from its definition."""
    a, b, c = COEFFICIENTS
    x = grad.double() / grad.double().norm()
    x = x.T if grad.shape[0] > grad.shape[1] else x
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.shape[0] > grad.shape[1] else x


def steps_of(cls, shape, count, **options):
    """What one step of lr 1 adds to each of `count` parameters, and its error."""
    params = make_params(shapes=count * [shape], seed=1)
    set_grads(params, seed=2)
    before = [p.detach().clone() for p in params]
    options = {"lr": 1.0, "weight_decay": 0.0, "adjust_lr_fn": "original", **options}
    cls(params, **options).step()
    ratio = max(1, shape[0] / shape[1]) ** 0.5
    mine = torch.stack([(b - p).detach() / ratio for b, p in zip(before, params)])
    truth = torch.stack([reference(p.grad) for p in params])
    return float((mine.double() - truth).norm() / truth.norm())


def assert_close(ours, theirs, lr):
    """Parameters within what bfloat16 leaves of a few steps; momentum exactly."""
    for p, q in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"]):
        mine, other = ours.state[p], theirs.state[q]
        assert list(mine) == list(other) == ["momentum_buffer"]
        torch.testing.assert_close(mine, other)
        torch.testing.assert_close(p, q, atol=0.1 * lr, rtol=0)


# ---- Numerics ------------------------------------------------------------------------


@BESIDE_TORCHS
@pytest.mark.parametrize("shape", [(16, 16), (24, 7), (7, 24), (190, 180)])
def test_error_is_at_most_that_of_torchs(shape):
    count = 40_000 // (shape[0] * shape[1])  # the error of few is that of chance
    theirs = steps_of(TORCHS, shape, count)
    assert steps_of(Muon, shape, count) <= 1.05 * theirs
    assert steps_of(Muon, shape, count, ns_dtype="float16") <= 0.25 * theirs
    assert steps_of(Muon, shape, count, ns_dtype="float32") <= 1e-5


@BESIDE_TORCHS
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_steps_are_torchs_within_the_rounding_of_bfloat16(options):
    options = {"lr": 0.1, **options}
    ours = train(Muon, make_params(shapes=SHAPES), **options)
    theirs = train(TORCHS, make_params(shapes=SHAPES), **options)
    assert_close(ours, theirs, 0.1)
    assert trainfast.stats().to_dict() == {"calls": {}, "fallbacks": {}}


def test_batches_give_what_single_matrices_give(monkeypatch):
    options = {"lr": 0.1, "ns_dtype": "float32"}
    ours = train(Muon, make_params(shapes=SHAPES), **options)
    monkeypatch.setattr(newton_schulz, "batch_size", lambda *_: 1)
    single = train(Muon, make_params(shapes=SHAPES), **options)
    for p, q in zip(ours.param_groups[0]["params"], single.param_groups[0]["params"]):
        torch.testing.assert_close(p, q, atol=1e-4, rtol=0)


@pytest.mark.parametrize("scale", [1e-20, 1e5, 1e15])
def test_float16_neither_overflows_nor_vanishes(scale):
    grad = torch.randn(2, 8, 16)
    found = orthogonalize(grad * scale, COEFFICIENTS, 5, 0.0, torch.float16)
    truth = torch.stack([reference(g) for g in grad])
    torch.testing.assert_close(found.double(), truth, atol=0.01, rtol=0)


def test_zero_gradients_only_decay_and_nan_stays_in_its_matrix():
    params = make_params(shapes=3 * [(4, 6)])
    before = [p.detach().clone() for p in params]
    set_grads(params, 0)
    params[0].grad.zero_()
    params[1].grad[0, 0] = float("nan")
    Muon(params, lr=0.5, weight_decay=0.5).step()
    torch.testing.assert_close(params[0], nn.Parameter(before[0] * 0.75))
    assert params[1].isnan().all()
    assert params[2].isfinite().all()


def test_half_momentum_without_nesterov_is_the_mean_of_gradients():
    """torch up to 2.13 divides this buffer by its norm."""
    params = make_params(dtype=torch.bfloat16, shapes=2 * [(4, 6)])
    optimizer = train(Muon, params, steps=1, nesterov=False)
    for param in params:
        buffer, zero = optimizer.state[param]["momentum_buffer"], param.new_zeros(())
        torch.testing.assert_close(buffer, zero.lerp(param.grad, 0.05))


def test_parameters_with_gaps_and_mixed_dtypes_are_stepped():
    dense = [nn.Parameter(torch.randn(6, 4)) for _ in range(2)]
    gaps = [nn.Parameter(torch.empty(4, 8).T[:6].copy_(p.detach())) for p in dense]
    half = nn.Parameter(torch.randn(6, 4, dtype=torch.bfloat16))
    for mine in (dense, gaps):
        set_grads([*mine, half], 3)
        Muon([*mine, half], lr=0.1, ns_dtype="float32").step()
    for one, other in zip(dense, gaps):
        torch.testing.assert_close(one, other)


def test_auto_is_float16_where_a_gpu_emulates_bfloat16(monkeypatch):
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    for major, wanted in ((7, torch.float16), (8, torch.bfloat16)):
        known = {gpu: (major, 5)}
        monkeypatch.setattr(torch.cuda, "get_device_capability", known.get)
        assert resolve_dtype("auto", gpu) == wanted
    for has_bf16, wanted in ((list, torch.float32), (object, torch.bfloat16)):
        monkeypatch.setattr(private, "has_bf16", has_bf16)
        assert resolve_dtype("auto", cpu) == wanted
    assert {resolve_dtype(name, cpu) for name in NS_DTYPES} == {*NS_DTYPES.values()}


def test_bfloat16_on_a_cpu_with_instructions_for_it_uses_them(monkeypatch):
    monkeypatch.setattr(private, "has_bf16", lambda: False)
    emulated = orthogonalize(torch.eye(4)[None], COEFFICIENTS, 5, 0.0, torch.bfloat16)
    monkeypatch.setattr(private, "has_bf16", lambda: True)
    native = orthogonalize(torch.eye(4)[None], COEFFICIENTS, 5, 0.0, torch.bfloat16)
    assert (emulated.dtype, native.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(emulated, native.float(), atol=0.02, rtol=0)


class RefusesReads(TorchDispatchMode):
    """A value that the host reads would make it wait for a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "local_scalar" not in str(function)
        return function(*args, **(kwargs or {}))


def test_the_step_reads_no_value_of_a_tensor():
    params = make_params(shapes=SHAPES)
    set_grads(params, 0)
    optimizer = Muon(params)
    with RefusesReads():
        with pytest.raises(AssertionError):
            params[0].detach().sum().item()
        optimizer.step()


# ---- Arguments, groups and state -----------------------------------------------------


ERRORS = [
    {"lr": -1.0},
    {"lr": torch.tensor([1.0, 2.0])},
    {"momentum": -0.1},
    {"weight_decay": -0.1},
    {"adjust_lr_fn": "none"},
]


@BESIDE_TORCHS
@pytest.mark.parametrize("options", ERRORS, ids=str)
def test_errors_are_torchs(options):
    with pytest.raises(ValueError) as torchs:
        TORCHS(make_params(shapes=[(3, 3)]), **options)
    with pytest.raises(ValueError) as mine:
        Muon(make_params(shapes=[(3, 3)]), **options)
    assert str(mine.value) == str(torchs.value)


@pytest.mark.parametrize("shape", [(7,), (), (3, 5, 2)])
def test_tensors_that_are_not_2d_are_refused_as_by_torch(shape):
    params = make_params(shapes=[(3, 3), shape])
    message = "^Muon only supports 2D parameters whereas we found a parameter with size"
    with pytest.raises(ValueError, match=message):
        Muon(params)
    optimizer = Muon(params[:1])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": params[1:]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": params[1:], "use_muon": False})
    set_grads(params, 0)
    optimizer.step()
    assert set(optimizer.state[params[1]]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ns_steps": 100}, "less than 100"),
        ({"ns_coefficients": (1, 2)}, "exactly 3 values"),
        ({"ns_dtype": "f16"}, "one of bfloat16, float16, float32 and auto, got 'f16'"),
        ({"adamw_betas": (0.9, 1.0)}, "Invalid beta parameter at index 1"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Muon(make_params(shapes=[(3, 3)]), **options)


def test_options_of_the_fused_adamw_are_refused():
    optimizer = Muon(make_params(shapes=[(3, 3)]))
    group = {"params": make_params(shapes=[(3,)]), "use_muon": False, "ema_decay": 0.5}
    with pytest.raises(
        ValueError, match="ema_decay must not be set in a group of Muon"
    ):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


def test_groups_have_options_of_their_own():
    params = make_params(shapes=3 * [(4, 6)])
    before = [p.detach().clone() for p in params]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(params, (0.0, 0.1, 0.2))]
    optimizer = Muon(groups, weight_decay=0.0)
    set_grads(params, 0)
    params[2].grad = params[1].grad.clone()
    assert optimizer.step(lambda: 3.0) == 3.0
    moved = [b - p.detach() for p, b in zip(params, before)]
    assert not moved[0].any()
    torch.testing.assert_close(moved[1] * 2, moved[2])


def test_parameters_without_gradients_get_no_state():
    params = make_params(shapes=2 * [(4, 6)])
    optimizer = Muon(params)
    optimizer.step()
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert list(optimizer.state) == params[:1]


@BESIDE_TORCHS
@pytest.mark.parametrize("first, second", [(Muon, TORCHS), (TORCHS, Muon)])
def test_checkpoints_load_both_ways(first, second):
    shapes = 3 * [(8, 8)]
    whole = train(second, make_params(shapes=shapes), steps=2, lr=0.1)
    saved = train(first, make_params(shapes=shapes), steps=1, lr=0.1)
    params = [nn.Parameter(p.detach().clone()) for p in saved.param_groups[0]["params"]]
    resumed = second(params, lr=0.5)
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    set_grads(params, 101)
    resumed.step()
    assert resumed.param_groups[0]["lr"] == 0.1
    assert_close(resumed, whole, 0.1)


def test_copies_and_checkpoints_of_both_kinds_go_on():
    def make():
        model = Model()
        return model, Muon(model, lr=0.1, adamw_lr=0.2, ns_dtype="float32")

    def advance(optimizer):
        set_grads([p for g in optimizer.param_groups for p in g["params"]], 5)
        optimizer.step()
        return [p for g in optimizer.param_groups for p in g["params"]]

    _, optimizer = make()
    advance(optimizer)
    twins = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    _, loaded = make()
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        for group, other in zip(optimizer.param_groups, loaded.param_groups):
            for p, q in zip(group["params"], other["params"]):
                q.copy_(p)
    expected = advance(optimizer)
    for twin in (*twins, loaded):
        for one, other in zip(expected, advance(twin)):
            assert torch.equal(one, other)
        assert str(twin.assignment) == str(optimizer.assignment)


# ---- The parameters of a model -------------------------------------------------------


class Model(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.scale = nn.LayerNorm((2, 6))
        self.bias = nn.Parameter(torch.zeros(6, 6))
        self.convolution = nn.Conv1d(6, 6, 3)
        self.lm_head = nn.Linear(6, 11, bias=False)
        if tied:
            self.lm_head.weight = self.tokens.weight


def test_a_model_is_divided_by_the_types_of_its_modules():
    reasons = Muon(Model()).assignment.reasons
    assert reasons == {
        "bias": "bias",
        "tokens.weight": "embedding, tied to a head",
        "blocks.0.weight": "matrix of a hidden layer",
        "blocks.0.bias": "not 2-D",
        "blocks.1.weight": "matrix of a hidden layer",
        "blocks.1.bias": "not 2-D",
        "scale.weight": "norm",
        "scale.bias": "norm",
        "convolution.weight": "not 2-D",
        "convolution.bias": "not 2-D",
    }
    untied = Muon(Model(tied=False)).assignment.reasons
    assert untied["tokens.weight"] == "embedding"
    assert untied["lm_head.weight"] == "output head"


def test_the_last_layer_of_a_plain_network_is_its_head():
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.Linear(5, 2))
    assert Muon(net).assignment.reasons["3.weight"] == "output head"
    net.get_output_embeddings = lambda: net[2]
    reasons = Muon(net).assignment.reasons
    assert (reasons["2.weight"], reasons["3.weight"]) == (
        "output head",
        "matrix of a hidden layer",
    )


@pytest.mark.parametrize(
    "name, reason",
    [
        ("transformer.wte.weight", "embedding"),
        ("model.embed_tokens.weight", "embedding"),
        ("pos_embedding", "embedding"),
        ("lm_head.weight", "output head"),
        ("heads.head.weight", "output head"),
        ("heads.0.query.weight", "matrix of a hidden layer"),
        ("multi_head_attn.out_proj.weight", "matrix of a hidden layer"),
        ("memory.weight", "matrix of a hidden layer"),
        ("attn.relative_bias", "bias"),
    ],
)
def test_named_parameters_are_divided_by_their_names(name, reason):
    matrix, other = make_params(shapes=[(4, 4), (4, 4)])
    optimizer = Muon(iter([("layer.weight", matrix), (name, other)]))
    assert optimizer.assignment.reasons[name] == reason


def test_the_assignment_is_a_short_table():
    text = str(Muon(Model()).assignment)
    assert "Muon       matrix of a hidden layer" in text
    assert len(text.splitlines()) == 8


def test_a_model_without_matrices_is_sent_to_adamw():
    with pytest.raises(ValueError, match=r"got none among 2 parameters; use .*AdamW$"):
        Muon(nn.Linear(3, 3))


def test_rest_of_a_model_is_stepped_as_by_adamw():
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    optimizer = Muon(model, adamw_lr=0.1, adamw_betas=(0.5, 0.6), adamw_eps=1e-3)
    rest = optimizer.param_groups[1]["params"]
    names = [n for n, r in optimizer.assignment.reasons.items() if "hidden" not in r]
    others = [dict(twin.named_parameters())[name] for name in names]
    adamw = torch.optim.AdamW(others, 0.1, (0.5, 0.6), 1e-3, weight_decay=0.0)
    for step in range(3):
        for params, stepped in ((rest, optimizer), (others, adamw)):
            set_grads(params, step)
            stepped.step()
    for one, other in zip(rest, others):
        torch.testing.assert_close(one, other)
    assert list(trainfast.stats().to_dict()["calls"]) == ["adamw"]


# ---- Beside other classes ------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


@BESIDE_TORCHS
def test_subclasses_run_torchs_step_and_are_counted():
    params = make_params(shapes=2 * [(4, 6)])
    theirs = make_params(shapes=2 * [(4, 6)])
    params[0] = nn.Parameter(params[0].detach().as_subclass(Subclass))
    ours = train(Muon, params, steps=2, lr=0.1)
    assert_close(ours, train(TORCHS, theirs, steps=2, lr=0.1), 0.1)
    reason = "a tensor subclass, such as DTensor"
    assert trainfast.stats().to_dict()["fallbacks"] == {"muon": {reason: 2}}


@BESIDE_TORCHS
def test_sparse_gradients_raise_torchs_error_and_change_nothing():
    params = make_params(shapes=2 * [(4, 6)])
    before = [p.detach().clone() for p in params]
    set_grads(params, 0)
    params[1].grad = params[1].grad.to_sparse()
    with pytest.raises(RuntimeError, match="Muon does not support sparse gradients"):
        Muon(params).step()
    assert all(torch.equal(p, b) for p, b in zip(params, before))
    assert trainfast.stats().fallbacks == {"muon": {"a sparse gradient": 1}}


def test_subclasses_before_2_9_are_refused(monkeypatch):
    monkeypatch.setattr(muon_module, "_TORCHS", None)
    param = nn.Parameter(torch.ones(3, 3).as_subclass(Subclass))
    param.grad = torch.ones(3, 3)
    message = "DTensor needs torch.optim.Muon, which torch has from 2.9 on"
    with pytest.raises(NotImplementedError, match=message):
        Muon([param]).step()


@pytest.mark.parametrize("scaler_class", [trainfast.GradScaler, torch.amp.GradScaler])
def test_scalers_unscale_then_clip_then_step(scaler_class):
    def run(scaled):
        params = make_params(shapes=[(8, 8), (8, 8), (8,)])
        groups = [{"params": params[:2]}, {"params": params[2:], "use_muon": False}]
        optimizer = Muon(groups, lr=0.1, adamw_eps=1.0)
        scaler = scaler_class("cpu", init_scale=8.0, enabled=scaled)
        scaler.scale(torch.ones(()))
        for step in range(3):
            set_grads(params, step)
            for param in params:
                param.grad *= 8 if scaled else 1
            if step == 1:
                params[0].grad[0, 0] = float("inf") if scaled else 0
            if step == 1 and not scaled:
                continue
            scaler.unscale_(optimizer)
            trainfast.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
            if step == 0:
                scaler.update()
            else:
                scaler.update(8.0)
        return params

    for one, other in zip(run(True), run(False)):
        torch.testing.assert_close(one, other)


# ---- Training ------------------------------------------------------------------------


def torchs_muon_and_adamw(model):
    """As scripts do it: the matrices of the blocks, and all the rest."""
    hidden = [p for p in model.blocks.parameters() if p.ndim == 2]
    known = set(map(id, hidden))
    rest = [p for p in model.parameters() if id(p) not in known]
    adamw = torch.optim.AdamW(rest, 3e-3, (0.9, 0.95), weight_decay=0.0)
    return [TORCHS(hidden, lr=0.02), adamw]


def validation_loss(corpus, model, optimizers, seed):
    generator = torch.Generator().manual_seed(seed)

    def loss_of(text, generator, batch):
        starts = torch.randint(len(text) - 33, (batch,), generator=generator)
        lines = torch.stack([text[i : i + 33] for i in starts.tolist()])
        scores = model(lines[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), lines[:, 1:].flatten())

    for _ in range(200):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(corpus.train, generator, 16).backward()
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        return float(loss_of(corpus.validation, torch.Generator().manual_seed(9), 256))


@pytest.mark.slow
@BESIDE_TORCHS
def test_a_transformer_learns_inside_the_spread_of_torchs_seeds(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")
    small_gpt = importlib.import_module("small_gpt")
    corpus = small_gpt.Corpus()

    def losses(optimizers_of):
        found = []
        for seed in range(3):
            torch.manual_seed(seed)
            model = small_gpt.GPT(len(corpus.alphabet), 32, 2, 32, 2)
            found.append(validation_loss(corpus, model, optimizers_of(model), seed))
        return found

    theirs = losses(torchs_muon_and_adamw)
    ours = losses(lambda model: [Muon(model, lr=0.02, adamw_lr=3e-3)])
    apart = abs(sum(ours) - sum(theirs)) / 3
    spread = max(max(losses) - min(losses) for losses in (ours, theirs))
    assert apart <= spread < 0.03, (ours, theirs)
