"""Callers that do what nobody should: objects whose export changes the call's lists,
calls back into what is running, arguments of a wild kind."""

import gc

import numpy as np
import pytest

import trainfast
from trainfast import _core


def ones(n=4, dtype=np.float32):
    return np.ones(n, dtype)


class Exports:
    """An array that runs `action` when it is borrowed."""

    def __init__(self, array, action):
        self.array, self.action = array, action

    def __dlpack__(self, **options):
        self.action()
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


# ---- Lists that change while they are read -----------------------------------------


def test_gradients_that_are_dropped_during_the_pass_live_until_its_end():
    def drop():
        grads.clear()
        gc.collect()

    norm = ones(1)
    grads = [Exports(ones(5000), drop), ones(), ones()]
    _core.amp_grads(grads, _core.Workspace(), total_norm=norm)
    assert norm[0] == pytest.approx(5008**0.5)


def test_flags_that_are_dropped_during_the_update_live_until_its_end():
    def drop():
        flags.clear()
        gc.collect()

    scale, tracker = ones(1), np.zeros(1, np.int32)
    flags = [Exports(np.zeros(1, np.float32), drop), ones(1)]
    options = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9}
    _core.amp_update(scale, tracker.view(np.float32), flags, **options)
    assert scale[0] == 0.5


def test_a_step_inside_a_step_with_the_same_workspace_is_refused():
    def again():
        with pytest.raises(RuntimeError, match="workspace must not be used by two"):
            step([ones()])

    def step(grads):
        columns = [ones()], grads, [ones()], [ones()]
        trainfast.adamw_step(*columns, step=1, lr=0.1, workspace=workspace)

    workspace = _core.Workspace()
    step([Exports(ones(), again)])
