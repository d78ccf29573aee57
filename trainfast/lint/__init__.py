"""Reads a training script, without running it, for faults that cost a run."""

from trainfast.lint.report import lint

__all__ = ["lint"]
