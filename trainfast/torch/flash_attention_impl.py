"""The kernels as an implementation that torch.nn.attention can activate."""

import warnings
from typing import Any

import torch
from torch import Tensor

from trainfast.torch import attention_ops
from trainfast.torch.attention_math import Extras, Inputs, Options
from trainfast.torch.attention_route import DTYPES, count_once
from trainfast.torch.sdpa import shape_refusal

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = f"{_FORWARD}_backward"


class _Registered:
    """The kernels under torch's operators, until remove()."""

    def __init__(self) -> None:
        self._torchs = {
            name: torch.library.get_kernel(f"aten::{name}", "CPU")
            for name in (_FORWARD, _BACKWARD)
        }
        self._library: torch.library.Library | None
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # that torch's own are overridden
            warnings.simplefilter("ignore")
            for name, function in (
                (_FORWARD, self._forward),
                (_BACKWARD, self._backward),
            ):
                self._library.impl(name, function, "CPU", with_keyset=True)

    def remove(self) -> None:
        self._library = None  # which unregisters them

    def _forward(
        self,
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Any:
        call = _call_of(query, key, value, is_causal, attn_mask, scale)
        if call is not None:
            return attention_ops.forward(*call)
        return self._torchs[_FORWARD].call_boxed(
            keys,
            query,
            key,
            value,
            dropout_p,
            is_causal,
            attn_mask=attn_mask,
            scale=scale,
        )

    def _backward(
        self,
        keys: Any,
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
        call = _call_of(query, key, value, is_causal, attn_mask, scale)
        if call is not None:
            inputs, extras, options = call
            wanted = (True, True, True, False, False, False)
            lse = logsumexp.contiguous()
            grads = attention_ops.backward(
                grad_out, None, wanted, inputs, extras, out, lse, options
            )
            return tuple(grads[:3])
        return self._torchs[_BACKWARD].call_boxed(
            keys,
            grad_out,
            query,
            key,
            value,
            out,
            logsumexp,
            dropout_p,
            is_causal,
            attn_mask=attn_mask,
            scale=scale,
        )


def _call_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Inputs, Extras, Options] | None:
    """The kernel's arguments; None, counted, where it does not take them."""
    reason = shape_refusal(query, key, value, mask, is_causal, True)
    if reason is None and query.dtype not in DTYPES:
        reason = f"dtype {query.dtype}"
    if reason is not None:
        count_once(reason)
        return None
    options = Options(query.shape[-1] ** -0.5 if scale is None else scale, is_causal)
    return Inputs(query, key, value), Extras(mask), options


def register_flash_attention_impl() -> bool:
    """Tells torch of these kernels as the implementation "trainfast".

    torch.nn.attention.activate_flash_attention_impl("trainfast") then puts them under
    torch's own operators on the CPU, which also reaches code that patch() cannot, and
    restore_flash_attention_impl() takes them away. Calls with dropout or a learned mask
    do not get that far in torch. Returns whether this torch has the registration.
    """
    try:
        from torch.library import get_kernel  # noqa: F401
        from torch.nn.attention import register_flash_attention_impl as register
    except ImportError:
        return False
    register("trainfast", register_fn=_Registered)
    return True
