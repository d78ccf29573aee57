"""The Attention node cases that the onnx package generates, on every backend.

Each case's output Y must come out. What the operator also returns is not attention's:
past and present keys are concatenations, and `qk_matmul_output` is the matrix that is
never in memory here. Names of cases below say what else is done for which of them.
"""

import numpy as np
import pytest

import trainfast
from tests.attention_calls import ROUNDING, on_device, to_float64

pytest.importorskip("onnx")

# Causal or windowed, with past keys whose number is neither of the two alignments and
# no length makes it one: what the operator forbids is given as a mask.
NEITHER_ALIGNMENT = {"test_attention_local_window_with_past"}


def collect():
    import onnx.backend.test.case.node.attention
    import onnx.helper
    from onnx.backend.test.case.node import _NodeTestCases

    # collect_testcases() would import, and so compute, the cases of all operators.
    for case in _NodeTestCases:
        (node, *others) = case.model.graph.node
        if not others and node.op_type == "Attention":  # else it is the same, expanded
            attributes = {
                a.name: onnx.helper.get_attribute_value(a) for a in node.attribute
            }
            yield Case(case, node, attributes)


class Case:
    """One node with its data, and what attention is to be called with."""

    def __init__(self, case, node, attributes):
        self.name = case.name
        (inputs, outputs), *_ = case.data_sets
        given = iter(inputs)
        names = ("Q", "K", "V", "attn_mask", "past_key", "past_value")
        names += ("nonpad_kv_seqlen",)
        self.given = {n: next(given) for n, used in zip(names, node.input) if used}
        self.attributes, self.expected = attributes, outputs[0]
        self.q, self.k, self.v = (self.heads(name) for name in "QKV")
        self.past = 0
        if "past_key" in self.given:
            self.past = self.given["past_key"].shape[2]
            self.k = np.concatenate([self.given["past_key"], self.k], 2)
            self.v = np.concatenate([self.given["past_value"], self.v], 2)

    def heads(self, name):
        """[B, N, H * D] as [B, H, N, D], without a copy."""
        array = self.given[name]
        if array.ndim == 4:
            return array
        heads = self.attributes["q_num_heads" if name == "Q" else "kv_num_heads"]
        return array.reshape(*array.shape[:2], heads, -1).swapaxes(1, 2)

    def options(self):
        side = {
            name: self.attributes.get(f"{name}_window_size", -1)
            for name in ("left", "right")
        }
        left, right = (None if side[n] < 0 else side[n] for n in side)
        options = {
            "scale": self.attributes.get("scale"),
            "softcap": self.attributes.get("softcap"),
            "is_causal": bool(self.attributes.get("is_causal", 0)),
            "window_size": (left, right),
            "mask": self.mask(),
            "kv_lens": self.given.get("nonpad_kv_seqlen"),
        }
        bounded = options["is_causal"] or left is not None or right is not None
        if self.name in NEITHER_ALIGNMENT:
            options |= {"is_causal": False, "window_size": None}
            options["mask"] = self.bounds(left, right)
        elif options["kv_lens"] is not None:
            options["causal_align"] = "lower_right"
        elif self.past and bounded:
            # query i may look as far as key past + i: so many keys count
            length = self.past + self.q.shape[2]
            options["kv_lens"] = np.full(self.q.shape[0], length)
            options["causal_align"] = "lower_right"
        return options

    def mask(self):
        """Keys that the operator's mask does not reach are forbidden."""
        mask = self.given.get("attn_mask")
        if mask is None or mask.shape[-1] in (1, self.k.shape[2]):
            return mask
        missing = self.k.shape[2] - mask.shape[-1]
        fill = False if mask.dtype == bool else -np.inf
        pad = np.full((*mask.shape[:-1], missing), fill, mask.dtype)
        return np.concatenate([mask, pad], -1)

    def bounds(self, left, right):
        assert "attn_mask" not in self.given
        ahead = np.arange(self.k.shape[2]) - np.arange(self.q.shape[2])[:, None]
        ahead -= self.past
        allowed = ahead <= (0 if self.attributes.get("is_causal") else right)
        return allowed & (ahead >= -left)


CASES = list(collect())


def test_all_cases_are_here():
    assert len(CASES) >= 87
    assert {case.name for case in CASES} >= NEITHER_ALIGNMENT


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_onnx_attention_cases_pass(case, device):
    arrays = [on_device(x, device) for x in (case.q, case.k, case.v)]
    options = {k: on_device(v, device) for k, v in case.options().items()}
    out = to_float64(trainfast.numpy.attention(*arrays, **options))
    if case.expected.ndim == 3:
        out = out.swapaxes(1, 2).reshape(case.expected.shape)
    # theirs is computed in the inputs' dtype throughout
    dtype = case.q.dtype.name
    bound = 1e-6 if dtype == "float32" else 4 * ROUNDING[dtype]
    expected = case.expected.astype(np.float64)
    np.testing.assert_allclose(out, expected, rtol=bound, atol=bound)
