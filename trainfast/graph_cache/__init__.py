"""A cache of graphs on disk: built once, read at memory speed, safe in a crash."""

from trainfast.graph_cache.build import BuildError, BuildReport, StaleCacheError, build
from trainfast.graph_cache.cache import Cache, Subset, VerifyReport, open
from trainfast.graph_cache.loader import Loader
from trainfast.graph_cache.points import build_from_points
from trainfast.graph_cache.schema import Counted, Rule, Schema
from trainfast.graph_cache.writer import Writer

__all__ = [
    "BuildError",
    "BuildReport",
    "Cache",
    "Counted",
    "Loader",
    "Rule",
    "Schema",
    "StaleCacheError",
    "Subset",
    "VerifyReport",
    "Writer",
    "build",
    "build_from_points",
    "open",
]
