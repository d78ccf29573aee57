"""Puts trainfast's names in the place of a framework's, and takes them out again.

A capability registers which public names it replaces. `patch()` rebinds these names and
every module's global that was imported from them before; names imported later find the
replacement by themselves, so that it does not matter which comes first. Only globals of
modules are rebound: existing objects, subclasses, defaults of arguments and entries of
containers stay what they are. So do trainfast's modules and, unless a target says
otherwise, the framework's other ones, which pickle and its own classes look into. What
this version of the framework lacks is skipped, and the report says so.
"""

from trainfast.patching import targets  # noqa: F401  (registers them)
from trainfast.patching.registry import Patch, is_patched, patch, unpatch
from trainfast.patching.report import PatchReport

__all__ = ["Patch", "PatchReport", "is_patched", "patch", "unpatch"]
