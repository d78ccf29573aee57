"""examples/policy_gradient.py: its environment and advantages, the reward rises, and a
resumed run goes on with the same bits."""

import importlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("psutil")

SCRIPT = Path(__file__).parents[2] / "examples" / "policy_gradient.py"
SMALL = ["--device", "cpu", "--batch", "8192", "--rounds", "2"]


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.delitem(sys.modules, "policy_gradient", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module("policy_gradient")
    torch.set_num_threads(threads)


# ---- The environment -----------------------------------------------------------------


def textbook_step(x, v, angle, turning, force):
    """One Euler step of a cart of 1 kg with a pole of 0.1 kg and 1 m."""
    mass, half = 1.1, 0.5
    share = (force + 0.1 * half * turning**2 * math.sin(angle)) / mass
    spin = (9.8 * math.sin(angle) - math.cos(angle) * share) / (
        half * (4 / 3 - 0.1 * math.cos(angle) ** 2 / mass)
    )
    pull = share - 0.1 * half * spin * math.cos(angle) / mass
    return (
        *(x + 0.02 * v, v + 0.02 * pull),
        *(angle + 0.02 * turning, turning + 0.02 * spin),
    )


def test_carts_move_as_in_the_textbook(example):
    carts = example.CartPoles(5, torch.Generator().manual_seed(0))
    expected = carts.state.double().tolist()
    for step in range(8):
        pushes = torch.tensor([(i + step) % 2 for i in range(5)])
        ended, _ = carts.step(pushes)
        forces = [10.0 if push else -10.0 for push in pushes.tolist()]
        expected = [
            textbook_step(*state, force)
            for state, force in zip(expected, forces, strict=True)
        ]
        assert not ended.any()
        for state, truth in zip(carts.state.tolist(), expected, strict=True):
            assert state == pytest.approx(truth, abs=1e-5)


def test_episode_ends_with_the_pole_and_starts_anew(example):
    carts = example.CartPoles(4, torch.Generator().manual_seed(0))
    for step in range(1, 20):
        ended, lengths = carts.step(torch.ones(4))
        assert torch.equal(lengths, ended * step)
        if ended.any():
            break
    assert 5 < step < 15  # pushed to one side all the time, it falls at once
    assert carts.state[ended].abs().max() <= 0.05
    assert (carts.lengths[ended] == 0).all() and (carts.lengths[~ended] == step).all()


def test_episode_of_a_good_policy_ends_at_its_longest(example):
    carts = example.CartPoles(4, torch.Generator().manual_seed(0))
    for _ in range(example.LONGEST):
        _, _, angle, turning = carts.state.unbind(1)
        ended, lengths = carts.step((angle + turning > 0).float())
    assert ended.any() and lengths.max() == example.LONGEST


def test_advantages_are_the_discounted_surprises(example):
    torch.manual_seed(0)
    values, last = torch.rand(6, 3), torch.rand(3)
    ended = (torch.rand(6, 3) < 0.3).float()
    found = example.advantages_of(values, ended, last)
    ahead = torch.cat([values[1:], last[None]])
    surprises = 1 + example.DISCOUNT * ahead * (1 - ended) - values
    for t in range(6):
        expected, weight = torch.zeros(3), torch.ones(3)
        for later in range(t, 6):
            expected += weight * surprises[later]
            weight = weight * example.DISCOUNT * example.TRACE * (1 - ended[later])
        assert torch.allclose(found[t], expected, atol=1e-5)


# ---- Training and tables -------------------------------------------------------------


@pytest.mark.slow
def test_reward_rises_before_and_after_and_the_table_adds_up(example, tmp_path):
    options = ["--iterations", "16", "--out", str(tmp_path)]
    batches, learners = example.main([*SMALL, *options])
    for learner in learners:
        assert learner.rewards[0] < 30
        assert learner.rewards[-1] > 2.5 * learner.rewards[0]
    before, after = learners
    # the same but for roundings, until they change an action
    assert after.rewards[:2] == pytest.approx(before.rewards[:2], rel=0.02)
    assert [row[:2] for row in batches.rows] == [("ci", 1024), ("debug", 8192)]
    for _, _, torchs, ours, times, estimated, used in batches.rows:
        assert float(times) == pytest.approx(ours / torchs, abs=0.006)
        assert 0 < used < 4096 and 0 < estimated < 4096
    assert batches.rows[1][5] >= batches.rows[0][5]
    rows = example.training_table(learners).rows
    assert [row[0] for row in rows] == ["before", "after"]
    assert [row[2] for row in rows] == [16, 16]
    assert rows[1][5] == round(after.rewards[-1], 1)


def test_resumed_run_goes_on_with_the_same_bits(example, capsys, tmp_path):
    arguments = ["--device", "cpu", "--batch", "1024", "--rounds", "1"]
    arguments += ["--save-every", "2", "--iterations"]
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    _, expected = example.main([*arguments, "6", "--out", whole])
    example.main([*arguments, "4", "--out", parts])
    capsys.readouterr()
    _, resumed = example.main([*arguments, "6", "--out", parts, "--resume"])
    assert "goes on after iteration 4\n" in capsys.readouterr().out
    for one, other in zip(expected, resumed, strict=True):
        assert len(one.seconds) == 6 and len(other.seconds) == 2
        assert one.rewards == other.rewards
        assert torch.equal(one.environments.state, other.environments.state)
        weights = other.policy.state_dict()
        for name, value in one.policy.state_dict().items():
            assert torch.equal(value, weights[name])


@pytest.mark.slow
def test_script_prints_its_tables(tmp_path):
    command = [sys.executable, SCRIPT, "--device", "cpu", "--batch", "1024"]
    command += ["--rounds", "2", "--iterations", "2", "--out", tmp_path]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Batch by device, on cpu\n" in done.stdout
    assert "\nci        1024 " in done.stdout
    for name in ("before", "after", "process.memory MiB"):
        assert f"\n{name} " in done.stdout
