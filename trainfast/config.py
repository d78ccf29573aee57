"""Configuration files in YAML, as training scripts and hydra read them."""

from os import PathLike, fspath
from typing import Any


def load_config(path: str | PathLike[str]) -> dict[str, Any]:
    """Reads a YAML file whose top level is a mapping. Needs PyYAML.

    Only YAML's own types are made, never objects of Python. Comments, such as hydra's
    `# @package _global_`, are skipped. An empty file is an empty mapping.

    Args:
        path: the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not YAML, or its top level is not a mapping.
        ImportError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            "reading YAML needs PyYAML; run pip install 'trainfast[tools]'",
            name="yaml",
        ) from error
    with open(path, "rb") as file:
        data = file.read()
    try:
        found = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{fspath(path)} must be YAML, got: {reason}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(
            f"the top level of {fspath(path)} must be a mapping, got a "
            f"{type(found).__name__}; write `key: value` lines"
        )
    return found
