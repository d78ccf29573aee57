"""Gains from times that are known: no script runs here."""

import random

import pytest

from trainfast.probe.diagnosis import _left_out
from trainfast.probe.findings import CURES, Row, findings, rows
from trainfast.probe.gains import Gain, Process, Sample, interval, noise, over_processes
from trainfast.probe.report import conclude


def result(ratios, *, step=0.01, spread=0.02, rounds=9, seed=0, **more):
    """What a child reports whose switches change a step's time by these ratios."""
    draw = random.Random(seed)
    blocks = []
    for number in range(rounds):
        for name, ratio in {"base": 1.0, **ratios}.items():
            took = step * ratio * draw.gauss(1, spread)
            blocks.append([number, name, took, took / 2])
            if name == "base":
                blocks.append([number, name, step * draw.gauss(1, spread), step / 2])
    empty = {"events": [], "runs": [[0, 100, False]], "steps": 100, "lines": {}}
    facts = {
        "block_steps": 10,
        "steps_under": {},
        "dense_embeddings": 0.0,
        "failed": {},
        "once": {},
    }
    return {**empty, **facts, "blocks": blocks, **more}


STATEMENT = {"number": 0, "line": 5, "text": "f()", "kind": "statement", "own": 1.0}


def gains_of(*results):
    return {row.name: row.gain for row in rows(list(results))}


def test_gain_of_a_switch_is_the_ratio_and_inside_its_interval():
    found = gains_of(result({"data": 0.5}), result({"data": 0.5}, seed=1))["data"]
    assert found.low < 2 < found.high
    assert found.gain == pytest.approx(2, rel=0.03)
    assert found.high - found.low < 0.15


def test_interval_covers_the_disagreement_of_processes():
    one = gains_of(result({"data": 0.5}, seed=1))["data"]
    both = gains_of(result({"data": 0.5}, seed=1), result({"data": 0.8}, seed=2))[
        "data"
    ]
    assert both.low < 1.35 and both.high > 1.9
    assert both.high - both.low > 2 * (one.high - one.low)


def test_slow_drift_does_not_change_a_gain():
    """Each round is slower than the one before it: ratios are formed in rounds."""
    drifting = result({"data": 0.5}, spread=0.001)
    for block in drifting["blocks"]:
        block[2] *= 1 + 0.2 * block[0]
    assert gains_of(drifting)["data"].gain == pytest.approx(2, rel=0.02)


def test_skewed_noise_gains_nothing():
    """One block in three is twice as slow, of a switch as of the base."""
    draw = random.Random(2)
    skewed = result({"threads": 1.0}, spread=0.05, rounds=300)
    for block in skewed["blocks"]:
        block[2] *= 2 if draw.random() < 1 / 3 else 1
    assert gains_of(skewed)["threads"].gain == pytest.approx(1, abs=0.01)


def test_times_of_a_statement_that_runs_very_often_are_drawn_in_chunks():
    """As one of a loop that collects experience for thousands of turns."""
    times = [1e-5 * (1 + i % 7) for i in range(100_003)]
    events = [
        ["statement 0", seconds, 1 + i // 1001] for i, seconds in enumerate(times)
    ]
    played = result({}, spread=0, events=events, statements=[STATEMENT])
    drawn, rate = Process.of(played).costs["statement 0"]
    assert len(drawn) == 64
    assert sum(drawn) / 64 == pytest.approx(sum(times) / len(times), rel=1e-3)
    assert rate == pytest.approx(1000.03)
    assert Process.of(result({}, events=[])).costs == {}


def test_interval_over_processes_is_that_of_student():
    """Gains of 1 and 4: a mean of 2, and a standard error of log 2."""
    pair = [result({"data": r}, spread=0, rounds=3) for r in (1.0, 0.25)]
    processes = [Process.of(one) for one in pair]
    found = over_processes(processes, lambda s: s.gain_of_switch("data"))
    assert found.gain == pytest.approx(2)
    assert found.high / found.gain == pytest.approx(2**12.71)
    assert found.gain / found.low == pytest.approx(2**12.71)
    one = over_processes(processes[:1], lambda s: s.gain_of_switch("data"))
    assert one is None


def test_rare_event_costs_its_time_by_its_frequency():
    """A save of 1 s every 50 steps of 10 ms takes two thirds of the time."""
    events = [["save", 1.0, step] for step in (50, 100)]
    found = gains_of(result({"data": 1.0}, events=events))
    assert found["save"].gain == pytest.approx(3, rel=0.05)


def test_workers_start_in_every_epoch_although_few_starts_are_seen():
    """Blocks without a loader may hold all other epochs' ends."""
    seen = [["worker-start", 0.5, 0], ["worker-start", 0.5, 70]]
    child = result({}, spread=0.001, steps=700, events=seen, period=70)
    gain = gains_of(child)["worker-start"].gain
    assert gain == pytest.approx((0.7 + 0.5) / 0.7, rel=0.02)


def test_event_at_the_end_of_a_whole_run_counts():
    """Two runs of 40 steps, each with one evaluation of 0.4 s."""
    events = [["evaluation", 0.4, 40], ["evaluation", 0.4, 80]]
    runs = [[0, 40, True], [40, 80, True], [80, 100, False]]
    found = gains_of(result({}, events=events, runs=runs))
    assert found["evaluation"].gain == pytest.approx(2, rel=0.05)


def test_events_lessen_the_gain_of_a_switch():
    """Half of the time is a save, so doubling the speed of steps gives 4/3."""
    events = [["save", 0.01, step] for step in range(1, 101)]
    found = gains_of(result({"data": 0.5}, events=events))
    assert found["data"].gain == pytest.approx(4 / 3, rel=0.03)
    assert found["save"].gain == pytest.approx(2, rel=0.03)


def test_without_saves_the_steps_between_them_are_faster_too():
    """A save of 10 ms in every second step of 10 ms; steps without saves take 8 ms."""
    events = [["save", 0.01, step] for step in range(2, 81, 2)]
    left_out = {"events": events, "steps_under": {"save": 20}}
    found = gains_of(result({"save": 0.8}, **left_out))
    assert found["save"].gain == pytest.approx(15 / 8, rel=0.03)
    whole = result({"save": 0.8}, **left_out, runs=[[0, 100, True]])
    assert gains_of(whole)["save"].gain == pytest.approx(15 / 8, rel=0.03)


def test_event_before_the_first_step_is_preparation():
    assert "save" not in gains_of(result({}, events=[["save", 5.0, 0]])) or (
        gains_of(result({}, events=[["save", 5.0, 0]]))["save"].gain == 1
    )


def test_statement_under_its_own_skip_is_not_counted_as_rare():
    """It ran in each of the 60 steps in which it was not skipped, for half of them."""
    events = [["statement 0", 0.005, step] for step in range(1, 61)]
    timed = {"steps_under": {"statement 0": 40}, "statements": [STATEMENT]}
    skipped = result({}, events=events, **timed)
    assert gains_of(skipped)["statement 0"].gain == pytest.approx(2, rel=0.05)


def test_rare_statement_is_no_part_of_a_typical_step():
    """1 s every 50 steps of 10 ms; one process has no stopwatch."""
    events = [["statement 0", 1.0, step] for step in (50, 100)]
    timed = result({}, events=events, statements=[STATEMENT], seed=1)
    found = gains_of(result({}), timed)["statement 0"]
    assert found.gain == pytest.approx(3, rel=0.05)


def test_statement_of_every_whole_epoch_is_part_of_every_block():
    """0.05 s in each block of 10 steps of 10 ms: half of their time."""
    events = [["statement 0", 0.05, step] for step in range(10, 101, 10)]
    found = gains_of(result({}, events=events, statements=[STATEMENT]))["statement 0"]
    assert found.gain == pytest.approx(2, rel=0.05)


def test_statement_that_only_saves_is_the_save():
    events = [["save", 1.0, 50], ["statement 0", 1.0, 50]]
    events += [["save", 1.0, 100], ["statement 0", 1.0, 100]]
    statement = {**STATEMENT, "kind": "save", "own": 0.0}
    found = gains_of(result({}, events=events, statements=[statement]))
    assert set(found) == {"save"}
    assert found["save"].gain == pytest.approx(3, rel=0.05)


def test_save_costs_all_of_its_statement():
    """Of a step of 20 ms the save takes 8, and copying the weights for it 2."""
    of_a_save = STATEMENT | {"kind": "save", "own": 0.2}
    seen = [["save", 0.008, i] for i in range(1, 101)]
    seen += [["statement 0", 0.01, i] for i in range(1, 101)]
    watched = result({}, spread=0, step=0.012, events=seen, statements=[of_a_save])
    unwatched = result({}, spread=0, step=0.012, events=seen[:100])
    assert gains_of(unwatched)["save"].gain == pytest.approx(20 / 12)
    assert gains_of(watched, unwatched)["save"].gain == pytest.approx(2)
    saved_less = result({"save": 0.9}, spread=0, step=0.012, events=seen[:100])
    assert gains_of(watched, saved_less)["save"].gain == pytest.approx(20 / 8.8)


def test_rare_evaluation_is_told_alike_by_processes_that_did_not_time_its_statement():
    """1 s every 50 steps of 10 ms, in a statement that takes 0.8 s more."""
    seen = [["evaluation", 1.0, step] for step in (50, 100)]
    timed = [*seen, *(["statement 0", 1.8, step] for step in (50, 100))]
    statement = STATEMENT | {"kind": "evaluation", "own": 0.8 / 1.8}
    watched = result({}, spread=0, events=timed, statements=[statement])
    unwatched = result({}, spread=0, events=seen)
    found = gains_of(watched, unwatched)["evaluation"]
    assert 1.5 < found.low <= found.gain <= found.high < 4.7  # 46 ms to 10 at most


def test_doubled_batch_gains_what_does_not_grow():
    """A doubled batch takes 1.2 times the time of a single one: 2 / 1.2."""
    found = gains_of(result({"data": 1.0, "batch": 1.2}))["batch"]
    assert found.gain == pytest.approx(2 / 1.2, rel=0.03)


def test_doubled_batch_waits_twice_as_long():
    """Of 10 ms a step 4 are the loader's: 6 * 1.0 + 2 * 4 = 14 for two batches."""
    found = gains_of(result({"data": 0.6, "batch": 0.6}))["batch"]
    assert found.gain == pytest.approx(20 / 14, rel=0.03)


def test_doubled_batch_without_a_loader_waits_for_nothing():
    found = gains_of(result({"batch": 1.2}))["batch"]
    assert found.gain == pytest.approx(2 / 1.2, rel=0.03)
    small = {"batch": 1.2, "threads": 0.8}
    both = found_in(result(small), result(small, seed=1))
    assert [finding.id for finding in both] == ["batch", "threads"]


def test_noise_is_the_spread_of_the_base():
    quiet, loud = result({}, spread=0.01), result({}, spread=0.3, rounds=30)
    assert noise([Process.of(quiet)]) < 1.1
    assert noise([Process.of(quiet), Process.of(loud)]) > 1.3


def test_statistic_of_nothing_is_none():
    nothing = Process.of(result({}))
    assert interval([nothing], lambda sample: sample.gain_of_switch("data")) is None
    assert Sample([nothing], None).ratio("data") is None


# ---- Findings ------------------------------------------------------------------------


def found_in(*results):
    return findings(rows(list(results)), list(results), "train.py")


def test_bound_of_a_statement_has_its_share_of_the_backward_pass():
    """A fifth of a step, and as much again in the backward pass."""
    events = [["statement 0", 0.0025, step] for step in range(1, 100)]
    loss = {**STATEMENT, "own": 0.0, "backward": 1.0}
    one = result({}, spread=0.001, events=events, statements=[loss])
    (found,) = found_in(one)
    total = 0.01  # the blocks hold the statement
    assert found.gain == pytest.approx(1 / (1 - 2 * 0.0025 / total), rel=0.03)
    assert found.low <= found.gain <= found.high and not found.exact


def test_skipped_statement_has_left_out_its_share_of_the_backward_pass():
    loss = {**STATEMENT, "backward": 1.0}
    both = (result({"statement 0": 0.6}, seed=s, statements=[loss]) for s in (0, 1))
    (found,) = found_in(*both)
    assert found.gain == pytest.approx(1 / 0.6, rel=0.03)


def test_nothing_is_found_in_a_loop_that_has_nothing():
    ratios = {"data": 0.95, "fused optimizer": 0.99, "threads": 1.01}
    assert found_in(result(ratios), result(ratios, seed=1)) == []


def test_compiling_is_told_with_the_steps_that_pay_it_back():
    """20 s of compiling; each step of 10 ms saves 5 ms: 4,000 steps."""
    compiled = result({"compile": 0.5}, spread=1e-4, step_seconds=0.01)
    (found,) = found_in(compiled | {"once": {"compile": 20.0}})
    assert found.exact
    assert found.fix.startswith("torch.compile(model): it compiles for 20 s, which ")
    steps = float(found.fix.rpartition("which ")[2].split()[0])
    assert steps == pytest.approx(4000, rel=0.02)


def test_gain_without_certainty_is_no_finding():
    wild = {"spread": 0.6, "rounds": 4}
    assert found_in(result({"threads": 0.85}, **wild)) == []


def test_best_finding_comes_first_with_its_place():
    lines = {"save": [12], "data": [8]}
    events = [["save", 0.01, step] for step in range(1, 101)]
    report = found_in(result({"data": 0.6}, events=events, lines=lines))
    assert [(f.id, f.line, f.exact) for f in report] == [
        ("save", 12, False),
        ("data", 8, False),
    ]
    assert report[0].to_dict()["gain"] == pytest.approx(2, rel=0.05)


def test_cure_replaces_the_bound_of_the_same_cause():
    own = {"own_optimizer": True}
    ratios = {"no optimizer step": 0.4, "trainfast optimizer": 0.5}
    report = found_in(result(ratios, **own), result(ratios, seed=1, **own))
    assert [(f.id, f.exact) for f in report] == [("optimizer", True)]


def test_workers_replace_the_bound_of_data_where_they_give_most_of_it():
    few = result({"data": 0.25, "workers 2": 0.4})
    assert [f.id for f in found_in(few)] == ["workers"]
    little = result({"data": 0.25, "workers 2": 0.8})
    assert [f.id for f in found_in(little)] == ["data", "workers"]


def test_processes_that_disagree_give_no_finding():
    gains, nothing = result({"threads": 0.55}), result({"threads": 1.0}, seed=1)
    assert found_in(gains)
    assert not found_in(gains, nothing)


def test_cure_gains_no_more_than_its_bound():
    ratios = {"no optimizer step": 0.8, "trainfast optimizer": 0.5}
    (report,) = found_in(result(ratios), result(ratios, seed=1))
    assert report.gain == pytest.approx(1.25, rel=0.03)


def test_optimizer_of_torch_without_a_cure_is_no_finding():
    ratios = {"no optimizer step": 0.5}
    assert found_in(result(ratios), result(ratios, seed=1)) == []


def test_batch_is_found_only_where_a_step_has_a_fixed_cost():
    grows = result({"data": 1.0, "batch": 1.7})
    fixed = result({"data": 1.0, "batch": 1.1})
    assert found_in(grows) == []
    assert [f.id for f in found_in(fixed)] == ["batch"]


def test_data_is_placed_in_the_data_set_of_the_user():
    place = {"name": "Photos", "file": "photos.py", "line": 7}
    (report,) = found_in(result({"data": 0.5}, dataset=place))
    assert (report.file, report.line) == ("photos.py", 7)
    assert "Photos" in report.fix
    package = {**place, "file": "/x/site-packages/torch/a.py"}
    (report,) = found_in(result({"data": 0.5}, dataset=package, lines={"data": [3]}))
    assert (report.file, report.line) == ("train.py", 3)
    more = {"dataset": package, "loader": {"file": "trainer.py", "line": 9}}
    (report,) = found_in(result({"data": 0.5}, **more))
    assert (report.file, report.line) == ("trainer.py", 9)
    slow_start = {"worker-restart": 0.5}
    (report,) = found_in(result(slow_start, loader=more["loader"]))
    assert (report.file, report.line) == ("trainer.py", 9)


def test_statement_has_the_id_of_what_it_does():
    statements = [
        {**STATEMENT, "text": "plot(losses)", "kind": "logging"},
        {**STATEMENT, "number": 1, "line": 6, "text": "check(batch)"},
    ]
    events = [[f"statement {n}", 0.003, s] for s in range(1, 101) for n in (0, 1)]
    report = found_in(result({}, events=events, statements=statements))
    assert {(f.id, f.line) for f in report} == {("logging", 5), ("statement", 6)}


def test_every_cure_says_what_to_do():
    for name, (kind, exact, changes, fix) in CURES.items():
        assert kind and fix and isinstance(exact, bool) and isinstance(changes, bool), (
            name
        )


def test_row_without_a_gain_is_listed_as_tried():
    tried = rows([result({"threads": 1.0})])
    assert [row.name for row in tried] == ["threads"]
    assert isinstance(tried[0], Row) and isinstance(tried[0].gain, Gain)


# ---- The report ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drift", "rounds", "said"),
    [
        (0, 9, "no cure that was tried surely gives 1.15 times"),
        (0.2, 9, "no verdict, as steps without a change vary too much"),
        (0, 0, "no verdict, as nothing could be compared"),
    ],
)
def test_report_without_findings_says_whether_that_is_a_verdict(drift, rounds, said):
    one = result({"threads": 1.0}, spread=0.01, rounds=rounds)
    for block in one["blocks"]:
        block[2] *= 1 + drift * block[0]
    report = conclude("train.py", [one], {}, 1.0)
    assert report.findings == [] and said in str(report)


@pytest.mark.parametrize(
    ("events", "whole", "noted"),
    [
        ([], False, True),
        ([["evaluation", 0.1, 0]], False, True),  # before the first step
        ([["evaluation", 0.1, 50]], False, False),
        ([["save", 0.1, 50]], False, False),
        ([], True, False),
    ],
)
def test_evaluation_that_never_came_is_noted(events, whole, noted):
    one = result({"threads": 1.0}, events=events, runs=[[0, 70, whole]])
    notes = conclude("train.py", [one], {}, 1.0).notes
    assert any("the first 70 steps were watched" in note for note in notes) == noted


def test_statements_that_gain_nothing_share_a_line():
    cheap = [{**STATEMENT, "number": n, "line": 5 + n} for n in range(3)]
    events = [[f"statement {n}", 1e-6, 5] for n in range(3)]
    events += [["statement 3", 0.005, step] for step in range(1, 101)]
    dear = {**STATEMENT, "number": 3, "line": 9, "text": "g()"}
    slower = {"statement 4": 1.25, "threads": 1.0}  # without it
    there = [*cheap, dear, {**STATEMENT, "number": 4, "line": 10, "text": "h()"}]
    one = result(slower, events=events, statements=there)
    report = conclude("train.py", [one], {}, 1.0)
    text = str(report)
    assert "without one of 3 other statements" in text and "line 5" not in text
    assert "without line 9: g()" in text and "without line 10: h()" in text
    names = [row["name"] for row in report.to_dict()["tried"]]
    assert sum(name.startswith("without line") for name in names) == 5


def test_what_was_not_tried_is_told_by_its_line():
    failed = {"statement 0": "NameError: x", "data": "no loader", "statement 7": "no"}
    one = result({"threads": 1.0}, statements=[STATEMENT], failed=failed)
    assert conclude("train.py", [one], {}, 1.0).not_tried == {
        "without line 5: f()": "NameError: x",
        "data": "no loader",
        "statement 7": "no",
    }


def test_what_another_script_or_deep_would_have_tried_is_told():
    shares = {"data": 0.02, "optimizer": 0.004, "forward": 0.6}
    one = result({"threads": 1.0}, shares=shares)
    assert _left_out([one], {"batch"}) == {
        "data": "it takes 2.0% of a step",
        "optimizer": "it takes 0.4% of a step",
        "bfloat16": "only with --deep",
        "compile": "only with --deep",
    }
    tried = result({"data": 1.0, "fused optimizer": 1.0}, shares=shares)
    assert _left_out([tried], {"batch", "bfloat16", "compile"}) == {}
    large = result({"threads": 1.0}, shares={"optimizer": 0.9})  # of LBFGS, and no data
    assert _left_out([large], {"batch", "bfloat16", "compile"}) == {}
    assert _left_out([result({}, rounds=0, shares=shares)], set()) == {}


@pytest.mark.parametrize(
    ("faults", "share"), [(0.0009, None), (0.0031, "31%"), (0.02, "100%")]
)
def test_memory_that_is_given_back_in_each_step_is_a_note(faults, share):
    one = result({"threads": 1.0}, step_seconds=0.01, fault_seconds=faults)
    notes = [n for n in conclude("a.py", [one], {}, 1.0).notes if "trainfast run" in n]
    assert notes == [] if share is None else notes[0].startswith(f"up to {share} of")
