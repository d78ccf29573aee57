"""Writes the graphs of a cache to files: what `trainfast cache export` does."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainfast import _core
from trainfast.graph_cache.progress import Progress
from trainfast.tools._cache_import import name_of


def export(
    cache: _core.GraphCache,
    keys: Sequence[Any],
    target: Path,
    progress: bool,
) -> dict[str, int]:
    """One file a graph, named by its number, in the new directory `target`."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"target must be a new directory, got {target}")
    target.mkdir(parents=True, exist_ok=True)
    digits = max(6, len(str(len(cache))))
    size = 0
    with Progress(progress, len(cache)) as bar:
        for i in range(len(cache)):
            graph = {
                name_of(key): value
                for key, value in zip(keys, cache.get(i))
                if value is not None
            }
            file = target / f"{i:0{digits}}.npz"
            save_npz(file, graph)
            size += file.stat().st_size
            bar.made(1)
    return {"graphs": len(cache), "bytes": size}


def save_npz(file: Path, graph: dict[str, Any]) -> None:
    """bfloat16 and float8, which .npz has not, are written as float32."""
    with zipfile.ZipFile(file, "w") as out:
        for name, value in graph.items():
            data = np.void(value) if isinstance(value, bytes) else value
            array = np.asarray(data)
            if array.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
                array = array.astype(np.float32)
            with out.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
