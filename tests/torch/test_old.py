"""Tensors of a torch before 2.10, whose type has no exchange API: their attributes are
read. The attribute is taken from this torch before the core sees a tensor, in a process
of its own."""

import subprocess
import sys

import pytest

WITHOUT = """
import sys
sys.path.append({root!r})
import torch
for owner in (torch.Tensor, torch._C.TensorBase):
    if "__dlpack_c_exchange_api__" in vars(owner):
        delattr(owner, "__dlpack_c_exchange_api__")
assert not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
import trainfast
from tests import torch_loops as loops
from trainfast import _core
from trainfast.torch import AdamW
"""

SAME_STEPS = """
for dtype in (torch.float32, torch.float64, torch.bfloat16):
    for options in ({}, {"amsgrad": True}, {"maximize": True, "weight_decay": 0.1}):
        ours, theirs = (
            loops.train(cls, loops.make_params(dtype=dtype), **options)
            for cls in (AdamW, torch.optim.AdamW)
        )
        tolerance = {} if dtype != torch.bfloat16 else {"rtol": 0.03, "atol": 0.01}
        loops.assert_same_state(ours, theirs, **tolerance)
assert trainfast.stats().fallbacks == {}, trainfast.stats()
"""

OTHER_MEMORY = """
def run(cls):
    params = loops.make_params(shapes=[(10,), (4, 5)])
    params[1].data = params[1].data.t()
    optimizer = cls(params)
    for step in range(4):
        loops.set_grads(params, step)
        optimizer.step()
        state = optimizer.state[params[1]]
        state["exp_avg"].data = torch.full_like(state["exp_avg"], 0.5)
        params[0].data = params[0].data.clone()
    return optimizer
loops.assert_same_state(run(AdamW), run(torch.optim.AdamW))
assert trainfast.stats().fallbacks == {}, trainfast.stats()
"""

REFUSALS = """
def refusal(grad, param=None):
    param = torch.nn.Parameter(torch.ones(2, 3)) if param is None else param
    arrays = [[torch.zeros_like(param)] for _ in range(2)]
    try:
        trainfast.numpy.adamw_step([param], [grad], *arrays, step=1, lr=0.1)
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    return None
z = torch.view_as_complex(torch.ones(2, 3, 2))
assert refusal(torch.ones(2, 3)) is None
assert refusal(torch.ones(3, 2).t()) is None  # copied in the parameter's layout
assert "shape" in refusal(torch.ones(3, 2))
assert "meta" in refusal(torch.ones(2, 3, device="meta"))
assert "float64, float32" in refusal(torch.ones(2, 3, dtype=torch.int64))
assert "float64, float32" in refusal(z)
assert refusal(torch.ones(2, 3).to_sparse()) is not None
assert "negat" in refusal(z.conj().imag) or "neg" in refusal(z.conj().imag)
freed = torch.ones(2, 3)
freed.untyped_storage().resize_(0)
assert "freed" in refusal(freed)
assert "dense" in refusal(torch.ones(2, 3), torch.ones(2, 6)[:, ::2])
"""

ATTENTION = """
q, k, v = torch.randn(3, 2, 3, 9, 8)
want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
got = trainfast.torch.attention(q, k, v)
torch.testing.assert_close(got, want)
strided = q.transpose(1, 2).contiguous().transpose(1, 2)
torch.testing.assert_close(trainfast.torch.attention(strided, k, v), want)
lengths = torch.tensor([9, 4])
trainfast.torch.attention(q, k, v, kv_lens=lengths)
assert trainfast.stats().fallbacks == {}, trainfast.stats()
"""

# What the module keeps a reference to is known to the garbage collector.
REFERENTS = """
import gc
trainfast.numpy.adamw_step(*([torch.ones(2)] for _ in range(4)), step=1, lr=0.1)
known = {id(each) for each in gc.get_referents(_core)}
for kept in (torch.strided, torch.float32, torch.bfloat16, _core.Workspace):
    assert id(kept) in known, kept
for name in ("grad", "exp_avg", "weight_copy", "data_ptr", "is_contiguous"):
    assert id(sys.intern(name)) in known, name
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "body", [SAME_STEPS, OTHER_MEMORY, REFUSALS, ATTENTION, REFERENTS], ids=range(5)
)
def test_tensors_without_an_exchange_api_are_read_by_their_attributes(body, request):
    code = WITHOUT.format(root=str(request.path.parents[2])) + body
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
