"""What differs between versions of torch, tried on whatever version is here."""

import runpy
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from trainfast.torch import Adam, AdamW, private  # noqa: E402
from trainfast.torch.optim import state as adamw_state  # noqa: E402


def python(code, *arguments):
    """What another interpreter prints."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.check_output(command, text=True, stderr=subprocess.PIPE)


# ---- What is supported ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.5.1+cu124", "1.13.1"])
def test_torch_that_is_too_old_is_an_import_error(version):
    code = f"""
import torch, trainfast
torch.__version__ = torch.torch_version.TorchVersion({version!r})
for load in ("import trainfast.torch", "from trainfast.torch import AdamW",
             "import trainfast.torch.huggingface", "trainfast.torch.attention"):
    try:
        exec(load)
    except ImportError as error:
        print(error)
"""
    message = (
        f"torch must be at least 2.6, got {version}; upgrade torch, or use trainfast "
        "with NumPy arrays alone"
    )
    assert python(code).splitlines() == [message] * 4


@pytest.mark.parametrize("version", ["2.6.0a0+ecf3bae", "2.15.0.dev20260101", "3.0.0"])
def test_pre_releases_and_new_versions_are_supported(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    private._require_supported()


# ---- Adam before torch 2.7, whose groups do not name their weight decay --------------


@pytest.fixture
def before_2_7(monkeypatch):
    """Optimizers of trainfast whose torch is older than it is."""
    if not private.ADAM_DECOUPLES:
        return
    monkeypatch.setattr(private, "ADAM_DECOUPLES", False)
    complete = adamw_state.complete

    def forget(group, *args):
        group.pop("decoupled_weight_decay", None)
        complete(group, *args)

    monkeypatch.setattr(adamw_state, "complete", forget)


def trained(kind, lr=0.1, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    groups = [{"params": [p]} for p in model.parameters()]
    optimizer = kind(groups, weight_decay=0.3, **options)
    for group in optimizer.param_groups:
        group["lr"] = lr
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 5), step + 1.0)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("lr", [0.1, -0.1])
def test_step_before_2_7_is_torchs(before_2_7, name, lr):
    """On the kernel, and where torch's step stands in, as for a negative lr."""
    expected, _ = trained(getattr(torch.optim, name), lr)
    kind = {"AdamW": AdamW, "Adam": Adam}[name]
    model, optimizer = trained(kind, lr)
    for mine, theirs in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(mine, theirs)
    decoupled = [group["decoupled_weight_decay"] for group in optimizer.param_groups]
    assert decoupled == [name == "AdamW"] * 2


def test_state_before_2_7_loads(before_2_7):
    _, theirs = trained(torch.optim.AdamW)
    saved = theirs.state_dict()
    for group in saved["param_groups"]:
        group.pop("decoupled_weight_decay", None)
    _, mine = trained(AdamW)
    mine.load_state_dict(saved)
    mine.step()
    assert all(group["decoupled_weight_decay"] for group in mine.param_groups)


def test_decoupled_adam_before_2_7_is_refused(monkeypatch):
    monkeypatch.setattr(private, "ADAM_DECOUPLES", False)
    message = (
        "^decoupled_weight_decay of Adam must be False in torch before 2.7, got True "
        f"with torch {torch.__version__}; use AdamW$".replace("+", r"\+")
    )
    params = [torch.nn.Parameter(torch.zeros(2))]
    with pytest.raises(ValueError, match=message):
        Adam(params, decoupled_weight_decay=True)
    optimizer = Adam(params)
    more = {"params": [torch.nn.Parameter(torch.zeros(3))]}
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({**more, "decoupled_weight_decay": True})
    assert len(optimizer.param_groups) == 1


@pytest.mark.skipif(not private.ADAM_DECOUPLES, reason="torch before 2.7 has none")
def test_decoupled_adam_is_adamw():
    adam, _ = trained(Adam, decoupled_weight_decay=True)
    adamw, _ = trained(AdamW)
    for one, other in zip(adam.parameters(), adamw.parameters()):
        assert torch.equal(one, other)


# ---- Modes ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0, "ema_decay": 0.9}])
def test_a_mode_sees_no_more_of_a_step_for_more_parameters(options):
    """torch.set_default_device() has one; in it a read of an attribute takes 7 us."""

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    counts = []
    for n in (2, 40):
        params = [torch.nn.Parameter(torch.ones(3)) for _ in range(n)]
        for param in params:
            param.grad = torch.ones(3)
        optimizer = AdamW(params, **options)
        optimizer.step()
        seen = []
        with Mode():
            optimizer.step()
        counts.append(len(seen))
    assert counts[0] == counts[1]


def test_a_step_under_a_default_device_is_the_same():
    models = []
    for device in (None, "meta"):  # nothing of a step is made there
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        optimizer = AdamW(model.parameters(), max_grad_norm=0.1, ema_decay=0.5)
        for step in range(3):
            model(torch.full((2, 5), step + 1.0)).square().sum().backward()
            torch.set_default_device(device)
            try:
                optimizer.step()
            finally:
                torch.set_default_device(None)
        models.append([*model.parameters(), *optimizer.state[model.weight].values()])
    for one, other in zip(*models, strict=True):
        assert torch.equal(one, other)


# ---- Private names -------------------------------------------------------------------

# Of attention: the kernels refuse, with the name as the reason, or compute as usual.
NEEDED = [
    "_subclasses.fake_tensor.FakeTensor",
    "_subclasses.functional_tensor.FunctionalTensor",
    "_C._functorch.is_batchedtensor",
    "_C._functorch.is_legacy_batchedtensor",
    "_C._functorch.maybe_current_level",
    "_C._len_torch_dispatch_stack",
    "autograd.forward_ad._current_level",
]
REPLACED = [
    "_C._increment_version",
    "_C._cuda_getCurrentRawStream",
    "_C._is_any_autocast_enabled",
    "_C._is_tracing",
    "_C._storage_Use_Count",
    "_C._len_torch_function_stack",
    "library.get_kernel",
]
WITHOUT = """
import os, sys
import torch, trainfast

def owner_of(path):
    owner = torch
    for name in path.split(".")[:-1]:
        owner = getattr(owner, name)
    return owner, path.rpartition(".")[2]

def run(path):
    owner, name = owner_of(path)
    kept = vars(owner).pop(name, None)
    import trainfast.torch as adapters
    if kept is not None:  # torch itself needs some of them
        setattr(owner, name, kept)
    model = torch.nn.Linear(4, 4)
    optimizer = adapters.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    adapters.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    wanted, = torch.autograd.grad(expected.sum(), q)
    for function in (adapters.scaled_dot_product_attention, adapters.attention):
        out = function(q, q, q, is_causal=True)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), q)[0], wanted)
    report = trainfast.stats()
    trainfast.patch()
    torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
    print(path, *report.calls, *report.fallbacks.get("attention", {}), sep="; ")

torch.set_num_threads(1)  # so that children can be forked
for path in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        run(path)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, path
"""


@pytest.mark.slow
def test_attention_is_torchs_where_a_private_name_is_missing():
    assert python(WITHOUT, *NEEDED).splitlines() == [
        f"{path}; adamw; clip; torch {torch.__version__} has no {path}"
        for path in NEEDED
    ]


@pytest.mark.slow
def test_kernels_run_where_a_private_name_has_another_in_its_place():
    assert python(WITHOUT, *REPLACED).splitlines() == [
        f"{path}; adamw; attention; clip" for path in REPLACED
    ]


def test_steps_are_kept_from_compilers_without_torchs_private_name(monkeypatch):
    monkeypatch.delattr(torch, "_disable_dynamo")
    names = runpy.run_path(private.__file__)
    assert names["disable_dynamo"] is torch.compiler.disable
