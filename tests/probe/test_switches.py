"""Each switch, entered and left: afterwards everything is as it was."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainfast.torch.data.batches import tensors
from trainfast.torch.probe import forward, loaders, training
from trainfast.torch.probe.hooks import keep_batch
from trainfast.torch.probe.loop import Loop
from trainfast.torch.probe.settings import settings


def always(phase):
    return 0.5


class Convolutions(torch.nn.Module):
    """Takes the rows of make_loop()'s batches for images of 2 x 2."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Conv2d(1, 4, 2, padding=1)
        self.last = torch.nn.Conv2d(4, 2, 3)

    def forward(self, x):
        x = x.view(len(x), 1, 2, 2) if x.dim() == 2 else x
        return self.last(self.inner(x).relu()).flatten(1)


class Graph(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 2)

    def forward(self, x, edge_index):
        return super().forward(x).index_select(0, edge_index[0])


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x)[0]


def make_loop(model=None, optimizer=torch.optim.AdamW, workers=0, dtype=torch.float32):
    loop = Loop("script.py")
    loop.model = model or torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
    )
    loop.model.to(dtype)
    loop.optimizers = [optimizer(loop.model.parameters(), lr=0.1)]
    data = TensorDataset(torch.randn(12, 4, dtype=dtype), torch.arange(12))
    loop.loader = DataLoader(data, batch_size=4, num_workers=workers)
    loop.batches = list(DataLoader(data, batch_size=4))
    return loop


def train(loop, steps=2):
    for x, y in loop.batches[:steps]:
        loss = torch.nn.functional.cross_entropy(loop.model(x), y % 2)
        loop.optimizers[0].zero_grad()
        loss.backward()
        optimizer = loop.optimizers[0]
        loop.switch.step(loop, type(optimizer).step, (optimizer,), {})


def state_of(loop):
    groups = [
        {k: v for k, v in g.items() if k != "params"}
        for g in loop.optimizers[0].param_groups
    ]
    return copy.deepcopy((loop.model.state_dict(), groups))


def equal(one, other):
    if torch.is_tensor(one):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


SWITCHES = {
    "no step": training.NoOptimizerStep,
    "fused": training.FusedOptimizer,
    "trainfast": training.TrainfastOptimizer,
    "attention weights": training.NoAttentionWeights,
    "bfloat16": lambda: forward.Autocast(torch.bfloat16),
    "channels-last": forward.ChannelsLast,
    "compile": forward.Compiled,
    "cached": loaders.CachedBatches,
    "doubled": training.DoubledBatch,
}


@pytest.mark.parametrize("name", SWITCHES)
def test_entering_and_leaving_changes_nothing(name):
    models = {"attention weights": Attention, "channels-last": Convolutions}
    loop = make_loop(models[name]() if name in models else None)
    if name != "attention weights":
        train(loop)
    switch = SWITCHES[name]()
    assert switch.possible(loop, always)
    before, attend = state_of(loop), torch.nn.MultiheadAttention.forward
    strides = [p.stride() for p in loop.model.parameters()]
    hooks = len(loop.model._forward_hooks), len(loop.model._forward_pre_hooks)
    switch.enter(loop)
    switch.leave(loop)
    assert equal(state_of(loop), before)
    assert torch.nn.MultiheadAttention.forward is attend
    assert [p.stride() for p in loop.model.parameters()] == strides
    assert "forward" not in vars(loop.model)
    assert (len(loop.model._forward_hooks), len(loop.model._forward_pre_hooks)) == hooks


@pytest.mark.parametrize("name", ["fused", "trainfast"])
def test_optimizers_step_under_a_switch_as_without(name):
    one, other = make_loop(), make_loop()
    other.model.load_state_dict(one.model.state_dict())
    other.batches = one.batches
    other.switch = SWITCHES[name]()
    other.switch.enter(other)
    train(one, 1)
    train(other, 1)
    for p, q in zip(one.model.parameters(), other.model.parameters()):
        torch.testing.assert_close(p, q)


def test_no_optimizer_step_leaves_parameters():
    loop = make_loop()
    before = [p.clone() for p in loop.model.parameters()]
    loop.switch = training.NoOptimizerStep()
    train(loop)
    assert equal(before, [p.data for p in loop.model.parameters()])


@pytest.mark.parametrize("by_name", [False, True])
def test_no_optimizer_step_runs_a_closure_once(by_name):
    loop, runs = make_loop(), []
    optimizer = loop.optimizers[0]

    def closure():
        runs.append(torch.is_grad_enabled())
        return 3.0

    args, kwargs = ((), {"closure": closure}) if by_name else ((closure,), {})
    with torch.no_grad():
        loss = training.NoOptimizerStep().step(loop, None, (optimizer, *args), kwargs)
    assert (loss, runs) == (3.0, [True])


def test_step_of_lbfgs_is_no_bound():
    """Such a step runs forward and backward passes up to 20 times."""
    loop = make_loop(optimizer=torch.optim.LBFGS)
    assert not training.NoOptimizerStep().possible(loop, always)


def test_optimizer_with_a_small_share_is_left_alone():
    loop = make_loop()
    for switch in (training.FusedOptimizer(), training.TrainfastOptimizer()):
        assert not switch.possible(loop, lambda phase: 0.01)


def test_fused_optimizer_is_not_fused_again():
    loop = make_loop(optimizer=lambda p, lr: torch.optim.AdamW(p, lr, fused=True))
    assert not training.FusedOptimizer().possible(loop, always)


def test_float32_trains_and_returns_to_float64():
    loop = make_loop(dtype=torch.float64)
    train(loop)
    switch = forward.Float32()
    assert switch.possible(loop, always)
    loop.switch = switch
    switch.enter(loop)
    try:
        batch = switch.next_batch(loop, iter(loop.batches), next)
        assert batch[0].dtype == torch.float32 and batch[1].dtype == torch.int64
        assert torch.zeros(2).double().dtype == torch.float32
        out = loop.model(batch[0])
        assert (
            out.dtype == loop.model(batch[0].to(torch.float64)).dtype == torch.float32
        )
        out.sum().backward()
        loop.optimizers[0].step()
    finally:
        switch.leave(loop)
    assert torch.zeros(2).double().dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32
    assert {p.dtype for p in loop.model.parameters()} == {torch.float64}
    train(loop)
    assert not forward.Float32().possible(make_loop(), always)


@pytest.mark.parametrize("fused", [False, True])
def test_channels_last_trains_as_without(fused):
    def optimizer(params, lr):
        return torch.optim.AdamW(params, lr, fused=fused)

    one = make_loop(Convolutions(), optimizer)
    other = make_loop(copy.deepcopy(one.model), optimizer)
    other.batches = one.batches
    train(one)
    train(other)
    other.switch = forward.ChannelsLast()
    other.switch.enter(other)
    moved = copy.deepcopy(other.model).to(memory_format=torch.channels_last)
    for p, q in zip(other.model.parameters(), moved.parameters()):
        assert p.stride() == q.stride()  # the output's layout follows from them
    seen = []
    other.model.inner.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    images = torch.randn(2, 1, 2, 2)
    other.model(images.expand(2, 1, 2, 2))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    train(one)
    train(other)
    other.switch.leave(other)
    train(one)
    train(other)
    for p, q in zip(one.model.parameters(), other.model.parameters()):
        torch.testing.assert_close(p, q)
        assert p.stride() == q.stride()


def test_channels_last_is_for_convolutions_over_images():
    assert not forward.ChannelsLast().possible(make_loop(), always)
    moved = Convolutions().to(memory_format=torch.channels_last)
    assert not forward.ChannelsLast().possible(make_loop(moved), always)


@pytest.mark.slow
def test_compiled_forward_computes_the_same_and_its_cost_is_known():
    loop = make_loop()
    x = loop.batches[0][0]
    expected = loop.model(x)
    loop.switch = forward.Compiled()
    loop.switch.enter(loop)
    torch.testing.assert_close(loop.model(x), expected)
    train(loop)
    assert loop.once["compile"] > 0.01
    loop.switch.leave(loop)
    assert "forward" not in vars(loop.model)


@pytest.mark.parametrize("capability, dtype", [((7, 5), "highest"), ((8, 6), "high")])
def test_tf32_is_for_gpus_that_have_it(capability, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    (setting,) = (s for s in settings() if s.name == "tf32")
    assert setting.wanted("highest") == dtype
    assert setting.wanted("medium") == "medium"


@pytest.mark.parametrize("name", ["anomaly", "threads", "one thread", "deterministic"])
def test_setting_is_offered_only_where_it_costs(name):
    (setting,) = (s for s in settings() if s.name == name)
    loop, before = make_loop(), setting.read()
    slow = {"threads": 1, "one thread": 2}.get(name, True)
    if name == "threads" and setting.wanted(1) == 1:
        pytest.skip("one core")
    if name == "one thread" and torch.cuda.is_available():
        assert not setting.possible(loop, always)
        return
    setting.write(slow)
    try:
        assert setting.possible(loop, always)
        setting.enter(loop)
        assert setting.read() == setting.wanted(slow)
        assert not setting.possible(loop, always)
        setting.leave(loop)
        assert setting.read() == slow
    finally:
        setting.write(before)


# ---- Batches -------------------------------------------------------------------------


def test_cached_batch_that_the_script_writes_into_is_renewed():
    loop = make_loop()
    switch = loaders.CachedBatches()
    switch.enter(loop)
    for _ in range(2 * len(loop.batches)):
        x, _ = switch.next_batch(loop, None, None)
        x.mul_(0)
    x, _ = switch.next_batch(loop, None, None)
    assert x.abs().sum() > 0


def test_doubled_batch_holds_each_sample_twice():
    loop = make_loop()
    switch = training.DoubledBatch()
    switch.enter(loop)
    x, y = switch.next_batch(loop, None, None)
    assert x.shape == (8, 4) and torch.equal(x[:4], x[4:]) and torch.equal(y[:4], y[4:])


def test_doubled_batch_without_a_loader_is_that_of_the_model():
    loop = make_loop()
    loop.loader, loop.batches = None, []
    switch = training.DoubledBatch()
    assert switch.possible(loop, always)
    switch.enter(loop)
    assert loop.model(torch.ones(3, 4)).shape == (6, 2)
    with torch.no_grad():  # an evaluation
        assert loop.model(torch.ones(3, 4)).shape == (3, 2)
    switch.leave(loop)
    assert loop.model(torch.ones(3, 4)).shape == (3, 2)
    loop.optimizers *= 2  # another model is fed as well
    assert not switch.possible(loop, always)


def test_one_graph_of_a_whole_data_set_is_no_batch():
    loop = make_loop(Graph())
    loop.loader, loop.batches = None, []
    loop.switch = training.DoubledBatch()
    loop.switch.enter(loop)
    graph = torch.ones(5, 4), torch.zeros(2, 9, dtype=torch.long)
    for arguments in (graph, (None, object())):
        with pytest.raises(ValueError, match="no batch of one length"):
            loop.model(*arguments)


def test_doubled_batch_of_a_mapping_and_a_graph():
    batch = {"ids": torch.ones(3, 5), "name": "x", "lr": torch.tensor(0.1)}
    doubled = training._twice(batch)
    assert doubled["ids"].shape == (6, 5) and doubled["lr"].dim() == 0
    data = pytest.importorskip("torch_geometric.data")
    graphs = [data.Data(x=torch.ones(2, 1)) for _ in range(3)]
    assert training._twice(data.Batch.from_data_list(graphs)).num_graphs == 6


def graph_loop(size=7, **options):
    data = pytest.importorskip("torch_geometric.data")
    loaders_of_pyg = pytest.importorskip("torch_geometric.loader")
    graphs = [
        data.Data(x=torch.full((2 + i % 3, 4), float(i)), y=torch.tensor([i]))
        for i in range(size)
    ]
    loop = make_loop()
    loop.loader = loaders_of_pyg.DataLoader(graphs, batch_size=3, **options)
    return loop


def test_graph_cache_gives_batches_of_the_data_sets_graphs():
    loop = graph_loop(follow_batch=["x"])
    switch = loaders.GraphCache()
    assert switch.possible(loop, always)
    seen = set()
    for _ in range(2):  # blocks
        switch.enter(loop)
        for _ in range(5):  # more than the epoch's two whole batches
            batch = switch.next_batch(loop, None, None)
            assert batch.num_graphs == 3 and "x_batch" in batch
            for graph in batch.to_data_list():
                i = int(graph.y)
                assert torch.equal(graph.x, torch.full((2 + i % 3, 4), float(i)))
                seen.add(i)
        switch.leave(loop)
    assert seen == set(range(7))


def test_graph_cache_is_filled_for_a_short_time_only(monkeypatch):
    class Slow(list):
        taken = 0

        def __getitem__(self, i):
            Slow.taken += 1
            return super().__getitem__(i)

    loop = graph_loop(size=50)
    loop.loader = type(loop.loader)(Slow(loop.loader.dataset), batch_size=3)
    monkeypatch.setattr(loaders, "_BUILD_SECONDS", 0.0)
    switch = loaders.GraphCache()
    switch.enter(loop)
    assert switch.next_batch(loop, None, None).num_graphs == 3
    assert Slow.taken == 3  # a batch is needed in any case


def test_graph_cache_needs_a_loader_of_graphs_that_is_not_its_own(tmp_path):
    from trainfast.torch.pyg import DataLoader as CacheLoader
    from trainfast.torch.pyg import cached

    assert not loaders.GraphCache().possible(make_loop(), always)
    loop = graph_loop()
    graphs = loop.loader.dataset
    loop.loader = CacheLoader(cached(graphs, tmp_path / "c", progress=False), 3)
    assert not loaders.GraphCache().possible(loop, always)
    loop.loader = None
    assert not loaders.GraphCache().possible(loop, always)


def padded(lengths, columns, pad=0):
    ids = torch.full((len(lengths), columns), pad)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.arange(1, length + 1)
    return ids


def test_padding_is_cut_to_the_longest_row():
    ids = padded([3, 5, 2], 16)
    batch = {"ids": ids, "mask": (ids > 0).long(), "labels": torch.ones(3)}
    loop = make_loop()
    loop.batches = [batch]
    switch = training.TrimmedPadding()
    assert switch.possible(loop, always)
    cut = switch.next_batch(loop, iter([batch]), next)
    assert cut["ids"].shape == (3, 5) and cut["mask"].shape == (3, 5)
    assert torch.equal(cut["ids"], ids[:, :5]) and cut["labels"].shape == (3,)
    assert cut["ids"].view(-1).shape == (15,)  # as a loss over tokens asks for


def test_padding_on_the_left_and_full_rows_are_left_alone():
    loop = make_loop()
    for ids in (padded([16, 3], 16), padded([3, 2], 16).flip(1)):
        loop.batches = [{"ids": ids}]
        assert not training.TrimmedPadding().possible(loop, always)


def test_tensors_of_a_batch_are_found_in_any_nesting():
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert [t.numel() for t in tensors([a, {"x": (b, "text")}, c])] == [1, 2, 3]


# ---- Loaders -------------------------------------------------------------------------


def test_workers_give_the_same_batches_without_end():
    loop = make_loop()
    switch = loaders.Workers(1)
    assert switch.possible(loop, always)
    assert not loaders.Workers(0).possible(loop, always)
    original = type(iter(loop.loader)).__mro__[1].__next__
    given = [switch.next_batch(loop, None, original)[1] for _ in range(4)]
    assert torch.equal(given[0], given[3])
    assert torch.equal(torch.cat(given[:3]), torch.arange(12))


def next_of(switch, loop, loader):
    """What next(iter(loader)) gives under a switch."""
    return switch.next_batch(loop, switch.iterate(loop, loader, iter), next)


def test_kept_loader_goes_on_where_it_was_left():
    loop = make_loop()
    loop.restarts = [0, 1, 2, 3]  # a new iterator for every step
    switch = loaders.KeptLoader()
    assert switch.possible(loop, always)
    for _ in range(2):  # two blocks
        switch.enter(loop)
        seen = [next_of(switch, loop, loop.loader)[1] for loop.steps in range(6)]
        assert torch.equal(torch.cat(seen), torch.arange(12).repeat(2))


@pytest.mark.parametrize("workers", [0, 1])
def test_each_loader_is_kept_apart(workers):
    """As in semi-supervised training, also where one function builds both."""
    loop = make_loop(workers=workers)
    loop.restarts = [0, 1, 2, 3]
    other = DataLoader(torch.arange(100, 106), batch_size=2, num_workers=workers)
    switch = loaders.KeptLoader()
    switch.enter(loop)
    seen, others = [], []
    for loop.steps in range(4):
        seen.append(next_of(switch, loop, loop.loader)[1])
        others.append(next_of(switch, loop, other))
    assert torch.equal(torch.cat(seen)[:12], torch.arange(12))
    assert torch.cat(others).tolist() == [100, 101, 102, 103, 104, 105, 100, 101]


def test_loader_that_is_built_anew_for_each_epoch_is_kept():
    loop = make_loop()
    switch = loaders.KeptLoader()
    for loop.steps in (0, 3, 6):
        iterator = switch.iterate(loop, make_loop().loader, iter)
        for _ in range(3):
            switch.next_batch(loop, iterator, next)
    assert len(switch.kept) == 1


def test_epoch_that_began_before_the_switch_goes_on():
    loop = make_loop()
    iterator, switch = iter(loop.loader), loaders.KeptLoader()
    next(iterator)
    switch.enter(loop)
    assert switch.next_batch(loop, iterator, next)[1].tolist() == [4, 5, 6, 7]


def test_epochs_that_a_script_cuts_short_stay_as_long():
    loop = make_loop()
    switch = loaders.KeptLoader()
    switch.enter(loop)
    for loop.steps in range(0, 8, 2):
        iterator = switch.iterate(loop, loop.loader, iter)
        assert all(len(switch.next_batch(loop, iterator, next)[1]) for _ in range(2))


def test_kept_loader_of_unknown_length_is_read_to_its_end():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(3))

    loop = make_loop()
    loop.loader = DataLoader(Stream(), batch_size=None)
    switch = loaders.KeptLoader()
    switch.enter(loop)
    given = [next_of(switch, loop, loop.loader) for loop.steps in range(3)]
    assert given == [0, 1, 2]
    loop.steps = 3
    with pytest.raises(StopIteration):  # as the script's own loop ends
        next_of(switch, loop, loop.loader)
    loop.steps = 4
    assert next_of(switch, loop, loop.loader) == 0


def test_period_is_known_when_the_script_begins_again():
    """Otherwise starts of workers inside of blocks would be counted as events, too."""
    loop = make_loop()
    assert loop.period() == 0
    loop.restarts = [0, 3, 6, 9]
    assert loop.period() == 3
    loop.restarts.clear()
    assert loop.period() == 3
    loop.restarts = [12]
    assert loop.period() == 3


def test_loader_that_stays_alive_needs_no_switch():
    loop = make_loop()
    loop.restarts = [0, 3, 6]
    assert not loaders.KeptLoader().possible(loop, always)


# ---- Two optimizers ------------------------------------------------------------------


def test_backward_passes_are_for_the_optimizer_that_steps_next():
    """As in a GAN: the second pass reaches the first model, whose step comes later."""
    loop = make_loop()
    first, second = loop.optimizers[0], torch.optim.SGD([torch.ones(1)], lr=0.1)
    loop.optimizers = [first, second]
    loop.order.extend([first, None, None, second, None, first])
    switch = training.NeededGradients()
    assert switch._targets(loop) == [second, second, first]
    assert switch.possible(loop, always)
    switch.enter(loop)
    given = []
    for _ in range(3):
        switch.backward(loop, lambda **kwargs: given.append(kwargs["inputs"]), (), {})
    assert [len(inputs) for inputs in given] == [0, 0, 6]
    switch.step(loop, lambda *args: None, (first,), {})
    assert switch.at == 0


def test_one_optimizer_needs_all_its_gradients():
    loop = make_loop()
    optimizer = loop.optimizers[0]
    loop.order.extend([optimizer, None, optimizer, None, optimizer])
    assert not training.NeededGradients().possible(loop, always)


def test_loop_without_an_optimizer_has_no_passes_to_tell_apart():
    loop = make_loop()
    loop.optimizers = []
    loop.order.extend([None, None, None])
    assert not training.NeededGradients().possible(loop, always)


def test_first_batches_are_kept_and_one_that_cannot_be_copied_ends_it():
    loop = Loop("script.py")
    for number in range(10):
        keep_batch(loop, (torch.full((2,), float(number)),))
        assert loop.keeps_batches == (number < 7)
    assert [batch[0][0] for batch in loop.batches] == list(range(8))

    uncopied = Loop("script.py")
    keep_batch(uncopied, torch.zeros(1))
    keep_batch(uncopied, (line for line in "no copy"))
    assert uncopied.batches == [] and not uncopied.keeps_batches
