"""The public names of trainfast: what its packages, and two modules, list."""

import inspect
import pkgutil
from importlib import import_module
from importlib.util import find_spec

import trainfast

# Modules that users import by name, beside all packages that have an `__all__`, and the
# packages that they need.
MODULES = {
    "trainfast.torch.accelerate": "accelerate",
    "trainfast.torch.flash_attn": "torch",
    "trainfast.torch.huggingface": "transformers",
    "trainfast.torch.lightning": "lightning",
    "trainfast.torch.trajectory_metrics": "torchmetrics",
}


def packages():
    """The names of all packages of trainfast that list public names."""
    found = ["trainfast"]
    for module in pkgutil.walk_packages(trainfast.__path__, "trainfast."):
        if module.ispkg and hasattr(import_module(module.name), "__all__"):
            found.append(module.name)
    return [*found, *(name for name, needed in MODULES.items() if find_spec(needed))]


def public_objects():
    """{object: "package.name"} of each public class and function, by one name."""
    found = {}
    for package in packages():
        module = import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and not inspect.ismodule(value):
                found.setdefault(value, f"{package}.{name}".removeprefix("trainfast."))
    return found


def public_classes():
    return {name: c for c, name in public_objects().items() if inspect.isclass(c)}
