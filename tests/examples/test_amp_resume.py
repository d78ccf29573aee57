"""examples/amp_resume.py: killed and resumed it ends with the same bits, and options of
AdamW that change no arithmetic change no loss."""

import contextlib
import functools
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch.nn.functional import cross_entropy  # noqa: E402

pytestmark = pytest.mark.slow  # in all, half a minute

FOLDER = Path(__file__).parents[2] / "examples"
SHORT = ["--device", "cpu", "--steps", "12", "--save-every", "4", "--accumulate", "3"]
OVERFLOWS = (3, 9)  # steps, from 0: the last before a checkpoint, and one after it
LAYOUTS = [
    ["--dtype", "bfloat16"],
    ["--dtype", "float16", "--state-dtype", "bfloat16"],
]


def prepare(example):
    """Makes steps overflow and the loss scale grow, as they do in a longer run, and
    validates on few batches."""
    torch.set_num_threads(1)  # tensors this small are slower on more
    loss, example.GROWTH_INTERVAL = example.Training.loss, 2

    def overflowing(run, *crop):
        done = len(run.losses)
        return loss(run, *crop) * (float("inf") if done in OVERFLOWS else 1.0)

    example.Training.loss = overflowing
    validate = example.Training.validate
    example.Training.validate = lambda run: validate(run, batches=2)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_a_backward_pass(example):
    """In the second of the three that make up the seventh step."""
    loss = example.Training.loss

    def loss_or_end(run, *crop):
        result = loss(run, *crop)
        if len(run.losses) == 6 and run.accumulator._waiting == 1:
            result.register_hook(die)
        return result

    example.Training.loss = loss_or_end


def kill_in_a_save(example):
    """Half-way through the file of the second checkpoint."""
    save = example.torch.save

    def save_or_end(state, path):
        save(state, path)
        if len(state["losses"]) == 8:
            path.write_bytes(path.read_bytes()[:1000])
            die()

    example.torch.save = save_or_end


@contextlib.contextmanager
def imported():
    """The example, on one thread and with a corpus that is read once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        for name in ("amp_resume", "small_gpt"):
            patch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module("amp_resume")
        patch.setattr(module, "Corpus", functools.cache(module.Corpus))
        yield module
    torch.set_num_threads(threads)


@pytest.fixture
def example():
    with imported() as module:
        yield module


def run_until_killed(arguments, kill):
    """In a process of its own, which ends by SIGKILL: nothing is tidied up."""
    code = (
        "import sys\n"
        f"sys.path[:] = [{str(FOLDER)!r}, *sys.path, {str(FOLDER.parent)!r}]\n"
        "import amp_resume\n"
        "from tests.examples import test_amp_resume as test\n"
        f"test.prepare(amp_resume)\ntest.{kill.__name__}(amp_resume)\n"
        f"amp_resume.main({arguments!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    return done.stdout


def assert_same_bits(one, other, where=""):
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_same_bits(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_same_bits(*pair, f"{where}[{i}]")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), where
    else:
        assert one == other, where


@pytest.mark.parametrize(
    "layout, kill",
    [(LAYOUTS[0], kill_in_a_backward_pass), (LAYOUTS[1], kill_in_a_save)],
)
def test_killed_and_resumed_run_has_the_bits_of_a_whole_one(
    example, tmp_path, layout, kill
):
    prepare(example)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    example.main([*SHORT, *layout, "--out", str(whole)])
    printed = run_until_killed([*SHORT, *layout, "--out", str(parts)], kill)
    assert "step     4" in printed and "step     8" not in printed
    resumed = example.main([*SHORT, *layout, "--out", str(parts), "--resume"])

    one, other = (
        torch.load(folder / "checkpoint.pt", weights_only=True)
        for folder in (whole, parts)
    )
    assert_same_bits(one, other)
    # and the run was one in which all of it moved; in float16 more may overflow
    state = one["optimizer"]["state"][0]
    steps = float(state["step"])
    assert steps == 10 if "bfloat16" in layout[:2] else 5 < steps <= 10
    assert one["schedule"]["last_epoch"] == steps
    assert one["scaler"]["scale"] != 65536 or "float16" in layout
    assert one["accumulator"] == {"steps_done": 12}
    assert not torch.equal(state["ema"], one["model"]["characters.weight"])
    assert one["losses"].isinf().nonzero().flatten().tolist() == list(OVERFLOWS)
    assert len(one["losses"]) == 12
    assert resumed.scaler.get_scale() == one["scaler"]["scale"]


def test_resuming_without_a_checkpoint_begins_anew(example, capsys, tmp_path):
    arguments = [*SHORT, "--steps", "2", "--out", str(tmp_path)]
    first = example.main([*arguments, "--resume"])
    assert "goes on" not in capsys.readouterr().out
    again = example.main([*arguments, "--resume"])  # there is nothing left to do
    assert "goes on after step 2\nvalidation loss" in capsys.readouterr().out
    assert again.losses == first.losses


# ---- What the options do to the loss -------------------------------------------------


def final_loss(example, folder, *arguments, batches=32, **options):
    """The training losses and the validation loss after them, of so many batches."""
    arguments = ["--device", "cpu", "--accumulate", "1", *arguments]
    args = example.parse([*arguments, "--out", str(folder)])
    run = example.Training(example.Corpus(), args, **options)
    run.train()
    return torch.stack(run.losses).tolist(), run.validate(batches)


def float32_loss(run, x, y):
    """Without autocast, which is emulated on many CPUs and takes ten times as long."""
    return cross_entropy(run.model(x).flatten(0, 1), y.flatten())


@pytest.mark.parametrize("seed", ["1", "2"])
def test_bfloat16_state_ends_within_a_percent_of_float32(
    example, monkeypatch, tmp_path, seed
):
    monkeypatch.setattr(example.Training, "loss", float32_loss)
    arguments = ["--steps", "250", "--save-every", "250", "--seed", seed]
    losses, exact = final_loss(example, tmp_path, *arguments)
    rounded, coarse = final_loss(
        example, tmp_path, *arguments, "--state-dtype", "bfloat16"
    )
    assert exact < losses[0] - 1.5  # it did learn
    assert rounded != losses
    assert coarse == pytest.approx(exact, rel=0.01)


PLAIN = dict(max_grad_norm=None, ema_decay=None, zero_grad=False)


def short_losses(folder, **options):
    with imported() as example, pytest.MonkeyPatch.context() as patch:
        # without max_grad_norm there is no norm to report
        patch.setattr(example.Training, "report", lambda run: "")
        arguments = ["--steps", "20", "--save-every", "20"]
        return final_loss(example, folder, *arguments, batches=4, **PLAIN | options)


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory):
    return short_losses(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    "options",
    [
        dict(max_grad_norm=float("inf")),
        dict(ema_decay=0.9),
        dict(zero_grad=True),
        dict(write_back_grads=True),
        dict(master_weights=True),  # the parameters are float32
        dict(weight_copy_dtype=torch.bfloat16),
        dict(max_grad_norm=float("inf"), ema_decay=0.9, zero_grad=True),
    ],
    ids="+".join,
)
def test_exact_options_change_no_loss(plain_losses, tmp_path, options):
    assert short_losses(tmp_path, **options) == plain_losses


def test_option_that_is_not_exact_changes_the_loss(plain_losses, tmp_path):
    clipped = short_losses(tmp_path, max_grad_norm=0.1)
    assert len(clipped[0]) == len(plain_losses[0]) == 20
    assert clipped != plain_losses
