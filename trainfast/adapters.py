"""Adapters of frameworks by name, for packages that the adapters are built on.

`trainfast.torch.pyg` imports the graph cache, and the graph cache makes PyG's batches
when a loader is asked for them. The graph cache must not import the adapter, so it asks
for it here. `trainfast` itself, which knows all packages, registers the modules.
"""

from importlib import import_module
from types import ModuleType

_modules: dict[str, str] = {}


def register(name: str, module: str) -> None:
    """Makes `load(name)` import this module."""
    _modules[name] = module


def load(name: str) -> ModuleType:
    """The adapter's module, imported when it is first asked for."""
    return import_module(_modules[name])
