"""The search for neighbours has kernels for the CPU's backends only."""

import pytest


@pytest.fixture
def backend(backend):
    if backend == "simt":
        pytest.skip("points on a GPU are searched on the CPU")
    return backend
