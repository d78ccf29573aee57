"""Hooks under which a script shows its training loop: torch's functions, wrapped.

They are installed before the script starts and stay until the process ends.
"""

import builtins
import copy
import inspect
import logging
import sys
import sysconfig
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainfast.torch.data.batches import tensors
from trainfast.torch.private import LoaderIterator
from trainfast.torch.probe.loaders import batches_of
from trainfast.torch.probe.loop import LONGEST_PERIOD, Loop, Switch, clock

_MOST_BATCHES = 8  # copies of batches that stand in for the loader's
_MOST_BYTES = 1 << 30  # of all copies together
_BACKWARDS_WITHOUT_STEP = 64  # after them each is a step: the update is hand-written
# Folders of the standard library and of trainfast.
_LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[2]))
_STEPS_WITH_MODULE_HOOKS = 3  # enough to find the outermost module

# Functions that write logs, by module; they are wrapped once the script has imported
# the module.
_LOGGERS = {
    "matplotlib.figure": ("Figure.savefig",),
    "matplotlib.backends.backend_agg": ("FigureCanvasAgg.draw",),
    "torch.utils.tensorboard.writer": (
        *("SummaryWriter.add_scalar", "SummaryWriter.add_scalars"),
        *("SummaryWriter.add_histogram", "SummaryWriter.add_image"),
        *("SummaryWriter.add_images", "SummaryWriter.add_figure"),
        *("SummaryWriter.add_embedding", "SummaryWriter.add_text"),
        *("SummaryWriter.flush", "SummaryWriter.add_graph"),
    ),
    "tensorboardX.writer": ("SummaryWriter.add_scalar", "SummaryWriter.add_histogram"),
    "wandb": ("log",),
    "wandb.sdk.wandb_run": ("Run.log",),
    "mlflow": ("log_metric", "log_metrics"),
    "pandas.core.generic": ("NDFrame.to_csv",),
    "tqdm.std": ("tqdm.refresh", "tqdm.set_postfix"),
    "IPython.display": ("display", "clear_output"),
    "IPython.core.display_functions": ("display", "clear_output"),
    "json": ("dump",),
}


def install(loop: Loop, step_ended: Callable[[], None]) -> None:
    """Installs all hooks; step_ended() is called at the end of each optimizer step."""
    _hook_optimizers(loop, step_ended)
    _hook_backward(loop, step_ended)
    if LoaderIterator is not None:
        _hook_loaders(loop)
    _hook_saves(loop)
    builtins.print = _timed(loop, "logging", builtins.print)
    logging.Logger._log = _timed(loop, "logging", logging.Logger._log)  # type: ignore


def _timed(loop: Loop, phase: str, original: Any) -> Any:
    def timed(*args: Any, **kwargs: Any) -> Any:
        loop.note(phase)
        return loop.timed(phase, original, *args, **kwargs)

    timed.__wrapped__ = original  # type: ignore[attr-defined]
    return timed


def _hook_saves(loop: Loop) -> None:
    torchs = torch.save

    def save(*args: Any, **kwargs: Any) -> Any:
        loop.note("save")
        return loop.switch.save(loop, torchs, args, kwargs)

    save.__wrapped__ = torchs  # type: ignore[attr-defined]
    torch.save = save


def hook_loggers(loop: Loop) -> None:
    """Wraps logging functions of the packages that the script has imported so far."""
    for module_name, paths in _LOGGERS.items():
        module = sys.modules.get(module_name)
        for path in paths if module else ():
            *outer, name = path.split(".")
            owner: Any = module
            for part in outer:
                owner = getattr(owner, part, None)
            known = inspect.getattr_static(owner, name, None)
            if inspect.isfunction(known) and not hasattr(known, "_of_the_probe"):
                timed = _timed(loop, "logging", known)
                timed._of_the_probe = True
                setattr(owner, name, timed)


# ---- Optimizers and gradients --------------------------------------------------------


def _hook_optimizers(loop: Loop, step_ended: Callable[[], None]) -> None:
    torchs = torch.optim.Optimizer.profile_hook_step

    def hook(original: Any) -> Any:
        hooked = torchs(original)  # torch calls this once for each class of optimizer

        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if "optimizer" in loop.phases:  # of an optimizer that calls another one
                return hooked(optimizer, *args, **kwargs)
            if optimizer not in loop.optimizers:
                loop.optimizers.append(optimizer)
            loop.trains("optimizer")
            loop.order.append(optimizer)
            if optimizer is loop.optimizers[0] and loop.steps == 0:
                loop.stack = loop.script_lines()
            result = loop.timed(
                *("optimizer", loop.switch.step),
                *(loop, hooked, (optimizer, *args), kwargs),
            )
            if optimizer is loop.optimizers[0]:
                _count_step(loop, step_ended)
            return result

        step.hooked = True  # type: ignore[attr-defined]
        return step

    torch.optim.Optimizer.profile_hook_step = staticmethod(hook)  # type: ignore


def _hook_backward(loop: Loop, step_ended: Callable[[], None]) -> None:
    torchs = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        loop.trains("backward")
        loop.order.append(None)
        if loop.backward_began is None:
            loop.backward_began = clock()
        loop.timed("backward", loop.switch.backward, loop, torchs, args, kwargs)
        if loop.arrived is not None:
            loop.forward_backward += clock() - loop.arrived
            loop.arrived = None
        loop.backwards += 1
        if not loop.optimizers and loop.backwards > _BACKWARDS_WITHOUT_STEP:
            if loop.steps == 0:
                loop.stack = loop.script_lines()
            _count_step(loop, step_ended)

    torch.autograd.backward = backward


def _count_step(loop: Loop, step_ended: Callable[[], None]) -> None:
    loop.steps += 1
    loop.steps_under[loop.switch.name] += 1
    began, loop.backward_began = loop.backward_began, None
    if began is not None and loop.stepped is not None and loop.switch.name == "base":
        loop.own.append((began - loop.stepped, clock() - loop.stepped))
    step_ended()
    loop.stepped = clock()


# ---- Batches -------------------------------------------------------------------------


def _hook_loaders(loop: Loop) -> None:
    build, iterate = DataLoader.__init__, DataLoader.__iter__
    next_batch = LoaderIterator.__next__

    @wraps(build)
    def loader_init(loader: Any, *args: Any, **kwargs: Any) -> None:
        build(loader, *args, **kwargs)
        loader._probe_place = _place_of_caller()

    def loader_iter(loader: Any) -> Any:
        if loop.in_evaluation(loader):
            loop.evaluation_begins()
            return iterate(loader)
        loop.evaluation_ends()
        if loop.loader in (None, loader) or loop.steps == 0:
            loop.loader = loader
        if loader is loop.loader or _alike(loader, loop.loader):
            loop.loader = loader
            if not loop.restarts or loop.restarts[-1] != loop.steps:
                loop.restarts.append(loop.steps)
            loop.note("data")
            starts = _starts_workers(loop, loader)
            phase = "worker-start" if starts else "data"
            iterator = loop.timed(phase, loop.switch.iterate, loop, loader, iterate)
            _mark(iterator, loader, starts)
            return iterator
        return iterate(loader)

    def loader_next(iterator: Any) -> Any:
        loader = getattr(iterator, "_probe_loader", None)
        if loader is None or loop.in_evaluation(loader):
            return next_batch(iterator)
        if loop.evaluating_since is not None:
            loop.evaluation_ends()
        if iterator._probe_left == 0:  # an epoch keeps its length under every switch
            raise StopIteration
        starts, iterator._probe_starts = iterator._probe_starts, False
        phase = "worker-start" if starts else "data"
        batch = loop.timed(phase, loop.switch.next_batch, loop, iterator, next_batch)
        iterator._probe_left -= 1
        if loop.keeps_batches and loop.switch.name == "base":
            keep_batch(loop, batch)
        loop.arrived = clock()
        return batch

    DataLoader.__init__ = loader_init  # type: ignore
    loader_iter.__wrapped__ = iterate  # type: ignore[attr-defined]
    DataLoader.__iter__ = loader_iter  # type: ignore[method-assign]
    LoaderIterator.__next__ = loader_next


def _place_of_caller() -> dict[str, Any] | None:
    """The innermost file and line in execution that belongs to no library."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        packaged = "site-packages" in file or "dist-packages" in file
        if not packaged and not file.startswith(_LIBRARIES) and file[:1] != "<":
            return {"file": file, "line": frame.f_lineno}
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _starts_workers(loop: Loop, loader: Any) -> bool:
    """Whether this epoch starts its own workers, in an epoch that no block holds."""
    if not loader.num_workers or loader.persistent_workers:
        return False
    takes_batches = type(loop.switch).next_batch is Switch.next_batch
    return takes_batches and not 0 < loop.period() <= LONGEST_PERIOD


def _mark(iterator: Any, loader: Any, starts: bool) -> None:
    try:
        iterator._probe_loader = loader
        iterator._probe_starts = starts  # until the first batch is there
        iterator._probe_left = batches_of(loader)
    except AttributeError:  # a generator of a subclass: its inner iterator has no mark
        pass


def _alike(one: Any, other: Any) -> bool:
    """Whether a loader is made anew from the same data, as inside an epoch loop."""
    return other is not None and type(one.dataset) is type(other.dataset)


def keep_batch(loop: Loop, batch: Any) -> None:
    """Keeps copies of the first few batches."""
    most = 0
    try:
        most = min(_MOST_BATCHES, max(1, _MOST_BYTES // max(1, _bytes(batch))))
        if len(loop.batches) < most:
            loop.batches.append(copy.deepcopy(batch))
    except Exception:  # a batch that cannot be copied is not replaced
        loop.batches.clear()
        most = 0
    loop.keeps_batches = len(loop.batches) < most


def _bytes(batch: Any) -> int:
    leaves = tensors(batch)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


# ---- Modules -------------------------------------------------------------------------


def find_model(loop: Loop) -> None:
    """Finds the outermost module with parameters, and watches it alone from then on."""
    depth = [0]
    first_step = loop.steps

    def before(called: torch.nn.Module, args: Any) -> None:
        if depth[0] == 0 and next(called.parameters(), None) is not None:
            young = loop.steps < first_step + _STEPS_WITH_MODULE_HOOKS
            if young and called.training and torch.is_grad_enabled():
                loop.model = called
            _model_called(loop, called)
        depth[0] += 1

    def after(called: torch.nn.Module, args: Any, out: Any) -> None:
        depth[0] -= 1
        if depth[0] == 0 and loop.steps >= first_step + _STEPS_WITH_MODULE_HOOKS:
            first.remove()
            last.remove()
            if loop.model is not None:
                loop.model.register_forward_pre_hook(partial(_model_called, loop))

    module = torch.nn.modules.module
    first = module.register_module_forward_pre_hook(before)
    last = module.register_module_forward_hook(after, always_call=True)


def _model_called(loop: Loop, module: torch.nn.Module, args: Any = ()) -> None:
    if module.training and torch.is_grad_enabled():
        loop.trains("forward")
        if loop.loader is None:
            loop.arrived = clock()
    elif loop.in_evaluation() and loop.steps > 0:
        loop.evaluation_begins()
