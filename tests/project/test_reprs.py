"""The repr of every public class: settings in a line, no wait for a GPU, no error."""

import pickle
from importlib.util import find_spec

import numpy as np
import pytest

pytest.importorskip("torch_geometric", reason="some of the classes are adapters")

import torch
from torch_geometric.data import Data

import trainfast
import trainfast.numpy
from tests.graph_samples import graph, quiet
from tests.project.public_names import MODULES, public_classes
from trainfast import graph_cache as gc
from trainfast.report import Report, one_line
from trainfast.torch import pyg

CLASSES = public_classes()


class Far:
    """An array that must not be read: it stands for one on a GPU."""

    dtype, shape = "float32", (2, 3)

    def __repr__(self):
        raise AssertionError("the array was read")

    __array__ = __float__ = __int__ = __iter__ = __len__ = __str__ = __repr__


def params():
    return [torch.nn.Parameter(torch.ones(3))]


def cache(folder):
    quiet(folder / "cache", range(5), graph)
    return gc.open(folder / "cache")


def writer(folder):
    made = gc.Writer(folder / "writer")
    made.append(graph(3))
    made.close()
    return made


def grad_scaler(kind):
    made = kind("cpu", init_scale=8.0, hysteresis=2)
    made._scale = made._hysteresis_tracker = Far()
    return made


def cuda_scaler(kind):
    with pytest.warns(FutureWarning, match="deprecated"):
        return kind(enabled=False)


def accumulator(kind):
    made = kind(torch.optim.SGD(params()), 4, max_grad_norm=1.0)
    made.grad_norm = Far()
    return made


def scheduler(kind):
    optimizer = trainfast.AdamW(params())
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    made = kind(rates, trainfast.GradScaler("cpu"))
    made._pending = [Far], (), {}
    return made


def numpy_adamw(kind):
    made = kind([np.ones(3, np.float32)], lr=0.5, state_dtype="float32")
    made.betas = (np.float64(0.5), 0.75)
    return made


def cached(folder):
    graphs = [Data(x=torch.ones(2, 2)) for _ in range(4)]
    return pyg.cached(graphs, folder / "pyg", progress=False)


# One example of each class, of the class and a folder, and what its repr begins with.
EXAMPLES = {
    "graph_cache.Cache": (
        lambda _, f: cache(f),
        r"Cache(path='.+', graphs=5, fields=3",
    ),
    "graph_cache.Subset": (lambda _, f: cache(f)[1:3], r"Subset(graphs=2, path='.+')"),
    "graph_cache.Loader": (
        lambda kind, f: kind(cache(f), 2, pad_to="max", sampler=[Far, 1]),
        "Loader(graphs=5, batch_size=2, shuffle=False, drop_last=False, sampler=[Far, 1"
        "], rank=0, world_size=1, prefetch=2, threads=1, output='dict', pad_to='max')",
    ),
    "graph_cache.Writer": (
        lambda _, f: writer(f),
        "Writer(path='.+', appended=1, committed=1, closed=True)",
    ),
    "graph_cache.Counted": (
        lambda kind, _: kind({"x": Far()}, {("nodes", ""): 2}),
        "Counted(keys=['x'], counts=[\"('nodes', '')\"])",
    ),
    "graph_cache.Rule": (lambda kind, _: kind(add="nodes"), "Rule(cat_dim='auto', add"),
    "graph_cache.Schema": (lambda _, f: cache(f).schema, "3 fields, 2 counts"),
    "graph_cache.BuildReport": (lambda _, f: quiet(f / "c", [graph(2)]), ".+/c\nwhat"),
    "graph_cache.VerifyReport": (
        lambda _, f: cache(f).verify(),
        ".+: 5 graphs checked",
    ),
    "graph_cache.BuildError": (lambda kind, _: kind("no", 3), "BuildError('no')"),
    "graph_cache.StaleCacheError": (
        lambda kind, _: kind("p", ["input 3"]),
        "StaleCacheError('the cache at p is stale",
    ),
    "metrics.TargetCheck": (
        lambda kind, _: kind("competition", (("ade", 0.1, 0.2, True),)),
        "Targets competition: passed",
    ),
    "metrics.Targets": (
        lambda *_: trainfast.targets("competition"),
        "Targets competition",
    ),
    "metrics.TrajectoryResult": (
        lambda *_: trainfast.trajectory_metrics(np.ones((1, 2, 2)), np.ones((1, 2, 2))),
        "Trajectories of 1 agents, definition seed (one mode)",
    ),
    "numpy.AdamW": (
        lambda kind, _: numpy_adamw(kind),
        "AdamW(params=1, lr=0.5, betas=(0.5, 0.75), eps=1e-08, weight_decay=0.01, "
        "decoupled_weight_decay=True, state_dtype=float32, master_weights=False, "
        "step_count=0)",
    ),
    "numpy.AttentionGradients": (
        lambda kind, _: kind(Far(), None, Far(), None, None, None),
        "AttentionGradients(dq='float32[2, 3]', dv='float32[2, 3]')",
    ),
    "numpy.LossScaler": (
        lambda kind, _: kind(8.0, max_scale=16.0),
        "LossScaler(scale=8.0, growth_factor=2.0, backoff_factor=0.5, "
        "growth_interval=2000, max_scale=16.0, hysteresis=1)",
    ),
    "EpochReport": (
        lambda kind, _: kind(25, roof=65.0),
        "EpochReport(epochs=25, start=0, remaining=False, roof=65.0, all_ranks=False)",
    ),
    "Logger": (
        lambda kind, f: kind(csv=f / "log.csv"),
        "Logger(targets=['csv .+/log.csv'], closed=False)",
    ),
    "PatchReport": (lambda *_: trainfast.unpatch(), "restored nothing"),
    "patching.Patch": (lambda kind, _: kind((), []), "patched nothing"),
    "SystemMonitor": (
        lambda kind, _: kind(2.0),
        "SystemMonitor(sampling_interval_sec=2.0, samples=0, running=False)",
    ),
    "torch.Accumulator": (
        lambda kind, _: accumulator(kind),
        "Accumulator(optimizer=<SGD>, steps=4, max_grad_norm=1.0, steps_done=0)",
    ),
    "torch.Adam": (lambda kind, _: kind(params()), "Adam ("),
    "torch.AdamW": (lambda kind, _: kind(params()), "AdamW ("),
    "torch.CheckpointEvery": (
        lambda kind, _: kind(5, "models", model=torch.nn.Linear(1, 1)),
        "CheckpointEvery(every=5, directory='models', keep=3, objects=['model'])",
    ),
    "torch.GradScaler": (
        lambda kind, _: grad_scaler(kind),
        "GradScaler(device='cpu', enabled=True, init_scale=8.0, growth_factor=2.0, "
        "backoff_factor=0.5, growth_interval=2000, hysteresis=2)",
    ),
    "torch.amp.CudaGradScaler": (
        lambda kind, _: cuda_scaler(kind),
        "CudaGradScaler(device='cuda', enabled=False, hysteresis=1)",
    ),
    "torch.LeakTracker": (lambda kind, _: kind(), "LeakTracker(steps=0, leaks=0)"),
    "torch.LeakWarning": (lambda kind, _: kind("it grows"), "LeakWarning('it grows')"),
    "torch.MemoryMonitor": (
        lambda kind, _: kind().add([], "losses"),
        "MemoryMonitor(names=['losses'])",
    ),
    "torch.Muon": (
        lambda kind, _: kind([torch.nn.Parameter(torch.ones(2, 3))]),
        "Muon (",
    ),
    "torch.Profiler": (
        lambda kind, _: kind(0, "profiles"),
        "Profiler(interval=0, dir='profiles', keep=10, steps=0)",
    ),
    "torch.SkipAwareScheduler": (
        lambda kind, _: scheduler(kind),
        "SkipAwareScheduler(scheduler=<StepLR>, scaler=<GradScaler>, "
        "optimizer=<AdamW>)",
    ),
    "torch.accelerate.Tracker": (
        lambda kind, _: kind(trainfast.Logger()),
        "Tracker(logger=<Logger>)",
    ),
    "torch.huggingface.Callback": (
        lambda kind, _: kind(trainfast.Logger(), samples=len),
        "Callback(logger=<Logger>, samples=<builtin_function_or_method>)",
    ),
    "torch.lightning.Callback": (
        lambda kind, _: kind(trainfast.Logger()),
        "Callback(logger=<Logger>)",
    ),
    "torch.lightning.Precision": (
        lambda kind, _: kind("16-mixed", "cpu"),
        "MixedPrecision(precision='16-mixed', device='cpu')",
    ),
    "torch.trajectory_metrics.TrajectoryMetrics": (
        lambda kind, _: kind("av2"),
        "TrajectoryMetrics(definition='av2', miss_threshold=2.0, final='last')",
    ),
    "torch.pyg.CachedDataset": (lambda _, f: cached(f), "CachedDataset(4)"),
    "torch.pyg.DataLoader": (
        lambda kind, f: kind(cached(f), 2, shuffle=True),
        "DataLoader(dataset=<CachedDataset>, batch_size=2, sampler=<RandomSampler>, "
        "num_workers=0, pin_memory=False, drop_last=False)",
    ),
}
# Torch's repr of an optimizer has a line for each option; the others are tables.
SEVERAL_LINES = (torch.optim.Optimizer, Report, gc.Schema)


def matches(text, begin):
    """Whether the text begins with `begin`, in which .+ stands for any path."""
    head, found, tail = begin.partition(".+")
    if not found:
        return text.startswith(begin)
    return text.startswith(head) and tail in text[len(head) :]


def test_each_public_class_has_an_example():
    missing = [name for name, needed in MODULES.items() if not find_spec(needed)]
    absent = tuple(name.removeprefix("trainfast.") for name in missing)
    assert {name for name in EXAMPLES if not name.startswith(absent)} == set(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_repr_tells_the_settings_and_reads_no_array(name, tmp_path):
    kind = CLASSES[name]
    make, begin = EXAMPLES[name]
    made = make(kind, tmp_path)
    assert isinstance(made, kind)
    assert kind.__repr__ is not object.__repr__
    text = repr(made)
    assert matches(text, begin), text
    assert "\n" not in text or isinstance(made, SEVERAL_LINES)


def may_be_half_made(kind):
    """Not for reports and the like, which are made in one go from checked values, and
    not for a framework's own repr."""
    own = getattr(kind.__repr__, "__module__", "").startswith("trainfast")
    return own and not issubclass(kind, (Report, gc.Schema, tuple))


@pytest.mark.parametrize("name", [n for n in CLASSES if may_be_half_made(CLASSES[n])])
def test_object_whose_constructor_failed_has_a_repr(name):
    """As it is seen in a traceback's locals and in a debugger."""
    kind = CLASSES[name]
    assert repr(kind.__new__(kind)).startswith(kind.__name__ + "(")


def test_repr_of_a_closed_cache(tmp_path):
    made = cache(tmp_path)
    made.close()
    assert repr(made) == f"Cache(path={str(made.path)!r}, graphs=5, closed=True)"
    assert repr(made[1:3]) == f"Subset(graphs=2, path={str(made.path)!r})"


def test_counted_without_counts_has_a_repr():
    made = pickle.loads(pickle.dumps(gc.Counted({"x": 1}, {})))
    assert repr(made) == "Counted(keys=['x'], counts=[])"


def test_long_values_are_cut():
    text = repr(gc.Counted(dict.fromkeys(range(100)), {}))
    assert text == "Counted(keys=<list>, counts=[])"


def test_torchs_device_and_a_tuple_of_one_are_shown(tmp_path):
    loader = gc.Loader(cache(tmp_path), 2, device=torch.device("cpu"))
    assert "device=cpu)" in repr(loader)
    assert one_line(loader, pad_to=(3,)) == "Loader(pad_to=(3,))"
