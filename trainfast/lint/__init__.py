"""Reads a training script, without running it, for faults that cost a run."""

from trainfast.lint.report import Finding, LintReport, lint

__all__ = ["Finding", "LintReport", "lint"]
