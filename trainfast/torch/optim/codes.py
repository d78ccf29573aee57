"""AdamW's 8-bit state (`state_dtype="int8"`): made, and converted from and to floats.

csrc/adamw_codes.h has the code and its reasons.
"""

from typing import Any

import torch
from torch import Tensor

from trainfast.torch import private

BLOCK = 128  # elements, in the order of memory
LEAST = 4096  # smaller parameters keep float state
SCALES = "scales_q8"
NAMES = {
    "exp_avg": "exp_avg_q8",
    "exp_avg_sq": "exp_avg_sq_q8",
    "max_exp_avg_sq": "max_exp_avg_sq_q8",
}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def wanted(param: Tensor, group: dict[str, Any]) -> bool:
    """Whether the moments of the parameter are to be 8-bit codes."""
    return (
        group["state_dtype"] == "int8"
        and param.dtype in _DTYPES
        and param.numel() >= LEAST
        and type(param) in (Tensor, torch.nn.Parameter, private.FakeTensor)
        and _is_dense(param)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill the memory, in any order of dimensions."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def is_coded(state: dict[str, Any]) -> bool:
    """Whether a parameter's state is 8-bit codes."""
    return NAMES["exp_avg"] in state


def new(param: Tensor, amsgrad: bool) -> dict[str, Tensor]:
    """The codes and scales of moments that are 0."""
    names = list(NAMES.values())[: 3 if amsgrad else 2]
    codes = {name: torch.zeros_like(param, dtype=torch.uint8) for name in names}
    shape = (-(-param.numel() // BLOCK), 5 if amsgrad else 3)
    codes[SCALES] = torch.zeros(shape, dtype=torch.float32, device=param.device)
    return codes


def decode(state: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The state with float moments in place of codes."""
    scales, decoded = state[SCALES], {}
    for name, value in state.items():
        plain = next((n for n, coded in NAMES.items() if coded == name), None)
        if plain is not None:
            decoded[plain] = _decode(value, scales, plain).to(dtype)
        elif name != SCALES:
            decoded[name] = value
    return decoded


def encode(state: dict[str, Any], param: Tensor, amsgrad: bool) -> dict[str, Any]:
    """The state with codes, laid out as the parameter, in place of float moments."""
    coded: dict[str, Any] = {}
    scales = []
    for name in list(NAMES)[: 3 if amsgrad else 2]:
        codes = torch.empty_like(param, dtype=torch.uint8)
        scales += _encode(codes, state[name].to(param.device), name)
        coded[NAMES[name]] = codes
    coded[SCALES] = torch.stack(scales, 1)
    rest = {name: value for name, value in state.items() if name not in NAMES}
    step = {"step": rest.pop("step")} if "step" in rest else {}
    return {**step, **coded, **rest}


# ---- One moment ----------------------------------------------------------------------


def _flat(tensor: Tensor) -> Tensor:
    """A view of a dense tensor's elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _root(value: Tensor, shift: int, bias: int) -> Tensor:
    bits = (value.view(torch.int32) >> shift) + (bias << 23)
    return bits.view(torch.float32) - 2.0 ** (bias - 127)


def _power(root: Tensor, shift: int, bias: int) -> Tensor:
    bits = (root + 2.0 ** (bias - 127)).view(torch.int32)
    return ((bits - (bias << 23)) << shift).view(torch.float32)


def _decode(codes: Tensor, scales: Tensor, name: str) -> Tensor:
    out = torch.empty_like(codes, dtype=torch.float32)
    each = scales.repeat_interleave(BLOCK, 0)[: codes.numel()]
    code = _flat(codes).float()
    if name == "exp_avg":
        root = (code - 128) * each[:, 0]
        _flat(out).copy_(_power(root.abs(), 1, 32).copysign(root))
    else:
        at = 1 if name == "exp_avg_sq" else 3
        _flat(out).copy_(_power(each[:, at] + code * each[:, at + 1], 2, 64))
    return out


def _encode(codes: Tensor, values: Tensor, name: str) -> list[Tensor]:
    """Fills `codes`; returns the columns of the scales."""
    laid = torch.empty_like(codes, dtype=torch.float32).copy_(values)
    blocks = -(-codes.numel() // BLOCK)
    block = torch.nn.functional.pad(_flat(laid), (0, blocks * BLOCK - codes.numel()))
    if codes.numel() % BLOCK:  # the last one is filled up with one of its values
        block[codes.numel() :] = block[codes.numel() - 1]
    block = block.view(blocks, BLOCK).nan_to_num()
    if name == "exp_avg":
        root = _root(block.abs(), 1, 32).copysign(block)
        scales = [root.abs().amax(1) / 127]
        code = root / scales[0][:, None].clamp(min=1e-37) + 128
    else:
        root = _root(block, 2, 64)
        low, high = root.aminmax(dim=1)
        scales = [low, (high - low) / 255]
        code = (root - low[:, None]) / scales[1][:, None].clamp(min=1e-37)
        code = code.maximum((root > low[:, None]).float())
    _flat(codes).copy_(code.round().view(-1)[: codes.numel()].to(torch.uint8))
    return scales
