"""trainfast.huggingface.Callback in transformers' Trainer: what it prints and logs."""

import copy
import json
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")

import trainfast  # noqa: E402
from tests.torch.epoch_lines import lines_in, watch_epochs  # noqa: E402
from tests.torch.trainers import (  # noqa: E402
    ACCUMULATED,
    BATCH,
    InOrder,
    items,
    make_trainer,
    trained,
)

ITEMS = 22
SIZES = (4, 4, 4, 4, 4, 2)  # of the batches in an epoch
PER_EPOCH = 3  # steps


@pytest.fixture
def epochs(monkeypatch):
    return watch_epochs(monkeypatch)


class Stream(torch.utils.data.IterableDataset):
    """A data set of unknown length."""

    def __iter__(self):
        return iter(items(ITEMS))


def run(folder, *callbacks, data=None, **options):
    data = items(ITEMS) if data is None else data
    return trained(folder, callbacks=callbacks, data=data, **options)


def reports(capsys):
    """What was printed, without the lines of Trainer's own callbacks."""
    lines = capsys.readouterr().out.splitlines(keepends=True)
    return lines_in("".join(line for line in lines if not line.startswith("{")))


def means(losses, logging_steps, sizes=SIZES):
    """Each epoch's mean as Trainer logs it, in float64: of its steps between two logs,
    weighted by their samples."""
    found = []
    for begin in range(0, len(losses), len(sizes)):
        part = [float(x) for x in losses[begin : begin + len(sizes)]]
        steps = [
            sum(part[i : i + ACCUMULATED]) / len(part[i : i + ACCUMULATED])
            for i in range(0, len(part), ACCUMULATED)
        ]
        counts = [
            sum(sizes[i : i + ACCUMULATED]) for i in range(0, len(part), ACCUMULATED)
        ]
        before = begin // ACCUMULATED  # steps of the run
        groups, group = [], []
        for i in range(len(steps)):
            group.append(i)
            if (before + i + 1) % logging_steps == 0 or i == len(steps) - 1:
                groups.append(group)
                group = []
        total = sum(
            sum(steps[i] for i in g) / len(g) * sum(counts[i] for i in g)
            for g in groups
        )
        found.append(total / sum(counts))
    return found


@pytest.mark.parametrize("logging_steps", [1, 2, 3, 500])
def test_each_epoch_has_its_lines(tmp_path, capsys, epochs, logging_steps):
    trainer = run(
        tmp_path,
        trainfast.huggingface.Callback(),
        num_train_epochs=3,
        logging_steps=logging_steps,
    )
    lines, wanted = reports(capsys), means(trainer.model.losses, logging_steps)
    assert [line[:2] for line in lines] == [(1, 3), (2, 3), (3, 3)]
    assert [line.loss for line in lines] == pytest.approx(wanted, abs=6e-5)
    assert [epoch.loss for epoch in epochs] == pytest.approx(wanted, rel=1e-6)
    assert [epoch.samples for epoch in epochs] == [ITEMS] * 3
    assert all(line.throughput > 0 for line in lines)


@pytest.mark.parametrize("data", [None, Stream()])
def test_a_run_of_some_steps_reports_the_epoch_that_it_ends_in(
    tmp_path, capsys, epochs, data
):
    callback = trainfast.huggingface.Callback(remaining=True)
    trainer = run(tmp_path, callback, data=data, max_steps=PER_EPOCH + 2)
    out = capsys.readouterr().out
    assert ("Epoch [2/2]" in out) == (data is None) and ("[2]" in out) == bool(data)
    assert ("Remaining" in out) == (data is None)
    assert [epoch.samples for epoch in epochs] == [ITEMS, 2 * BATCH * ACCUMULATED]
    wanted = means(trainer.model.losses, 1)
    assert [epoch.loss for epoch in epochs] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("done", [1, 2])
def test_a_resumed_run_goes_on_counting(tmp_path, capsys, epochs, done):
    callback = trainfast.huggingface.Callback()
    run(tmp_path, callback, num_train_epochs=done, save_strategy="epoch")
    reports(capsys)
    trainer = run(
        tmp_path,
        callback,
        num_train_epochs=3,
        resume=str(tmp_path / f"checkpoint-{done * PER_EPOCH}"),
    )
    wanted = [(epoch, 3) for epoch in (1, 2, 3)][done:]
    assert [line[:2] for line in reports(capsys)] == wanted
    found = [epoch.loss for epoch in epochs[done:]]
    assert found == pytest.approx(means(trainer.model.losses, 1), rel=1e-6)


def test_a_run_that_resumes_within_an_epoch_reports_its_rest(tmp_path, capsys, epochs):
    run(tmp_path, num_train_epochs=1, save_strategy="steps", save_steps=2)
    run(
        tmp_path,
        trainfast.huggingface.Callback(),
        num_train_epochs=2,
        resume=str(tmp_path / "checkpoint-2"),
    )
    assert [line[:2] for line in reports(capsys)] == [(1, 2), (2, 2)]
    assert [epoch.samples for epoch in epochs] == [6, ITEMS]


class Breaks(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == PER_EPOCH + 1:
            raise KeyError("stop")


def test_an_exception_passes_and_the_next_run_is_whole(tmp_path, capsys, epochs):
    callback = trainfast.huggingface.Callback()
    trainer = make_trainer(
        tmp_path,
        callbacks=[callback, Breaks()],
        data=items(ITEMS),
        num_train_epochs=2,
    )
    with pytest.raises(KeyError, match="stop"):
        trainer.train()
    assert [line[:2] for line in reports(capsys)] == [(1, 2)]
    trainer.remove_callback(Breaks)
    trainer.model.losses.clear()
    trainer.train()
    assert [line[:2] for line in reports(capsys)] == [(1, 2), (2, 2)]
    assert [epoch.samples for epoch in epochs] == [ITEMS] * 3
    wanted = means(trainer.model.losses, 1)
    assert [epoch.loss for epoch in epochs[1:]] == pytest.approx(wanted, rel=1e-6)
    assert not trainer.model._forward_pre_hooks


class Reads(TorchDispatchMode):
    """Counts what reads a number of a tensor, which waits for a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def reads_of(folder, *callbacks, **options):
    with Reads() as reads:
        run(folder, *callbacks, num_train_epochs=2, **options)
    return reads.count


@pytest.mark.parametrize("logging_steps", [PER_EPOCH, 500])
def test_numbers_are_read_once_an_epoch(tmp_path, logging_steps):
    with trainfast.Logger(jsonl=tmp_path / "log") as logger:
        callback = trainfast.huggingface.Callback(logger)
        found = reads_of(tmp_path, callback, logging_steps=logging_steps)
    plain = reads_of(tmp_path, logging_steps=logging_steps)
    each = 0 if logging_steps == PER_EPOCH else 2  # Trainer's own: loss and grad_norm
    assert found - plain == 2 * each


class Unmeasured(InOrder):
    """A Trainer that logs no norm where it does not clip, as older ones."""

    def _get_grad_norm(self, model, grad_norm=None):
        return grad_norm


def test_norm_that_trainer_does_not_log_is_the_optimizers(tmp_path):
    norms = [row.get("grad_norm") for row in history(run(tmp_path, logging_steps=1))]
    bare = history(run(tmp_path, cls=Unmeasured, logging_steps=1))
    assert not any("grad_norm" in row for row in bare)
    callback = trainfast.huggingface.Callback()
    added = history(run(tmp_path, callback, cls=Unmeasured, logging_steps=1))
    assert [row["grad_norm"] for row in added] == pytest.approx(norms, rel=1e-6)


def history(trainer):
    return [row for row in trainer.state.log_history if "loss" in row]


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Printed(transformers.TrainerCallback):
    """What has been printed when an evaluation ends."""

    def __init__(self, capsys):
        self.capsys, self.seen = capsys, []

    def on_evaluate(self, args, state, control, **kwargs):
        self.seen.append(self.capsys.readouterr().out)


def test_logs_and_evaluations_are_logged(tmp_path, capsys, epochs):
    printed = Printed(capsys)
    with trainfast.Logger(jsonl=tmp_path / "log", csv=tmp_path / "csv") as logger:
        trainer = run(
            tmp_path,
            trainfast.huggingface.Callback(logger),
            printed,
            num_train_epochs=2,
            logging_steps=2,
            eval_strategy="epoch",
            evaluate=items(8),
        )
    assert all(text.count("Average Train Loss") == 1 for text in printed.seen)
    assert len(printed.seen) == 2 and [e.samples for e in epochs] == [ITEMS] * 2
    found = records(tmp_path / "log")
    by_name = {
        name: [(row["step"], row[name]) for row in found if name in row]
        for name in {name for row in found for name in row}
    }
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        wanted = [
            (row["step"], row[name]) for row in trainer.state.log_history if name in row
        ]
        assert by_name[name] == wanted
    assert [step for step, _ in by_name["loss"]] == [2, 3, 4, 6]
    wanted = [(3, epochs[0].loss), (6, epochs[1].loss)]
    assert by_name["train_loss_epoch"] == wanted
    assert [step for step, _ in by_name["throughput"]] == [3, 6]


class Copies(transformers.TrainerCallback):
    """Copies the model in training, as averages of weights do, and runs the copies."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin.train()(x=torch.zeros(5, 16), labels=torch.zeros(5, 1))


def test_copies_of_the_model_do_not_count(tmp_path, epochs):
    callback = trainfast.huggingface.Callback(samples=lambda kwargs: len(kwargs["x"]))
    run(tmp_path, callback, Copies())
    assert [epoch.samples for epoch in epochs] == [ITEMS]


def test_samples_are_counted_by_a_function_of_the_models_arguments(tmp_path, epochs):
    callback = trainfast.huggingface.Callback(samples=lambda kw: 2 * len(kw["labels"]))
    run(tmp_path, callback)
    assert [epoch.samples for epoch in epochs] == [2 * ITEMS]


def test_an_epoch_that_is_stopped_between_two_steps_is_reported(
    tmp_path, capsys, epochs
):
    class Stops(transformers.TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            first = state.epoch < 1 and not epochs
            control.should_epoch_stop = first and state.global_step == 2
            return control

    run(tmp_path, trainfast.huggingface.Callback(), Stops(), num_train_epochs=2)
    assert [line[:2] for line in reports(capsys)] == [(1, 2), (2, 2)]
    assert [epoch.samples for epoch in epochs] == [2 * ACCUMULATED * BATCH, ITEMS]


def test_evaluation_within_an_epoch_does_not_count(tmp_path, capsys, epochs):
    evaluating = {"eval_strategy": "steps", "eval_steps": 2, "evaluate": items(8)}
    callback = trainfast.huggingface.Callback()
    trainer = run(tmp_path, callback, logging_steps=500, **evaluating)
    assert [epoch.samples for epoch in epochs] == [ITEMS]
    assert [e.loss for e in epochs] == pytest.approx(means(trainer.model.losses, 500))


@pytest.mark.slow
def test_a_compiled_model_is_counted(tmp_path, epochs):
    torch._dynamo.reset()
    callback = trainfast.huggingface.Callback()
    run(
        tmp_path,
        callback,
        num_train_epochs=2,
        torch_compile=True,
        torch_compile_backend="eager",
    )
    assert [epoch.samples for epoch in epochs] == [ITEMS] * 2
