"""Blocks of steps, with a clock that the test moves: nothing trains here."""

import pytest

from trainfast.torch.probe import schedule
from trainfast.torch.probe.loop import Loop, Switch
from trainfast.torch.probe.schedule import Schedule


class Fast(Switch):
    name = "fast"


@pytest.fixture
def run(monkeypatch):
    """Runs a plan in which a step takes so many seconds under each switch; returns the
    plan, and the steps that each block has measured."""
    now = [0.0]
    monkeypatch.setattr(schedule, "clock", lambda: now[0])

    def run(seconds, rounds=4):
        ended = []
        loop, switch = Loop("script.py"), Fast()
        plan = Schedule(
            loop, [switch], rounds, 1e9, 0, lambda: None, lambda: ended.append(True)
        )
        measured, since = [], 0
        while not ended:
            now[0] += seconds[loop.switch.name]
            loop.steps += 1
            before = len(plan.blocks)
            plan.step_ended()
            if len(plan.blocks) > before:
                measured.append((plan.blocks[-1][1], loop.steps - since - 1))
            if plan.entered == loop.steps:
                since = loop.steps
        return plan, measured

    return run


def test_a_block_under_a_fast_switch_lasts_as_long_as_one_without(run):
    plan, measured = run({"base": 0.012, "fast": 0.005})
    assert plan.steps == 10
    assert set(measured) == {("base", 10), ("fast", 30)}  # whole multiples of 10
    times = {(name, round(took, 6)) for _, name, took, _ in plan.blocks}
    assert times == {("base", 0.012), ("fast", 0.005)}


def test_a_block_has_no_more_than_forty_steps(run):
    _, measured = run({"base": 0.012, "fast": 1e-5})
    assert set(measured) == {("base", 10), ("fast", 40)}


@pytest.mark.parametrize("seconds", [0.05, 0.012, 0.007])
def test_a_switch_that_is_not_twice_as_fast_has_as_many_steps_as_the_base(run, seconds):
    _, measured = run({"base": 0.012, "fast": seconds})
    assert set(measured) == {("base", 10), ("fast", 10)}


def test_steps_before_a_switch_has_settled_do_not_count(run, monkeypatch):
    monkeypatch.setattr(Fast, "settle", 0.15)
    _, measured = run({"base": 0.012, "fast": 0.0052})
    assert set(measured) == {("base", 10), ("fast", 28 + 30)}  # one was warm-up
    _, measured = run({"base": 0.4, "fast": 0.3})
    assert set(measured) == {("base", 2), ("fast", 2)}
