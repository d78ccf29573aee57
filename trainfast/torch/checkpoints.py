"""Checkpoints that are whole or not there, and going on from the newest."""

import contextlib
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainfast.report import attributes, one_line
from trainfast.torch.private import is_flat_shard, tree_leaves
from trainfast.torch.random_states import RandomStates
from trainfast.torch.ranks import rank

_RANDOM = "random states"  # the entry of a checkpoint that holds them
_NAME = re.compile(r"epoch_(\d+)\.pt")


def save_checkpoint(path: str | os.PathLike[str], **state: Any) -> Path:
    """Writes a checkpoint to a file of its own, and puts it in place when it is whole.

    The file is written beside `path`, synchronised with the disk, read back, and
    renamed. Killed at any moment, or on a full disk, what was at `path` before is still
    there. The random states of Python, NumPy and torch are part of it.

    Args:
        path: of the file, such as "models/last.pt".
        **state: what to save by name: objects with a `state_dict` (model, optimizer,
            scheduler, scaler, Accumulator, sampler), tensors, numbers, strings, None,
            and lists, tuples and dicts of them. DistributedDataParallel and
            torch.compile's wrapper are left out, so that a checkpoint fits with and
            without them.

    With torch.distributed only rank 0 writes; all ranks may call it.

    Returns:
        The path.

    Raises:
        TypeError: a value could not be loaded again without running code from the file.
        NotImplementedError: weights are spread over ranks, as by FSDP2.
        OSError: the disk is full, or the folder is not to be written to.
    """
    path = Path(path)
    if _RANDOM in state:
        raise TypeError(f"the name {_RANDOM!r} is the checkpoint's own")
    for value in state.values():  # on all ranks: state_dict() may wait for all
        if isinstance(value, torch.nn.Module):
            _refuse_shards(list(value.parameters()))
    if rank():
        return path
    saved = {name: _plain(_state_of(value)) for name, value in state.items()}
    _refuse_shards(saved)
    saved[_RANDOM] = RandomStates().states
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")  # one left behind is overwritten
    try:
        with open(partial, "wb") as file:
            torch.save(saved, file)
            file.flush()
            os.fsync(file.fileno())
        _check(partial, saved)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    with _folder(path.parent) as folder:
        os.fsync(folder)
    return path


def resume(path: str | os.PathLike[str], **objects: Any) -> dict[str, Any]:
    """Loads a checkpoint, if there is one, and says what else it holds.

        saved = trainfast.resume("models/", model=model, optimizer=optimizer)
        for epoch in range(saved.get("epoch", 0), epochs):

    Args:
        path: a file of `save_checkpoint`, or a folder: then the newest file in it that
            can be read.
        **objects: what was saved by these names, to load it into.

    Returns:
        The other values by their names; {} where there is no checkpoint yet. Random
        states are set, on the rank that saved them.

    Raises:
        KeyError: the checkpoint does not have one of the names; nothing was loaded.
        RuntimeError: the file is damaged, or an object does not fit what was saved.
    """
    path = Path(path)
    saved = _newest(path) if path.is_dir() else _read(path) if path.exists() else None
    if saved is None:
        return {}
    missing = [name for name in objects if name not in saved]
    if missing:
        have = ", ".join(name for name in saved if name != _RANDOM)
        raise KeyError(f"{path} has no {', '.join(missing)}; it has {have}")
    for name, target in objects.items():
        _bare(target).load_state_dict(saved.pop(name))
    states = saved.pop(_RANDOM, None)
    if states is not None and not rank():
        RandomStates(states).restore()
    return saved


class CheckpointEvery:
    """Saves a checkpoint every few epochs, and keeps the newest ones.

        checkpoints = trainfast.CheckpointEvery(
            5, "models/", model=model, optimizer=optimizer, scheduler=scheduler
        )
        saved = checkpoints.resume()
        for epoch in range(saved.get("epoch", 0), 25):
            ...
            checkpoints(epoch + 1, val_loss=val_loss)

    Args:
        every: epochs from one checkpoint to the next.
        directory: where the files are: epoch_0005.pt, epoch_0010.pt, ...
        keep: how many stay there; None: all of them.
        **objects: what to save and load, as for `save_checkpoint`.
    """

    def __init__(
        self,
        every: int,
        directory: str | os.PathLike[str],
        keep: int | None = 3,
        **objects: Any,
    ) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if name == "keep" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be a positive integer, got {value!r}")
        self.every, self.keep = every, keep
        self.directory = Path(directory)
        self._objects = objects

    def __repr__(self) -> str:
        objects = list(getattr(self, "_objects", ()))
        return one_line(
            self, **attributes(self, "every directory keep"), objects=objects
        )

    def __call__(self, epoch: int, **values: Any) -> Path | None:
        """Saves if it is time.

        Args:
            epoch: how many epochs are done; `resume` gives it back.
            **values: to save as well, such as the validation loss.

        Returns:
            The file that was written, or None.
        """
        return None if epoch % self.every else self.save(epoch, **values)

    def save(self, epoch: int, **values: Any) -> Path:
        """Saves now, such as at the end.

        Args:
            epoch, values: as for a call.
        """
        path = self.directory / f"epoch_{epoch:04d}.pt"
        save_checkpoint(path, **self._objects, epoch=epoch, **values)
        if self.keep is not None and not rank():
            files = _files(self.directory)
            for old in files[files.index(path) :][self.keep :]:  # of earlier epochs
                old.unlink(missing_ok=True)
        return path

    def resume(self) -> dict[str, Any]:
        """As the function `resume`, with the newest file of the directory."""
        return resume(self.directory, **self._objects)


def _bare(value: Any) -> Any:
    """The module within DistributedDataParallel and torch.compile's wrapper."""
    while isinstance(value, torch.nn.Module):
        wrapped = value._modules.get("_orig_mod")
        if isinstance(value, torch.nn.parallel.DistributedDataParallel):
            wrapped = value.module
        if wrapped is None:
            break
        value = wrapped
    return value


def _state_of(value: Any) -> Any:
    value = _bare(value)
    if callable(getattr(value, "state_dict", None)):
        return value.state_dict()
    return value


def _plain(value: Any) -> Any:
    """NumPy's numbers, such as a scheduler's best loss, as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {_plain(name): _plain(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value


def _refuse_shards(saved: Any) -> None:
    for leaf in tree_leaves(saved):
        if type(leaf).__name__ == "DTensor" or is_flat_shard(leaf):
            raise NotImplementedError(
                "the state is spread over ranks (by FSDP or as DTensors); use "
                "torch.distributed.checkpoint"
            )


def _check(partial: Path, saved: dict[str, Any]) -> None:
    """Reads the file back, without its tensors.

    Raises:
        TypeError: it can't be loaded, so it must not take the last one's place.
    """
    try:
        torch.load(partial, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        wrong = [name for name, value in saved.items() if not _is_plain(value)]
        raise TypeError(
            f"{', '.join(wrong) or 'the checkpoint'} could not be loaded again: save "
            "tensors, numbers, strings, lists, dicts and objects with a state_dict of "
            f"these ({error})"
        ) from None


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple | set):
        return all(_is_plain(item) for item in value)
    plain = (torch.Tensor, torch.Size, torch.dtype, torch.device)
    return value is None or isinstance(value, (*plain, int, float, complex, str, bytes))


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _files(directory: Path) -> list[Path]:
    """Checkpoints of `CheckpointEvery`, the newest first."""
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.stem.split("_")[1]), reverse=True)


def _newest(directory: Path) -> dict[str, Any] | None:
    for path in _files(directory):
        try:
            return _read(path)
        except RuntimeError as error:
            warnings.warn(f"{error}; the one before is taken", stacklevel=4)
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        said = str(error).splitlines()[0]
        raise RuntimeError(f"{path} is damaged, or no checkpoint ({said})") from None
    if not isinstance(saved, dict):
        raise RuntimeError(f"{path} is no checkpoint: it holds a {type(saved)}")
    return saved
