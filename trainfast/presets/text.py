"""Settings as YAML files with a comment beside each value."""

import json
from pathlib import Path
from typing import Any

from trainfast.presets.values import Value, nested

_HEAD = """\
# @package _global_
# Written by `trainfast optimize`. {}
# `trainfast run --config` reads this file; its first line is hydra's.
"""
_ORIGINS = {
    False: "Each value is a starting point, not measured.",
    True: "Each value was measured on this machine.",
}


def to_yaml(values: list[Value]) -> str:
    """The settings as YAML, with each value's reason."""
    head = _HEAD.format(_ORIGINS[any(value.measured for value in values)])
    return head + "".join(line + "\n" for line in _lines(nested(values), ""))


def _lines(section: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for name, value in section.items():
        if isinstance(value, Value):
            # JSON's scalars are YAML's.
            setting = f"{indent}{name}: {json.dumps(value.value)}"
            origin = "measured" if value.measured else "not measured"
            lines.append(f"{setting:<40}  # {origin}: {value.reason}")
        else:
            lines += [f"{indent}{name}:", *_lines(value, indent + "  ")]
    return lines


def write_new(texts: dict[Path, str], force: bool) -> None:
    """Writes the files and their folders; none of them if one is there.

    Args:
        texts: by path.
        force: replaces files that are there.

    Raises:
        FileExistsError: a file is there, and not `force`.
        OSError: a file cannot be written.
    """
    for path in texts:
        if not force and path.exists():
            raise FileExistsError(f"{path} exists; pass --force to replace it")
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
