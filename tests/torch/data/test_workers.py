"""find_workers: the right number, and loaders that cannot be measured."""

import json
import os
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import trainfast
from trainfast import cli
from trainfast.torch.data import workers as module
from trainfast.torch.data.loaders import like
from trainfast.torch.data.workers import Trial, _candidates, _Ladder


class Slow(Dataset):
    """2 ms an item, of waiting."""

    def __init__(self, rows=400):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, i):
        if i >= self.rows:
            raise IndexError(i)
        time.sleep(0.002)
        return torch.full((4,), float(i))


class Broken(Slow):
    def __getitem__(self, i):
        raise KeyError(f"no image {i}")


class BrokenInWorkers(Slow):
    def __getitem__(self, i):
        if torch.utils.data.get_worker_info() is not None:
            os._exit(3)
        return super().__getitem__(i)


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(200):
            time.sleep(0.001)
            yield torch.tensor(i)


fast = TensorDataset(torch.randn(2000, 4))


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(module, "_WINDOW_SECONDS", 0.4)
    monkeypatch.setattr(module, "_PILOT_SECONDS", 0.5)


def test_workers_are_found_for_data_that_waits():
    report = trainfast.find_workers(Slow(), batch_size=8, candidates=[0, 2, 4])
    rates = {t.workers: t.rate for t in report.trials}
    assert report.best == 4 and rates[4] > 2 * rates[0]
    assert report.loader_kwargs(batch_size=8)["num_workers"] == 4
    assert "num_workers=4" in str(report) and "num_workers=4" in report._repr_html_()


def test_no_workers_are_right_for_data_in_memory():
    report = trainfast.find_workers(fast)
    assert report.best == 0 and "sent here" in report.reason


def test_search_ends_where_training_is_fed():
    report = trainfast.find_workers(Slow(), batch_size=8, consumer_rate=20.0)
    assert report.best == 0 and len(report.trials) == 1
    report = trainfast.find_workers(
        Slow(), batch_size=8, consumer_rate=75.0, candidates=[0, 4]
    )
    assert report.best == 4 and report.reason.startswith("1.2 times")


def test_two_worse_candidates_end_the_search(monkeypatch):
    rates = {0: 10.0, 1: 20.0, 2: 15.0, 4: 14.0, 8: 30.0}
    monkeypatch.setattr(module, "usable_cores", lambda: 4)
    monkeypatch.setattr(
        _Ladder, "_try", lambda ladder, n: Trial(n, rate=rates[n], start=0.1)
    )
    report = trainfast.find_workers(fast)
    assert [t.workers for t in report.trials] == [0, 1, 2, 4] and report.best == 1


def test_fewest_workers_near_the_best_are_taken(monkeypatch):
    rates = {0: 10.0, 1: 19.5, 2: 20.0}
    monkeypatch.setattr(_Ladder, "_try", lambda ladder, n: Trial(n, rate=rates[n]))
    assert trainfast.find_workers(fast, candidates=[0, 1, 2]).best == 1


def test_candidates_go_to_twice_the_cores(monkeypatch):
    monkeypatch.setattr(module, "usable_cores", lambda: 3)
    assert _candidates(None) == [0, 1, 2, 3, 4, 6]
    assert _candidates([4, 0, 4]) == [4, 0]


def test_time_is_bounded():
    began = time.monotonic()
    report = trainfast.find_workers(Slow(), candidates=[0, 1, 2], seconds=0.5)
    assert time.monotonic() - began < 5
    assert report.trials[-1].problem == "no time was left"


def test_batches_too_large_for_shared_memory_are_not_tried(monkeypatch):
    monkeypatch.setattr(module, "_free_shared_memory", lambda: 100)
    report = trainfast.find_workers(Slow(), candidates=[0, 1])
    assert report.best == 0 and "/dev/shm" in report.trials[1].problem


def test_worker_that_dies_is_a_problem_of_its_candidate():
    report = trainfast.find_workers(BrokenInWorkers(), batch_size=8, candidates=[0, 1])
    assert report.best == 0 and "exited unexpectedly" in report.trials[1].problem


def test_error_of_the_data_set_is_shown_as_it_is():
    with pytest.raises(KeyError, match="no image"):
        trainfast.find_workers(Broken())


def test_loader_keeps_its_batches_options_and_random_numbers():
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(
        Slow(40), batch_size=5, shuffle=True, generator=generator, drop_last=True
    )
    before, state = torch.get_rng_state(), generator.get_state()
    report = trainfast.find_workers(loader, candidates=[0, 1])
    assert all(t.rate for t in report.trials)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(generator.get_state(), state)


def test_streams_are_measured():
    report = trainfast.find_workers(DataLoader(Stream(), batch_size=4), candidates=[0])
    assert report.trials[0].rate > 0
    again = like(DataLoader(Stream(), batch_size=4), 0)
    assert [len(batch) for batch in again] == [4] * 50


class Once(IterableDataset):
    def __init__(self):
        self.items = iter(range(8))

    def __iter__(self):
        return self.items


def test_data_that_end_are_told():
    with pytest.raises(RuntimeError, match="gave no batch: it can be read once only"):
        trainfast.find_workers(DataLoader(Once(), batch_size=4), candidates=[0])


def test_single_items_without_batches_are_kept():
    loader = DataLoader(Slow(8), batch_size=None)
    assert [batch.tolist() for batch in like(loader, 0)][3] == [3.0] * 4
    assert trainfast.find_workers(loader, candidates=[0]).trials[0].rate > 0


def test_no_process_is_left():
    before = module._children()  # of other tests, such as a resource tracker
    trainfast.find_workers(Slow(), batch_size=8, candidates=[2])
    late = time.monotonic() + 10
    while module._children() - before and time.monotonic() < late:
        time.sleep(0.05)
    assert module._children() <= before


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batch_size": 0}, "batch_size must be 1 or more"),
        ({"consumer_rate": 0.0}, "consumer_rate must be"),
        ({"candidates": []}, "candidates must be"),
        ({"candidates": [-1]}, "candidates must be"),
        ({"seconds": 0}, "seconds must be"),
    ],
)
def test_arguments_without_meaning_are_refused(options, error):
    with pytest.raises(ValueError, match=error):
        trainfast.find_workers(fast, **options)


def test_what_is_no_data_is_refused():
    with pytest.raises(TypeError, match="Dataset or a DataLoader, got a int"):
        trainfast.find_workers(3)
    with pytest.raises(ValueError, match="at least one batch"):
        trainfast.find_workers(TensorDataset(torch.empty(0, 2)))


def test_keyword_arguments_are_those_that_torch_accepts():
    for workers in (0, 2):
        options = trainfast.loader_kwargs(workers, batch_size=4, prefetch_factor=3)
        loader = DataLoader(fast, **options)
        assert loader.num_workers == workers and loader.batch_size == 4
        assert loader.prefetch_factor == (3 if workers else None)
    assert 1 <= trainfast.loader_kwargs()["num_workers"] <= 4
    with pytest.raises(ValueError, match="num_workers must be"):
        trainfast.loader_kwargs(-1)


def test_guide_s_function_prints_and_returns_the_best(capsys):
    assert trainfast.benchmark_dataloader(fast, [0, 1], batch_size=32) == 0
    assert "num_workers=0" in capsys.readouterr().out


def test_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "workers_of.py").write_text(
        "import torch\n"
        "data = torch.utils.data.TensorDataset(torch.randn(200, 4))\n"
        "def make():\n    return data\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("data", "make"):
        words = ["find-workers", f"workers_of:{name}", "--json"]
        assert cli.main([*words, "--candidates", "0", "--seconds", "5"]) == 0
        assert json.loads(capsys.readouterr().out)["best"] == 0
    with pytest.raises(SystemExit) as end:
        cli.main(["find-workers", "workers_of:missing"])
    assert end.value.code == 2 and "workers_of:missing" in capsys.readouterr().err
