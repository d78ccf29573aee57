"""`trainfast lint`: each fault is found at its line, and its healthy twin is not."""

import json
import textwrap
from pathlib import Path

import pytest

from trainfast.cli import main
from trainfast.lint import lint
from trainfast.lint.hints import HINTS
from trainfast.lint.loops import Script
from trainfast.lint.report import lint_files
from trainfast.lint.rules import RULES

START = """
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
"""
LOOP = """
for epoch in range(25):
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def found(source, hints=False):
    source = textwrap.dedent(source)
    lines = source.splitlines()
    return [(f.id, lines[f.line - 1].strip()) for f in lint(source, hints=hints)]


def mended(source, **options):
    return [f.mended for f in lint(textwrap.dedent(source), **options)]


def in_loop(*statements):
    """The plain loop with statements at the end of a step."""
    return START + LOOP + "".join(f"        {line}\n" for line in statements)


def test_plain_loop_has_no_fault():
    assert found(START + LOOP) == []
    script = Script(START + LOOP)
    assert len(script.step_loops) == len(script.epoch_loops) == 1


AFTER = """
if (epoch + 1) % 5 == 0:
    torch.save(model.state_dict(), f"models/{epoch}.pt")
"""


def test_saving_behind_the_epoch_loop():
    assert found(START + LOOP + AFTER) == [
        ("outside-epoch-loop", "if (epoch + 1) % 5 == 0:")
    ]
    validation = 'val = validate(model)\nprint(f"Epoch {epoch}: {val}")\n'
    assert found(START + LOOP + validation) == []  # no use of epoch in the call's line
    assert found(START + LOOP + "log(epoch, validate(model))\n") == [
        ("outside-epoch-loop", "log(epoch, validate(model))")
    ]
    inside = START + LOOP + textwrap.indent(AFTER, "    ")
    assert found(inside) == []
    assert found(inside + AFTER) == []  # saved in every epoch, and at the end
    assert found(START + LOOP + "torch.save(model.state_dict(), 'last.pt')\n") == []
    other = START + LOOP + "for epoch in range(3):\n    save(epoch)\n"
    assert found(other) == []


@pytest.mark.parametrize(
    ("statement", "better"),
    [
        ("losses.append(loss)", "losses.append(loss.item())"),
        ("total += loss", "total += loss.item()"),
        ("total += loss * len(x)", "total += loss.item() * len(x)"),
        ("history.append((epoch, loss))", "history.append((epoch, loss.item()))"),
        ("log.append({'loss': loss})", "log.append({'loss': loss.item()})"),
    ],
)
def test_loss_that_keeps_its_graph(statement, better):
    assert found(in_loop(statement)) == [("loss-kept", statement)]
    assert mended(in_loop(statement)) == [better]
    assert found(in_loop(better)) == []


@pytest.mark.parametrize(
    "statements",
    [
        ["losses.append(loss.detach())"],
        ["total += loss.item()"],
        ["total += float(loss)"],
        ["loss = loss.item()", "losses.append(loss)"],
        ["meter.update(loss, len(x))"],
        ["latest['loss'] = loss"],
        ["with torch.no_grad():", "    total += loss"],
        ["outputs.append(x)"],
    ],
)
def test_loss_that_is_a_number_or_goes(statements):
    assert found(in_loop(*statements)) == []


def test_losses_that_are_trained_on_are_kept_for_it():
    source = """
    for epoch in range(3):
        for x in loader:
            optimizer.zero_grad()
            parts = []
            for head in heads:
                part = head(x)
                parts.append(part)
            total = 0
            for part in parts:
                total += part
            total.backward()
            optimizer.step()
    """
    assert found(source) == []


def test_gradients_that_are_never_cleared():
    source = START + LOOP.replace("        optimizer.zero_grad()\n", "")
    assert found(source) == [("no-zero-grad", "optimizer.step()")]
    assert mended(source) == ["optimizer.step(); optimizer.zero_grad()"]
    for cleared in ("model.zero_grad()", "p.grad = None", "p.grad.zero_()"):
        assert found(source + f"        {cleared}\n") == []
    scheduler = LOOP.replace("optimizer.step", "scheduler.step")
    assert found(START + scheduler.replace("optimizer.zero_grad", "print")) == []


SCALED = """
for epoch in range(25):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize(
    ("change", "line", "better"),
    [
        (("", ""), None, None),
        (
            ("scaler.step(optimizer)", "optimizer.step()"),
            *("optimizer.step()", "scaler.step(optimizer)"),
        ),
        (
            ("        scaler.update()\n", ""),
            *("scaler.step(optimizer)", "scaler.step(optimizer); scaler.update()"),
        ),
        (
            ("        scaler.unscale_(optimizer)\n", ""),
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            "scaler.unscale_(optimizer); "
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        ),
    ],
)
def test_order_of_the_scaler(change, line, better):
    source = START + SCALED.replace(*change)
    assert found(source) == ([("scaler-order", line)] if line else [])
    assert mended(source) == ([better] if better else [])


# As a guide has it, which drops the batches behind the last full group.
ACCUMULATION = """
    for i, (images, labels) in enumerate(tqdm(train_loader)):
        with autocast():
            loss = criterion(model(images), labels) / accumulation_steps
        scaler.scale(loss).backward()
        if (i + 1) % accumulation_steps == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
"""


def test_last_batches_of_an_accumulation():
    assert found(ACCUMULATION) == [
        ("accumulation-leftover", "if (i + 1) % accumulation_steps == 0:")
    ]
    assert mended(ACCUMULATION) == [
        "if (i + 1) % accumulation_steps == 0 or i + 1 == len(train_loader):"
    ]
    whole = ACCUMULATION.replace(" == 0:", " == 0 or i + 1 == len(train_loader):")
    assert found(whole) == []
    assert found(ACCUMULATION + "    scaler.step(optimizer)\n") == []
    assert (
        found(ACCUMULATION.replace("enumerate(tqdm(train_loader))", "range(9)")) == []
    )
    every = """
    for step, batch in enumerate(loader):
        if step % 4 == 0:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    assert found(every) == []


VALIDATED = """
def validate(net, data):
    net.eval()
    return sum(net(x).sum() for x in data)

def train(model, optimizer, data):
    TRAIN
    for x in data:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

for epoch in range(3):
    train(model, optimizer, loader)
    validate(model, loader)
"""


def test_eval_that_is_never_undone():
    named = VALIDATED.replace("net", "model")
    line = ("eval-never-undone", "model.eval()")
    assert found(named.replace("TRAIN", "pass")) == [line]
    assert found(named.replace("TRAIN", "model.train()")) == []
    assert found(named.replace("TRAIN", "model.train(True)")) == []
    assert found(named.replace("TRAIN", "model.train_head()")) == []
    assert found(named.replace("TRAIN", "trainer.train_epoch()")) == [line]
    teacher = named.replace("TRAIN", "pass").replace("model.eval", "teacher.eval")
    assert found(teacher) == []
    before = "model.train()\n" + named.replace("TRAIN", "pass")
    assert found(before) == [line]


def test_loader_in_the_epoch_loop():
    made = "    loader = DataLoader(data, batch_size=32, num_workers=4)\n"
    source = START + LOOP.replace("    for i", made + "    for i")
    assert found(source) == [("loader-in-epoch-loop", made.strip())]
    changing = made.replace("data,", "data_of(epoch),")
    assert found(source.replace(made, changing)) == []
    sampled = "    data = subset()\n" + made
    assert found(source.replace(made, sampled)) == []
    once = "    if epoch == 0:\n    " + made
    assert found(source.replace(made, once)) == []


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        ("DataLoader(d, prefetch_factor=2)", True),
        ("DataLoader(d, num_workers=0, persistent_workers=True)", True),
        ("torch.utils.data.DataLoader(d, 4, prefetch_factor=2)", True),
        ("DataLoader(d, num_workers=2, prefetch_factor=2)", False),
        ("DataLoader(d, num_workers=n, prefetch_factor=2)", False),
        ("DataLoader(d, prefetch_factor=None)", False),
        ("DataLoader(d, persistent_workers=False)", False),
        ("DataLoader(d, prefetch_factor=2, **options)", False),
    ],
)
def test_prefetch_without_workers(call, wrong):
    assert bool(found(call)) == wrong


def test_hints_only_when_asked():
    source = (
        in_loop("total += loss.item()", "print(loss)") + "        if i % 50 == 0:\n"
    )
    source += "            print(loss.item())\n"
    source = source.replace("enumerate(loader)", "zip(range(9), loader)")
    assert found(source) == []
    assert found(source, hints=True) == [
        ("zipped-loader", "for i, (x, y) in zip(range(9), loader):"),
        ("waits-for-gpu", "total += loss.item()"),
        ("prints", "print(loss)"),
    ]
    pinned = in_loop("x = x.to(device)") + "DataLoader(data, pin_memory=True)\n"
    assert mended(pinned, hints=True) == ["x = x.to(device, non_blocking=True)"]
    assert all(finding.hint for finding in lint(source, hints=True))
    on_the_cpu = source.replace('torch.amp.GradScaler("cuda")', "None")
    assert [id for id, _ in found(on_the_cpu, hints=True)] == ["zipped-loader"]


def test_zipped_loader_outside_of_training():
    """A guide's warm-up of a loader, which fetches 11 batches."""
    source = "for _ in zip(range(10), {}):\n    pass\n"
    assert mended(source.format("loader"), hints=True) == [
        "for _ in enumerate(itertools.islice(loader, 10)):"
    ]
    assert found(source.format("names"), hints=True) == []


def test_mended_lines_of_waits():
    source = in_loop(
        "a = x.cpu()", "b = x.detach().numpy()", "\u00e4 += loss.item() / 2"
    )
    assert mended(source, hints=True) == [
        "a = x.detach()  # and .cpu() every 50 steps",
        "b = x.detach()  # and .numpy() every 50 steps",
        "\u00e4 += loss.detach() / 2  # and .item() every 50 steps",
    ]


@pytest.mark.parametrize(
    ("comment", "left"),
    [
        ("losses.append(loss)  # trainfast: ignore=loss-kept", 0),
        ("losses.append(loss)  # trainfast: ignore", 0),
        ("losses.append(loss)  # trainfast: ignore=prints, loss-kept", 0),
        ("losses.append(loss)  # trainfast: ignore=no-zero-grad", 1),
    ],
)
def test_ignored_lines(comment, left):
    assert len(found(in_loop(comment))) == left


def test_comment_on_the_line_before():
    lines = ["# trainfast: ignore=loss-kept", "a.append(loss)", "b.append(loss)"]
    assert found(in_loop(*lines)) == [("loss-kept", "b.append(loss)")]


@pytest.mark.parametrize(
    "source",
    [
        "",
        "for x in y: pass",
        "def f(): f()\nwhile True:\n    f()\n    a.backward()\n    opt.step()",
        "class A:\n def train(self):\n  for b in self.l:\n   self.train()\n",
        "[x.append(loss) for x in y]",
        "lambda: loss.backward()",
        "async def f():\n async for b in l:\n  b.backward()\n  opt.step()",
        "for i in l:\n    scaler.scale(f(x)).backward()\n    opts[0].step()",
    ],
)
def test_odd_scripts_are_read(source):
    lint(source, hints=True)


def test_command_line(tmp_path, capsys):
    (tmp_path / "bad.py").write_text(in_loop("losses.append(loss)"))
    (tmp_path / "good.py").write_text(START + LOOP)
    assert main(["lint", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "bad.py:14: loss-kept: the loss keeps the graph" in said
    assert "  + losses.append(loss.item())" in said and "1 in 2 scripts" in said
    assert main(["lint", "--json", str(tmp_path / "bad.py")]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["line"] == 14
    assert main(["lint", str(tmp_path / "good.py")]) == 0
    assert capsys.readouterr().out == "No fault found in 1 script.\n"
    (tmp_path / "no.py").write_text("def f(:\n")
    assert main(["lint", str(tmp_path / "no.py")]) == 1
    assert "no.py, line 1" in capsys.readouterr().err
    assert main(["lint", str(tmp_path / "missing.py")]) == 1
    with pytest.raises(SystemExit):
        main(["lint"])
    assert "pass a script or a folder" in capsys.readouterr().err
    report = lint_files([tmp_path / "bad.py"])
    assert "<table" in report._repr_html_()


def test_lines_are_counted_as_python_does(tmp_path):
    source = "\f\n" + in_loop("a = '\x0b'", "losses.append(loss)  # ä")
    (tmp_path / "bom.py").write_text(source, encoding="utf-8-sig")
    marked = "# -*- coding: latin-1 -*-\n" + source
    (tmp_path / "latin.py").write_text(marked, encoding="latin-1")
    for finding in lint_files([tmp_path]).findings:
        assert finding.code == "losses.append(loss)  # ä"
        assert finding.mended == "losses.append(loss.item())  # ä"
    assert len(lint_files([tmp_path]).findings) == 2


def test_rules_are_named_once_and_documented():
    ids = [rule.id for rule in [*RULES, *HINTS]]
    assert len(ids) == len(set(ids)) == 12 and len(RULES) == 8
    page = (Path(__file__).parents[2] / "docs/lint.md").read_text()
    assert all(f"| `{name}` |" in page for name in ids)
