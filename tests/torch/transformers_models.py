"""Whether the installed transformers has a model whose attention can be replaced."""

import inspect

import pytest

transformers = pytest.importorskip("transformers")


def need(model_name: str, *, attention: bool = True) -> None:
    """Skips a test whose model is missing, or computes attention by its own classes."""
    model = getattr(transformers, model_name, None)
    if model is None:
        pytest.skip(f"this transformers has no {model_name}")
    if attention and not hasattr(inspect.getmodule(model), "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip(f"this transformers' {model_name} has attention of its own")
