"""A cache of graphs: built once, read at memory speed, never a graph lost."""

from trainfast.graph_cache.schema import Count, Counted, Field, Rule, Schema

__all__ = ["Count", "Counted", "Field", "Rule", "Schema"]
