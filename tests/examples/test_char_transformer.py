"""examples/char_transformer.py: runs, resumes, and all optimizers learn the same."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

import trainfast  # noqa: E402
from trainfast.stats import count_fallback  # noqa: E402

SCRIPT = Path(__file__).parents[2] / "examples" / "char_transformer.py"
TINY = ["--preset", "tiny", "--device", "cpu"]
TORCHS = torch.nn.functional.scaled_dot_product_attention
NAMES = {
    "torch": "torch-AdamW",
    "fused": "torch-fused-AdamW",
    "ours": "trainfast-AdamW",
    "amp": "AMP,-torch",
    "our amp": "AMP,-trainfast",
    "attention": "AdamW-+-attention",
    "amp attention": "AMP-+-attention",
}


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    for name in ("char_transformer", "small_gpt"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower on more
    yield importlib.import_module("char_transformer")
    torch.set_num_threads(threads)


def load(folder, who):
    return torch.load(folder / f"{NAMES[who]}.pt", weights_only=True)


@pytest.mark.slow
def test_example_trains_all_alike_and_writes_its_files(tmp_path):
    command = [sys.executable, SCRIPT, *TINY, "--steps", "50", "--out", tmp_path]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=one_thread)
    assert (done.returncode, done.stderr) == (0, "")
    for name in NAMES.values():
        assert f"\n{name.replace('-', ' ')} " in done.stdout
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")

    runs = {who: load(tmp_path, who) for who in NAMES}
    losses = {who: state["losses"] for who, state in runs.items()}
    assert len(losses["ours"]) == 50
    assert losses["ours"][-1] < losses["ours"][0] - 1
    assert losses["ours"] == pytest.approx(losses["fused"], rel=1e-4)
    assert losses["ours"] == pytest.approx(losses["torch"], rel=1e-4)
    assert losses["attention"] == pytest.approx(losses["ours"], rel=1e-5)
    # bfloat16 forward and backward: near the others, and one another's equal
    assert losses["amp attention"] == pytest.approx(losses["our amp"], rel=1e-2)
    assert losses["our amp"] == pytest.approx(losses["amp"], rel=1e-2)
    assert losses["our amp"] == pytest.approx(losses["ours"], rel=5e-2)
    steps, validation = zip(*runs["ours"]["validation"], strict=True)
    assert steps == (25, 50) and validation[-1] < validation[0]


@pytest.mark.slow
def test_example_resumes_as_if_it_had_not_been_stopped(example, monkeypatch, tmp_path):
    kinds = ["torch-fused", "trainfast", "amp-trainfast-attention"]
    arguments = [*TINY, "--optimizers", *kinds, "--out"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    example.main([*arguments, str(whole)])

    saved, iterations = [], []
    save, iteration = example.Run.save, example.Run.iteration

    def save_thrice(run):
        save(run)
        saved.append(run)
        if len(saved) == 4:  # torch's run is at 50 then, trainfast's two at 25
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(example.Run, "save", save_thrice)
        with pytest.raises(SystemExit, match="--resume"):
            example.main([*arguments, str(parts)])
    assert len(load(parts, "fused")["losses"]) == 50
    assert len(load(parts, "ours")["losses"]) == 25

    def count(run):
        iterations.append(run)
        return iteration(run)

    monkeypatch.setattr(example.Run, "iteration", count)
    example.main([*arguments, str(parts), "--resume"])
    assert len(iterations) == 25 + 50 + 50
    for who in ("fused", "ours", "amp attention"):
        one, two = load(whole, who), load(parts, who)
        assert one["losses"] == pytest.approx(two["losses"], rel=1e-5)
        assert one["validation"] == [
            (step, pytest.approx(loss, rel=1e-5)) for step, loss in two["validation"]
        ]
        assert one["schedule"] == two["schedule"]


def test_example_resumed_at_its_end_prints_the_losses_again(example, capsys, tmp_path):
    arguments = [*TINY, "--optimizers", "trainfast", "--steps", "5"]
    arguments += ["--out", str(tmp_path)]
    example.main(arguments)
    first = capsys.readouterr().out
    example.main([*arguments, "--resume"])
    again = capsys.readouterr().out
    row = next(line for line in first.splitlines() if line.startswith("trainfast"))
    assert f"\n{row.split()[0]} AdamW" in again
    table = again.splitlines()[2].split()
    assert table[2:6] == ["-"] * 4
    assert table[6:] == first.splitlines()[3].split()[6:]


def test_example_switches_attention_for_the_rows_that_say_so(
    example, capsys, tmp_path, kernels_at_any_size
):
    arguments = [*TINY, "--steps", "5", "--out", str(tmp_path)]
    for kinds, runs in ((["trainfast"], 0), (["trainfast", "trainfast-attention"], 1)):
        trainfast.reset_stats()
        example.main([*arguments, "--optimizers", *kinds])
        calls = trainfast.stats().calls.get("attention", {})
        # two layers: five iterations and 16 batches of validation; generate()
        assert sum(calls.values()) == runs * 2 * (5 * 2 + 16 + 400)
        assert trainfast.stats().fallbacks.get("attention") is None
        assert torch.nn.functional.scaled_dot_product_attention is TORCHS
        printed = capsys.readouterr().out
        assert ("AdamW + attention trainfast AdamW" in printed) == bool(runs)


def test_example_says_when_torchs_attention_ran_instead(example, capsys):
    trainfast.reset_stats()
    count_fallback("attention", "device moon")
    example.print_differences([])
    assert "instead of trainfast's 1 times: device moon" in capsys.readouterr().out
    trainfast.reset_stats()


@pytest.mark.parametrize(
    ("processor", "preset", "amp"),
    [("AVX2", "small", 0), ("AVX2", "tiny", 3), ("AVX512", "small", 3)],
)
def test_amp_is_left_out_where_bfloat16_is_emulated(
    example, monkeypatch, capsys, processor, preset, amp
):
    monkeypatch.setattr(example, "get_cpu_capability", lambda: processor)
    chosen = example.parse(["--device", "cpu", "--preset", preset]).optimizers
    assert sum(name.startswith("amp") for name in chosen) == amp
    assert ("torch emulates bfloat16" in capsys.readouterr().out) == (amp == 0)
    named = ["--device", "cpu", "--preset", preset, "--optimizers", "amp-torch"]
    assert example.parse(named).optimizers == ["amp-torch"]


def test_example_refuses_an_unknown_optimizer(example, capsys):
    with pytest.raises(SystemExit) as stop:
        example.main(["--optimizers", "sgd"])
    assert stop.value.code == 2
    assert "sgd" in capsys.readouterr().err
