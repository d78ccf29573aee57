"""Graphs from files: what `trainfast cache import` reads."""

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

_TORCH = (".pt", ".pth")
_SKIPPED = ("pre_filter.pt", "pre_transform.pt")  # PyG's, beside what it has processed


class Graphs:
    """All graphs of files and directories, in the order of the names in a directory.

    A directory of PyG (with `processed` in it) stands for the files there. `trust`:
    see `trainfast.torch.graphs.files.load_graphs`.
    """

    def __init__(self, sources: list[str], trust: bool = False) -> None:
        self.files = [file for source in sources for file in _files(Path(source))]
        self._trust = trust

    @property
    def identity(self) -> tuple[str | int, ...]:
        """Changes with the files: their names, sizes and times of change."""
        facts: list[str | int] = []
        for file in self.files:
            state = file.stat()
            facts += [str(file.absolute()), state.st_size, state.st_mtime_ns]
        return tuple(facts)

    def __iter__(self) -> Iterator[Any]:
        for file in self.files:
            if file.suffix == ".npz":
                yield load_npz(file)
                continue
            # Torch is loaded only where there is one of its files.
            reader: Any = import_module("trainfast.torch.graphs.files")
            load: Callable[..., Iterator[Any]] = reader.load_graphs
            yield from load(file, self._trust)


def _files(source: Path) -> list[Path]:
    if not source.exists():
        raise FileNotFoundError(f"source must be a file or a directory, got {source}")
    if source.is_file():
        if source.suffix not in (*_TORCH, ".npz"):
            raise ValueError(f"source must be a .pt or .npz file, got {source}")
        return [source]
    if (source / "processed").is_dir():
        source = source / "processed"
    found = [
        file
        for file in sorted(source.iterdir(), key=_natural)
        if file.suffix in (*_TORCH, ".npz") and file.name not in _SKIPPED
    ]
    if not found:
        raise ValueError(f"source must have .pt or .npz files in it, got {source}")
    return found


def _natural(file: Path) -> list[tuple[int, int | str]]:
    """For sorting: graph_9 comes before graph_10."""
    parts: list[tuple[int, int | str]] = []
    digits = text = ""
    for letter in file.name + "\0":
        is_digit = letter in "0123456789"
        if is_digit and text:
            parts.append((1, text))
            text = ""
        if not is_digit and digits:
            parts.append((0, int(digits)))
            digits = ""
        digits, text = (digits + letter, "") if is_digit else ("", text + letter)
    return [*parts, (1, text)]


def load_npz(file: Path) -> dict[Any, Any]:
    """A graph from an .npz file; pickles in it are refused.

    The name "paper/x" is the key ("paper", "x"), "author|writes|paper/edge_index" is
    (("author", "writes", "paper"), "edge_index"). Text and bytes are arrays of rank 0.
    """
    with np.load(file, allow_pickle=False) as content:
        return {key_of(name): _value(content[name]) for name in content.files}


def key_of(name: str) -> Any:
    """The key that a name in a file stands for."""
    kind, slash, inside = name.rpartition("/")
    if not slash:
        return name
    return (tuple(kind.split("|")) if "|" in kind else kind), inside


def name_of(key: Any) -> str:
    """The name that a key has in a file: the other way round."""
    if isinstance(key, str):
        return key
    kind, inside = key
    return f"{kind if isinstance(kind, str) else '|'.join(kind)}/{inside}"


def _value(array: np.ndarray[Any, Any]) -> Any:
    if array.ndim == 0 and array.dtype.kind == "U":
        return str(array)
    if array.ndim == 0 and array.dtype.kind in "SV":
        return array.tobytes()
    return array
