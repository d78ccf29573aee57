"""examples/trajectories.py: its plays and graphs, and that all ways train alike."""

import importlib
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("lightning")
pytest.importorskip("tensorboard")

SCRIPT = Path(__file__).parents[2] / "examples" / "trajectories.py"
MODULES = ("trajectories", "play_model", "play_batches", "play_simulation")
TINY = ["--preset", "tiny", "--device", "cpu"]
TAGS = {
    *("train_loss", "val_loss", "val_ade", "val_minADE", "val_fde", "learning_rate"),
}
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
CPU = torch.device("cpu")


def imported(monkeypatch, name):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    for module in MODULES:
        monkeypatch.delitem(sys.modules, module, raising=False)
    return importlib.import_module(name)


@pytest.fixture
def simulation(monkeypatch):
    return imported(monkeypatch, "play_simulation")


@pytest.fixture
def batches(monkeypatch):
    return imported(monkeypatch, "play_batches")


@pytest.fixture
def example(monkeypatch):
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        yield imported(monkeypatch, "trajectories")
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, handler)  # Lightning ignores Ctrl-C after the first


# ---- Plays ---------------------------------------------------------------------------


def test_plays_are_the_same_for_a_seed_and_move_as_players_do(simulation):
    tracks = simulation.simulate(300, 15, seed=3)
    assert tracks.shape == (300, 15, 23, 2) and tracks.dtype == np.float32
    assert np.array_equal(tracks, simulation.simulate(300, 15, seed=3))
    assert not np.array_equal(tracks, simulation.simulate(300, 15, seed=4))
    speed = np.diff(tracks, axis=1) / simulation.SECONDS
    size = np.linalg.norm(speed, axis=-1)
    assert 1 < size[:, :, :22].mean() < 8 and size[:, :, :22].max() < 20
    assert size[:, :, 22].mean() > size[:, :, :22].mean()  # the ball
    change = np.linalg.norm(np.diff(speed, axis=1), axis=-1) / simulation.SECONDS
    assert change[:, :, :22].mean() < 15  # metres a second, a second: inertia


def test_players_keep_away_from_one_another(simulation, monkeypatch):
    def nearest():
        last = simulation.simulate(200, 15, seed=1)[:, -1, :22]
        gap = np.linalg.norm(last[:, :, None] - last[:, None], axis=-1)
        return np.quantile((gap + 1e9 * np.eye(22)).min(2), 0.05)

    apart = nearest()
    monkeypatch.setattr(simulation, "_PUSH", 0 * simulation._PUSH)
    assert apart > 1.1 * nearest()


# ---- Graphs --------------------------------------------------------------------------


def edges_of(graph):
    """{(neighbour, centre, kind): distance}"""
    rows = zip(graph["edge_index"].T, graph["edge_type"], graph["edge_attr"][:, 0])
    edges = {(int(j), int(i), int(kind)): float(d) for (j, i), kind, d in rows}
    assert len(edges) == len(graph["edge_type"])
    return edges


@pytest.mark.slow
def test_graphs_are_the_same_with_and_without_a_cache(batches, tmp_path):
    plays = batches.Plays(40, 8, tmp_path, seed=5)
    plays.build_cache(None, fresh=False)
    order = batches.Order(plays.n_train, 24, seed=2)
    order.set_epoch(1)
    built = batches.BuiltPlays(plays)
    cache = batches.trainfast.graph_cache.open(plays.cache(None))
    for i in range(len(plays)):
        one, other = built[i], cache[i]
        edges = edges_of(one)
        assert edges == pytest.approx(edges_of(other), rel=1e-6)
        assert {kind for _, _, kind in edges} == {0, 1}
    loaders = (
        batches.built(plays, order, 8, 0),
        batches.cached(plays, order, 8, None, CPU),
    )
    ones, others = map(list, loaders)
    assert len(ones) == len(others) == 3
    for one, other in zip(ones, others, strict=True):
        assert edges_of(one) == pytest.approx(edges_of(other), rel=1e-6)
        for key in ("pos", "velocity", "team", "frame", "y"):
            assert one[key].dtype == other[key].dtype
            assert torch.equal(one[key], other[key])


def test_cache_with_a_cap_has_the_nearest_neighbours_of_each_node(batches, tmp_path):
    plays = batches.Plays(4, 2, tmp_path, seed=5)
    plays.build_cache(10, fresh=False)
    graph = batches.trainfast.graph_cache.open(plays.cache(10))[2]
    spatial = graph["edge_index"][:, graph["edge_type"] == 0]
    assert np.bincount(spatial[1]).max() == 10
    pos, frame = graph["pos"], graph["frame"]
    for centre in range(len(pos)):
        gap = np.linalg.norm(pos - pos[centre], axis=1)
        near = [i for i in np.argsort(gap) if frame[i] == frame[centre] and i != centre]
        near = [i for i in near if gap[i] <= batches.RADIUS][:10]
        assert set(spatial[0, spatial[1] == centre]) == set(near)


def test_order_has_no_play_twice_and_another_order_in_each_epoch(batches):
    order = batches.Order(50, 30, seed=1)
    first = list(order)
    assert len(set(first)) == len(first) == len(order) == 30
    assert first == list(order)
    order.set_epoch(1)
    assert first != list(order)


# ---- Training ------------------------------------------------------------------------


def test_network_does_not_mix_graphs_of_a_batch(batches, tmp_path):
    plays = batches.Plays(4, 2, tmp_path, seed=1)
    graphs = [batches.BuiltPlays(plays)[i] for i in range(4)]
    torch.manual_seed(0)
    network = importlib.import_module("play_model").PlayNet(8, 2, modes=3)
    together, scores = network(batches.collate(graphs))
    assert together.shape == (4 * 23, 3, 10, 2) and scores.shape == (4 * 23, 3)
    alone = torch.cat([network(batches.collate([graph]))[0] for graph in graphs])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_all_ways_train_alike_and_write_their_files(example, capsys, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command = [sys.executable, SCRIPT, *TINY, "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=ONE_THREAD)
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line[:22].strip(): line[22:].split() for line in done.stdout.splitlines()}
    slugs = {
        "no cache": "no-cache",
        "cache": "cache",
        "cache + half precision": "cache-half-precision",
        "cache, 10 neighbours": "cache-10-neighbours",
    }
    losses = {}
    for name, slug in slugs.items():
        speed, _, ms, waiting, share, memory, loss, _ = rows[name]
        assert float(speed) == pytest.approx(1e3 / float(ms), rel=0.02)
        assert 0 < float(waiting) < float(ms) and share.endswith("%")
        assert float(memory) > 0
        state = torch.load(tmp_path / f"{slug}.ckpt", weights_only=True)
        losses[name] = state["losses"]
        assert len(losses[name]) == 3 * 4 * 3 and state["global_step"] == 3 * 4
        assert np.mean(losses[name][-9:]) < 0.9 * np.mean(losses[name][:9])
        assert float(loss) == pytest.approx(np.mean(losses[name][-50:]), abs=1e-3)
        logs = tmp_path / "lightning_logs" / slug
        assert len([*logs.glob("events.*")]) == 1
        events = EventAccumulator(str(logs))
        events.Reload()
        assert set(events.Tags()["scalars"]) == TAGS
        assert [event.step for event in events.Scalars("train_loss")] == [*range(12)]
        assert [event.step for event in events.Scalars("val_ade")] == [3, 7, 11]
        first, *_, last = events.Scalars("val_minADE")
        assert last.value < first.value
    assert losses["cache"] == pytest.approx(losses["no cache"], rel=1e-5)
    assert losses["cache + half precision"] == pytest.approx(losses["cache"], rel=5e-2)
    assert losses["cache + half precision"] != losses["cache"]
    assert losses["cache, 10 neighbours"] != losses["cache"]
    assert float(rows["cache, 10 neighbours"][5]) < float(rows["cache"][5])  # memory
    assert "Losses with and without the cache are the same, to" in done.stdout
    assert "of an iteration is building graphs" in done.stdout
    assert "targets('competition'): 0 of 5 are met, not ade" in done.stdout
    assert "these plays are simulated" in done.stdout
    assert (tmp_path / "plays.png").read_bytes().startswith(b"\x89PNG")

    example.main([*TINY, "--out", str(tmp_path), "--resume"])
    again, errors = capsys.readouterr()
    assert errors == ""
    assert "0 graphs built and 300 found" in again
    table = {line[:22].strip(): line[22:].split() for line in again.splitlines()}
    for name in slugs:  # nothing was left to train
        assert table[name] == ["-"] * 5 + rows[name][5:]


def whole_state(path):
    state = torch.load(path, weights_only=True)
    optimizer = state["optimizer_states"][0]["state"]
    tensors = {f"{i}.{k}": v for i, one in optimizer.items() for k, v in one.items()}
    return {**state["state_dict"], **tensors}, state


@pytest.mark.slow
@pytest.mark.parametrize("way", ["none", "half"])
def test_stopped_training_goes_on_with_the_same_bits(
    example, monkeypatch, tmp_path, way
):
    arguments = [*TINY, "--ways", way, "--out"]
    whole, parts, at_once = (tmp_path / name for name in ("whole", "parts", "at_once"))
    example.main([*arguments, str(whole)])

    step, made = example.Forecaster.training_step, []

    def stop_in_second_turn(model, batch, number):
        made.append(number)
        if len(made) == 12 + 7:
            raise KeyboardInterrupt
        return step(model, batch, number)

    with monkeypatch.context() as patch:
        patch.setattr(example.Forecaster, "training_step", stop_in_second_turn)
        with pytest.raises(SystemExit, match="with --resume goes on"):
            example.main([*arguments, str(parts)])
    (checkpoint,) = parts.glob("*.ckpt")
    assert whole_state(checkpoint)[1]["epoch"] == 1

    made.clear()
    monkeypatch.setattr(
        example.Forecaster,
        "training_step",
        lambda model, *rest: made.append(0) or step(model, *rest),
    )
    example.main([*arguments, str(parts), "--resume"])
    assert len(made) == 2 * 12

    args = example.parse([*arguments, str(at_once)])
    preset = example.PRESETS["tiny"]
    at_once.mkdir()
    plays = example.Plays(preset.plays, preset.batch, at_once, args.seed)
    plays.build_cache(None, fresh=False)
    example.Run(example.WAYS[way], plays, args).train(preset.turns)

    want, first = whole_state(whole / checkpoint.name)
    for folder in (parts, at_once):
        got, state = whole_state(folder / checkpoint.name)
        assert state["losses"] == first["losses"]
        assert state["global_step"] == first["global_step"] == 12
        assert got.keys() == want.keys() and len(got) > 40
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), name


def test_losses_that_differ_are_an_error(example):
    class Run:
        def __init__(self, *losses):
            self.model = type("Model", (), {"losses": losses})

    near = {"none": Run(1.0, 2.0), "cache": Run(1.0, 2.0 + 2e-5)}
    assert example.check_losses(near).endswith("are the same, to 1e-05.")
    assert example.check_losses({"cache": Run(1.0)}) == ""
    for other in (2.1, float("nan")):
        with pytest.raises(SystemExit, match="must not depend on the cache, got"):
            example.check_losses({"none": Run(1.0, 2.0), "cache": Run(1.0, other)})


def test_note_says_what_the_cache_and_half_precision_gain(example):
    class Run:
        def __init__(self, *speed):
            self.speed = lambda: speed

    runs = {"none": Run(0.04, 0.03), "cache": Run(0.01, 0.0), "half": Run(0.02, 0.0)}
    note = example.note(runs)
    assert "Without a cache 75% of an iteration is building graphs" in note
    assert "the cache makes it 4.0 times\nfaster" in note
    assert "With half precision it is 0.50 times as fast" in note
    assert example.note({"cache": Run(0.01, 0.0)}) == ""


@pytest.mark.parametrize("package", ["lightning", "tensorboard"])
def test_missing_package_is_named(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as stop:  # Python prints it, and exits with 1
        imported(monkeypatch, "trajectories")
    (said,) = stop.value.args
    assert "pip install lightning tensorboard" in said
    assert f"needs {package}" in said
