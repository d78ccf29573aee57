"""The stopwatch at statements: which are found; the script stays what it is."""

import ast
import time

import pytest
import torch

from trainfast.torch.probe import loop as probe_loop
from trainfast.torch.probe import statements as probe_statements
from trainfast.torch.probe.loop import Loop
from trainfast.torch.probe.statements import NAME, SkipStatement, Statements

LOOP = """\
seen = []
for epoch in range(2):
    begin = epoch
    for batch in range(3):
        if batch == 1:
            seen.append(("one", epoch))
        with context():
            loss = forward(batch)
            note(loss)
        step()
        seen.append((epoch, batch))
        if batch == 2:
            continue
        seen.append("not last")
    evaluate(epoch); "the end of an epoch"
after = "the loops"
"""
FORWARD, STEP = 8, 10


def instrument(source, stack, work):
    loop = Loop("script.py")
    loop.steps = 1
    statements = Statements(loop, stack, set(work))
    tree = ast.parse(source, "script.py")
    statements.instrument(tree)
    return statements, compile(tree, "script.py", "exec")


def execute(code, statements=None):
    names = {
        "context": torch.no_grad,
        "forward": lambda batch: batch,
        "note": lambda loss: None,
        "step": lambda: None,
        "evaluate": lambda epoch: time.sleep(0.002),
        NAME: statements,
    }
    exec(code, names)
    return names


def lines(statements):
    return {line: text for _, line, _, text in statements.found}


def test_statements_around_the_step_are_found():
    statements, _ = instrument(LOOP, [STEP], [STEP, FORWARD])
    assert lines(statements) == {
        3: "begin = epoch",
        6: "seen.append(('one', epoch))",
        9: "note(loss)",
        11: "seen.append((epoch, batch))",
        14: "seen.append('not last')",
        15: "evaluate(epoch)",
    }


def test_instrumented_script_does_the_same():
    statements, code = instrument(LOOP, [STEP], [STEP, FORWARD])
    plain = execute(compile(LOOP, "script.py", "exec"))
    assert execute(code, statements)["seen"] == plain["seen"]
    assert execute(code, statements)["after"] == "the loops"


def test_time_is_that_of_the_statement():
    statements, code = instrument(LOOP, [STEP], [STEP, FORWARD])
    execute(code, statements)
    numbers = {line: number for number, line, _, _ in statements.found}
    assert statements.seconds[numbers[15]] >= 0.004
    assert statements.seconds[numbers[3]] < 0.002
    names = [name for name, _, _ in statements.loop.events]
    assert names.count(f"statement {numbers[11]}") == 6
    assert names.count(f"statement {numbers[15]}") == 2


def test_skipped_statement_does_not_run():
    statements, code = instrument(LOOP, [STEP], [STEP, FORWARD])
    numbers = {line: number for number, line, _, _ in statements.found}
    statements.loop.switch = SkipStatement(numbers[11])
    seen = execute(code, statements)["seen"]
    assert (0, 1) not in seen and ("one", 0) in seen and "not last" in seen


FUNCTIONS = """\
def train_epoch(loader):
    begin()
    for batch in loader:
        train_batch(batch)
        log()

def train_batch(batch):
    prepare(batch)
    step()
    clean()

setup()
for epoch in range(3):
    train_epoch([1, 2])
    validate()
"""


def test_functions_called_inside_of_the_loop_are_entered():
    statements, _ = instrument(FUNCTIONS, [9, 4, 14], [9, 4, 14])
    assert set(lines(statements)) == {2, 5, 8, 10, 15}


def test_function_that_is_called_once_is_preparation_outside_of_its_loop():
    loop = "    for x in y:\n        step()\n        log()\n"
    source = f"def main():\n    load()\n{loop}main()\n"
    statements, _ = instrument(source, [4, 6], [4, 6])
    assert set(lines(statements)) == {5}


def test_script_without_a_loop_has_no_statements():
    statements, _ = instrument("step()\nlog()\n", [1], [1])
    assert statements.found == []


def test_statement_that_changes_parameters_is_an_optimizer():
    source = "for i in range(4):\n    step()\n    update()\n    look()\n"
    statements, code = instrument(source, [2], [2])
    model = torch.nn.Linear(2, 2)
    statements.loop.model = model

    def update():
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1)

    exec(code, {"step": int, "update": update, "look": int, NAME: statements})
    assert [statements.kind(n) for n in (0, 1)] == ["optimizer", "statement"]


def test_share_of_the_backward_pass_goes_by_nodes():
    source = "for i in range(3):\n    few()\n    many()\n    none()\n    step()\n"
    statements, code = instrument(source, [5], [5])
    x = torch.ones(1, requires_grad=True)

    def nodes(n):
        time.sleep(0.01)
        return sum(x * 2 for _ in range(n))

    def step():
        statements.loop.seconds["backward"] += 0.01

    calls = {"few": lambda: nodes(10), "many": lambda: nodes(30), "none": time.time}
    exec(code, {**calls, "step": step, NAME: statements})
    few, many, none = (statements.backward(n) for n in range(3))
    assert few / statements.seconds[1] < many / statements.seconds[0]
    whole = few * statements.seconds[0] + many * statements.seconds[1]
    assert whole == pytest.approx(0.03, rel=0.01)
    assert none == 0.0
    statements.loop.seconds["backward"] += 10.0
    assert statements.backward(1) == 2.0  # no more than that of a usual operation


def test_statement_that_logs_is_named_so(monkeypatch):
    source = "for i in range(4):\n    step()\n    report()\n"
    statements, code = instrument(source, [2], [2])
    now = [0.0]
    for module in (probe_loop, probe_statements):
        monkeypatch.setattr(module, "clock", lambda: now[0])

    def work(seconds):
        now[0] += seconds

    def report():
        work(1.0)
        statements.loop.timed("logging", work, 3.0)

    exec(code, {"step": int, "report": report, NAME: statements})
    assert statements.kind(0) == "logging"
    assert statements.own(0) == 0.25
    assert statements.costly(lambda n: 1.0) == []  # the stopwatch knows it better


def test_arguments_of_a_timed_call_may_have_any_name():
    given = {"phase": "train", "function": "relu", "self": 1}
    assert Loop("script.py").timed("logging", dict, **given) == given  # set_postfix()


def test_costly_statements_are_the_most_expensive_ones():
    statements = Statements(Loop("script.py"), [], set())
    statements.found = [(n, n, n, "") for n in range(9)]
    share = [0.01, 0.5, 0.09, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0]
    statements.seconds.update(enumerate(share))
    assert statements.costly(share.__getitem__) == [1, 3, 4, 5]


def test_runs_that_are_too_short_to_gain_from_do_not_count():
    source = "for i in range(20):\n    step()\n    look(i)\n"
    statements, code = instrument(source, [2], [2])
    looks = lambda i: time.sleep(0.12 if i == 15 else 0.0)  # noqa: E731

    def step():
        statements.loop.steps += 1
        if statements.loop.steps == 10:
            statements.leave_out_short_runs(10.0, 10)

    exec(code, {"step": step, "look": looks, NAME: statements})
    counted = [took for _, took, step in statements.loop.events if step > 10]
    assert len(counted) == 1 and counted[0] >= 0.12  # of the last ten runs


def test_short_runs_of_which_a_step_has_many_count():
    source = "for i in range(3000):\n    step(i)\n    look()\n"
    statements, code = instrument(source, [2], [2])

    def step(i):
        statements.loop.steps += i % 1000 == 0
        if i == 1000:
            statements.leave_out_short_runs(0.01, statements.loop.steps)

    exec(code, {"step": step, "look": lambda: sum(range(1000)), NAME: statements})
    late = [took for _, took, step in statements.loop.events if step == 3]
    assert len(late) > 990 and min(late) < 0.0001  # 1 % of a step


def test_update_is_seen_in_the_first_runs_of_its_statement():
    source = "for i in range(30):\n    step()\n    rarely(i)\n    late(i)\n"
    statements, code = instrument(source, [2], [2])
    model = torch.nn.Linear(2, 2)
    statements.loop.model = model

    def update(i, rest):
        if i % 8 == rest and i > 5:
            with torch.no_grad():
                model.weight.sub_(0.1)

    rarely = lambda i: update(i, 7)  # noqa: E731
    late = lambda i: update(i, 5) if i > 20 else None  # noqa: E731
    exec(code, {"step": int, "rarely": rarely, "late": late, NAME: statements})
    assert statements.updates == {0}
