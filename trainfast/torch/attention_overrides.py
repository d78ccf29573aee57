"""The kernels under torch's own operators, which also serves what torch's names do not
reach: C++ and scripted code, compiled graphs, direct calls of torch.ops.aten.

Torch's autograd calls the backward of the operator whose forward it called. What is
passed between the two has torch's values and layouts here, so that either of them may
be torch's own: a call that these kernels refuse goes on to torch's, counted.
"""

import warnings
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainfast.torch import attention_ops
from trainfast.torch.attention_math import Extras, Inputs, Options
from trainfast.torch.attention_route import (
    DTYPES,
    count_once,
    is_left_to_torch,
    torchs_are_faster,
)
from trainfast.torch.sdpa import shape_refusal

_ALIGNED_ROWS = 32  # what the memory-efficient operator rounds rows of lse up to
_QKV = (True, True, True, False, False, False)


class _Call(NamedTuple):
    inputs: Inputs
    extras: Extras
    options: Options


def _call_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    chosen: bool,
) -> _Call | str:
    """The arguments as the kernels take them, or why torch's own shall run.

    Torch's dropout, of a forward or a backward, has a generator of its own.
    """
    refusal = shape_refusal(q, k, v, mask, is_causal, True)
    if refusal is None and q.dim() != 4:
        refusal = "other than 4 dims"
    if refusal is None and dropout_p != 0:
        refusal = "dropout under torch's operator"
    if refusal is None and q.dtype not in DTYPES:
        refusal = f"dtype {q.dtype}"
    if refusal is None:
        refusal = torchs_are_faster(q, chosen)
    if refusal is not None:
        return refusal
    options = Options(q.shape[-1] ** -0.5 if scale is None else scale, is_causal)
    return _Call(Inputs(q, k, v), Extras(mask), options)


def _forward(call: _Call | str, out: Callable[[], Tensor]) -> Any:
    """Fills the tensor that `out` makes and returns it with lse; None, counted, where
    torch's own shall run."""
    if isinstance(call, _Call):
        try:
            made, lse = attention_ops.forward(*call, out=out())
        except (NotImplementedError, ValueError) as error:
            call = str(error)
        else:
            if call.extras.mask is not None:
                # torch has it so for a row without a key
                lse = lse.masked_fill(lse.isneginf(), 0)
            return made, lse
    count_once(call)
    return None


def _backward(
    call: _Call | str,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    grads: Callable[[Tensor], Tensor],
) -> Any:
    """Fills what `grads` makes like q, k and v; None where torch's own shall run, which
    the forward has counted."""
    if isinstance(call, str):
        return None
    inputs, extras, options = call
    if lse.stride(-1) != 1:
        lse = lse.contiguous()
    try:
        made = [grads(x) for x in inputs[:3]]
        attention_ops.backward(
            grad_out, None, _QKV, inputs, extras, out, lse, options, into=made
        )
    except (NotImplementedError, ValueError) as error:
        count_once(str(error))
        return None
    return made


def _rows_first(like: Tensor, dim: int | None = None) -> Tensor:
    """An empty tensor of like's sizes, but for the last, that lies in memory as [batch,
    rows, heads, dim]."""
    batch, heads, rows, last = like.shape
    dim = last if dim is None else dim
    return attention_ops.empty(like, (batch, rows, heads, dim)).transpose(1, 2)


# ---- Torch's operators ---------------------------------------------------------------
# The first argument is whether the user has chosen these kernels by name.


def _flash_on_cpu(
    chosen: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    call = _call_of(query, key, value, attn_mask, dropout_p, is_causal, scale, chosen)
    made = _forward(
        _of_one_dim(call), partial(attention_ops.empty_rows, query, query.shape[-1])
    )
    if made is None:
        return None
    out, lse = made
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _flash_on_cpu_backward(
    chosen: bool,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    call = _call_of(query, key, value, attn_mask, dropout_p, is_causal, scale, chosen)
    made = _backward(_of_one_dim(call), grad_out, out, logsumexp, _rows_first)
    return made and tuple(made)


def _of_one_dim(call: _Call | str) -> _Call | str:
    """As torch's flash attention wants it."""
    if isinstance(call, _Call):
        q, _, v = call.inputs[:3]
        if q.shape[-1] != v.shape[-1] or q.stride(-1) != 1:
            return "a value dim of its own, or no stride 1, under torch's operator"
    return call


def _flash_on_cuda(
    chosen: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    call = _call_of(query, key, value, None, dropout_p, is_causal, scale, chosen)
    made = _forward(_of_one_dim(call), partial(torch.empty_like, query))
    if made is None:
        return None
    rows = query.shape[2], key.shape[2]
    rng_state = query.new_zeros(2, dtype=torch.uint64)
    unused = query.new_zeros((), dtype=torch.uint64)
    return (*made, None, None, *rows, rng_state, unused, query.new_empty(0))


def _flash_on_cuda_backward(
    chosen: bool,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Any:
    call = _call_of(query, key, value, None, dropout_p, is_causal, scale, chosen)
    lse = logsumexp[..., : query.shape[2]]
    made = _backward(_of_one_dim(call), grad_out, out, lse, torch.empty_like)
    return made and tuple(made)


def _efficient(
    chosen: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    call = _call_of(query, key, value, attn_bias, dropout_p, is_causal, scale, chosen)
    made = _forward(call, lambda: _rows_first(query, value.shape[-1]))
    if made is None:
        return None
    out, lse = made
    if compute_log_sumexp:
        # infinity in the rows of no query, whose weights are 0 then
        missing = -lse.shape[-1] % _ALIGNED_ROWS
        lse = torch.nn.functional.pad(lse, (0, missing), value=torch.inf)
    else:
        lse = lse.new_empty((*lse.shape[:2], 0))
    seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))
    return out, lse, seed, offset


def _efficient_backward(
    chosen: bool,
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: tuple[bool, bool, bool, bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    if grad_input_mask[3]:
        count_once("the gradient of a mask under torch's operator")
        return None
    call = _call_of(query, key, value, attn_bias, dropout_p, is_causal, scale, chosen)
    lse = logsumexp[..., : query.shape[2]]
    made = _backward(call, grad_out_, out, lse, _rows_first)
    return made and (*made, None)


# ---- Registration --------------------------------------------------------------------


class Pair(NamedTuple):
    """An operator and its backward, and what takes their place."""

    name: str
    key: str  # torch's dispatch key
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    only_chosen: bool = False  # by name: torch's own is the better choice otherwise


PAIRS = [
    Pair(
        "_scaled_dot_product_flash_attention_for_cpu",
        "CPU",
        _flash_on_cpu,
        _flash_on_cpu_backward,
    ),
    # What torch picks on a GPU without flash attention (sm_75), or for masks.
    Pair(
        "_scaled_dot_product_efficient_attention",
        "CUDA",
        _efficient,
        _efficient_backward,
    ),
    Pair(
        "_scaled_dot_product_flash_attention",
        "CUDA",
        _flash_on_cuda,
        _flash_on_cuda_backward,
        only_chosen=True,
    ),
]


class _Override:
    """One operator's kernel: `function`, or torch's where that returns None."""

    def __init__(self, name: str, key: str, function: Callable[..., Any]) -> None:
        self.torchs = torch.library.get_kernel(f"aten::{name}", key)
        self.function = function

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        made = None if is_left_to_torch() else self.function(*args, **kwargs)
        return self.torchs.call_boxed(keys, *args, **kwargs) if made is None else made


_kept: list[Any] = []  # torch's handles of all that was ever registered


def _register(pair: Pair, library: torch.library.Library, chosen: bool) -> None:
    """Does nothing where this torch has no such kernel, or where somebody else's Python
    is in its place, which would be gone one day."""
    others: set[str] = getattr(torch.library, "_impls", set())
    names = (pair.name, f"{pair.name}_backward")
    if any(f"aten/{name}/{pair.key}" in others for name in names):
        return
    try:
        overrides = [
            _Override(name, pair.key, partial(function, chosen))
            for name, function in zip(names, pair[2:4])
        ]
    except RuntimeError:
        return
    with warnings.catch_warnings():  # that torch's own are overridden
        warnings.simplefilter("ignore")
        for name, override in zip(names, overrides):
            library.impl(name, override, pair.key, with_keyset=True)
            # What another thread is in when it is unregistered must not be freed.
            _kept.append(torch.library.get_kernel(f"aten::{name}", pair.key))


class _Held:
    """Who wants the operators overridden; they are torch's own when nobody does."""

    def __init__(self) -> None:
        self.by: set[str] = set()
        self.library: torch.library.Library | None = None
        self.lock = Lock()

    def change(self, who: str, wanted: bool) -> None:
        with self.lock:
            by = self.by | {who} if wanted else self.by - {who}
            if by == self.by:
                return
            self.by, self.library = by, None  # which unregisters
            if by and hasattr(torch.library, "get_kernel"):
                self.library = torch.library.Library("aten", "IMPL")
                for pair in PAIRS:
                    if "choice" in by or not pair.only_chosen:
                        _register(pair, self.library, "choice" in by)


_held = _Held()


def are_patched() -> bool:
    """Whether set_patched has been asked for the kernels."""
    return "patch" in _held.by


def set_patched(value: bool) -> None:
    """Puts the kernels under torch's operators where they are the better choice, or
    takes them away: trainfast.patch("attention_operators")."""
    _held.change("patch", value)


class Chosen:
    """The kernels under torch's operators wherever they can run, until remove()."""

    def __init__(self) -> None:
        _held.change("choice", True)

    def remove(self) -> None:
        _held.change("choice", False)
