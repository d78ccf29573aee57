"""Objects of the user's modules, named on the command line."""

import sys
from importlib import import_module
from typing import Any


def object_of(name: str) -> Any:
    """What "module:name" names; modules of the working directory are found, too."""
    module, colon, inside = name.partition(":")
    if not colon or not inside:
        raise ValueError(f"an object must be given as module:name, got {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = import_module(module)
        for part in inside.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} must be importable: {error}") from error
    return found
