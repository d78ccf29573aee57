"""Writes the graphs of a cache to files: what `trainfast cache export` does."""

import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainfast import _core
from trainfast.graph_cache.progress import Progress
from trainfast.tools._cache_import import name_of

# The names of NumPy's (and ml_dtypes') types in a safetensors file.
_TYPES = {
    **{"bool": "BOOL", "uint8": "U8", "uint16": "U16", "uint32": "U32"},
    **{"uint64": "U64", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64"},
    **{"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64"},
}


def export(
    cache: _core.GraphCache,
    keys: Sequence[Any],
    target: Path,
    kind: str,
    progress: bool,
) -> dict[str, int]:
    """One file a graph, named by its number, in the new directory `target`."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"target must be a new directory, got {target}")
    target.mkdir(parents=True, exist_ok=True)
    save = FORMATS[kind]
    digits = max(6, len(str(len(cache))))
    size = 0
    with Progress(progress, len(cache)) as bar:
        for i in range(len(cache)):
            graph = {
                name_of(key): value
                for key, value in zip(keys, cache.get(i))
                if value is not None
            }
            file = target / f"{i:0{digits}}.{kind}"
            save(file, graph)
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


def save_safetensors(file: Path, graph: dict[str, Any]) -> None:
    """Text and bytes go to the header's metadata (bytes as hexadecimal digits).

    The format: u64 length of the header, the header in JSON, the arrays' bytes; from
    the description in the safetensors project's README.
    """
    header: dict[str, Any] = {}
    text: dict[str, str] = {}
    chunks, at = [], 0
    for name, value in graph.items():
        if isinstance(value, str | bytes):
            text[name] = value if isinstance(value, str) else value.hex()
            continue
        array = np.asarray(value)
        kind = _TYPES.get(array.dtype.name)
        if kind is None:
            rule = f"must have a dtype that safetensors has, got {array.dtype}"
            raise ValueError(f"{name} {rule}")
        chunks.append(array.tobytes())
        end = at + len(chunks[-1])
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [at, end]}
        at = end
    if text:
        header["__metadata__"] = text
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    file.write_bytes(b"".join([len(data).to_bytes(8, "little"), data, *chunks]))


FORMATS: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "npz": save_npz,
    "safetensors": save_safetensors,
}
