"""What a configuration asks for, under the names that the guides and frameworks use."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The keys of each setting, by precedence; each is looked for at any depth.
_KEYS = {
    "device": ("device", "accelerator"),
    "batch_size": ("batch_size", "per_device_train_batch_size", "train_batch_size"),
    "accumulate": (
        *("accumulate_grad_batches", "gradient_accumulation_steps"),
        *("accumulation_steps", "grad_accumulation_steps"),
    ),
    "workers": ("num_workers", "dataloader_num_workers", "workers"),
    "pin_memory": ("pin_memory", "dataloader_pin_memory"),
    "persistent_workers": ("persistent_workers", "dataloader_persistent_workers"),
    "prefetch_factor": ("prefetch_factor", "dataloader_prefetch_factor"),
    "scaler": ("grad_scaler_enabled", "use_grad_scaler"),
    "compile": ("use_compile", "compile", "torch_compile"),
    "matmul": ("float32_matmul_precision", "matmul_precision"),
    "tf32": ("tf32", "allow_tf32", "use_tf32", "enable_tf32"),
    "image_size": ("image_size", "img_size", "input_size"),
    "heads": ("nhead", "n_head", "num_heads", "num_attention_heads", "n_heads"),
    "width": ("d_model", "n_embd", "embed_dim", "hidden_size"),
    "head_dim": ("head_dim", "attention_head_dim"),
    "cache": ("cache_dir", "cache", "use_cache", "persist_cache", "cache_path"),
    "data": (
        *("dataset_path", "data_path", "data_file", "train_file", "dataset"),
        *("data_dir", "data", "path"),
    ),
    "limit": ("max_chars", "max_bytes"),
}
_PRECISIONS = ("precision", "mixed_precision", "amp_dtype", "dtype", "torch_dtype")
_SWITCHES = ("use_mixed_precision", "use_amp", "amp", "mixed_precision")
_DEPTH = 8  # of nested tables; an alias of YAML can make a table hold itself
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "none")


@dataclass(frozen=True)
class Setting:
    """One value of a configuration and its dotted key, for messages."""

    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.value}"

    @property
    def number(self) -> int | None:
        """The value as a whole number; None for what is none, and for booleans."""
        if isinstance(self.value, bool):
            return None
        try:
            return int(self.value)
        except (TypeError, ValueError, OverflowError):
            return None

    @property
    def switch(self) -> bool | None:
        """The value as a boolean; None for anything else."""
        word = str(self.value).lower()
        return True if word in _TRUE else False if word in _FALSE else None


@dataclass(frozen=True)
class Settings:
    """A configuration: the dict, and the folder that its paths are relative to.

    Attributes:
        config: what the file holds.
        folder: the file's folder.
    """

    config: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path(".")

    def find(self, name: str) -> Setting | None:
        """The setting, under the first of its keys that the configuration has."""
        return self._first(_KEYS[name])

    def on(self, name: str) -> bool | None:
        """Whether a switch is on; None if it is not set."""
        found = self.find(name)
        return found.switch if found else None

    def number(self, name: str) -> int | None:
        found = self.find(name)
        return found.number if found else None

    def precision(self) -> tuple[str, Setting] | None:
        """ "float16", "bfloat16" or "float32", and the setting that says so."""
        for key in ("bf16", "fp16"):
            found = self._first((key,))
            if found and found.switch:
                return ("bfloat16" if key == "bf16" else "float16"), found
        named = [found for key in _PRECISIONS if (found := self._first((key,)))]
        dtypes = [(name, x) for x in named if (name := _precision(x.value))]
        switch = self._first(_SWITCHES)
        if switch and switch.switch:  # autocast to the dtype that is named, if any
            mixed = [pair for pair in dtypes if pair[0] != "float32"]
            return mixed[0] if mixed else ("float16", switch)
        if dtypes:
            return dtypes[0]
        off = switch is not None and switch.switch is False
        return ("float32", switch) if switch and off else None

    def dataset(self) -> tuple[Path, int] | None:
        """The file that the configuration names as its data, and its bytes."""
        for key in _KEYS["data"]:
            found = self._first((key,))
            if found and isinstance(found.value, str):
                path = self.folder / found.value
                try:
                    if path.is_file():
                        return path, path.stat().st_size
                except (OSError, ValueError):
                    continue
        return None

    def variables(self) -> dict[str, str]:
        """The environment variables that the configuration sets: `env_vars:`."""
        found = self._first(("env_vars", "env"))
        table = found.value if found else None
        if not isinstance(table, dict):
            return {}
        return {str(name): _word(value) for name, value in table.items()}

    def _first(self, keys: tuple[str, ...]) -> Setting | None:
        entries = list(_entries(self.config))
        for key in keys:
            for place, value in entries:
                if place[-1] == key and value is not None:
                    return Setting(".".join(place), value)
        return None


def of_file(path: str | os.PathLike[str]) -> Settings:
    """Reads a YAML configuration.

    Args:
        path: the file.

    Raises:
        ImportError: PyYAML is not installed.
        OSError: the file cannot be read.
        ValueError: the file is not YAML, or not a table of settings.
    """
    from trainfast.config import load_config

    return Settings(load_config(path), Path(path).parent)


def _entries(
    table: dict[str, Any], place: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(keys, value) of every entry, those of the outer tables first."""
    for key, value in table.items():
        yield (*place, str(key)), value
    for key, value in table.items():
        if isinstance(value, dict) and len(place) < _DEPTH:
            yield from _entries(value, (*place, str(key)))


def _precision(value: Any) -> str | None:
    word = str(value).lower().removeprefix("torch.")
    if word.startswith(("bf16", "bfloat16")):
        return "bfloat16"
    if word.startswith(("16", "fp16", "float16", "half")):
        return "float16"
    if word.startswith(("32", "fp32", "float32")) or word == "no":
        return "float32"
    return None


def _word(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
