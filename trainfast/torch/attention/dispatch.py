"""Which way a call of attention goes: the kernel, the kernel as an operator that graphs
know, or torch's own operations.

What the kernels do not take is counted, with the reason, in trainfast.stats().
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from trainfast.stats import count_fallback
from trainfast.torch import private
from trainfast.torch.attention import autograd, custom_ops, math_backend
from trainfast.torch.attention.autograd import FORWARD_MODE
from trainfast.torch.attention.math_backend import Extras, Inputs, Options
from trainfast.torch.private import constant_when_compiled, forward_ad

MAX_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PLAIN = (Tensor, Parameter)
_TRACED = (private.FakeTensor, private.FunctionalTensor)


@constant_when_compiled
def count_once(reason: str) -> None:
    """Counts a fallback; in a compiled function once, when it is traced."""
    count_fallback("attention", reason)


def is_plain(x: Tensor | None) -> bool:
    return x is None or type(x) in PLAIN


def refusal_of(tensors: Sequence[Tensor | None]) -> str | None:
    """The reason why the kernels cannot take these tensors, q first; or None."""
    if private.ATTENTION_REFUSAL is not None:
        return private.ATTENTION_REFUSAL
    compiling = torch.compiler.is_compiling()
    for x in tensors:
        if x is None:
            continue
        if type(x) not in PLAIN and not isinstance(x, _TRACED):
            return f"a tensor of type {type(x).__name__}"
        if x.is_nested or x.layout != torch.strided:
            return "a nested or sparse tensor"
        if not compiling and x.is_neg():  # a compiled graph resolves it
            return "a tensor with its negative bit set"
    q = tensors[0]
    assert q is not None
    if q.device.type not in ("cpu", "cuda", "meta"):
        return f"device {q.device.type}"
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype}"
    return _refusal_when_compiling() if compiling else _refusal_when_eager()


def _refusal_when_eager() -> str | None:
    if torch.jit.is_tracing():
        return "torch.jit.trace"
    return _transform()


@constant_when_compiled
def _transform() -> str | None:
    """What a function is under that the kernels have no rule for; in a graph, what it
    is under where it is traced."""
    if forward_ad._current_level >= 0:
        return FORWARD_MODE
    if private.transform_level() is not None:
        return "a function transform (vmap, grad)"
    return None


def _refusal_when_compiling() -> str | None:
    if math_backend.is_exporting():
        return "torch.export: its programs run without trainfast"
    return _transform()


_named = False


def is_named() -> bool:
    return _named


def set_named(value: bool) -> None:
    """patch("attention"), which asks for the kernels by name: they also run on devices
    where torch has flash attention."""
    global _named
    _named = value


def torchs_are_faster(q: Tensor, chosen: bool = False) -> str | None:
    """The reason to call torch's own function where it computes the same; or None.

    `chosen`: the user has asked for trainfast's kernels by name.

    From sm_80 on torch has flash attention, which was faster than trainfast's kernels
    on an H200. On older GPUs torch has none, and trainfast's kernels use the
    tensor cores for float16 and bfloat16, but not for other dtypes. The options that
    torch lacks (windows, ALiBi, sinks, lengths, gradients of lse) are not asked here.
    """
    if not q.is_cuda:
        return None
    if not (chosen or _named) and has_flash_attention(q.device):
        return "CUDA: torch's flash attention, which was faster"
    dtype = q.dtype
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
    if dtype not in (torch.float16, torch.bfloat16):
        return "CUDA: no kernel with tensor cores for this dtype"
    return None


@constant_when_compiled
def has_flash_attention(device: torch.device) -> bool:
    """Whether torch's flash attention runs there, or there is no GPU to ask."""
    return _ask_for_flash_attention(device)


@functools.cache
def _ask_for_flash_attention(device: torch.device) -> bool:
    return not torch.cuda.is_available() or (
        torch.cuda.get_device_capability(device)[0] >= 8
    )


def is_watched(q: Tensor) -> bool:
    """Whether somebody looks at operators rather than results; q is plain or traced."""
    return (
        torch.compiler.is_compiling()
        or not is_plain(q)
        or q.is_meta
        or private.n_dispatch_modes() > 0
    )


def run(inputs: Inputs, extras: Extras, options: Options) -> tuple[Tensor, Tensor]:
    if is_watched(inputs.q):
        return custom_ops.as_operator(inputs, extras, options)
    return autograd.differentiable(inputs, extras, options)


def draw_seed(q: Tensor) -> Tensor:
    """A seed from torch's generator: manual_seed and checkpointing reproduce it."""
    return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=q.device)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts the arguments as autocast does for torch's attention."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


def attend(inputs: Inputs, extras: Extras, options: Options) -> tuple[Tensor, Tensor]:
    """Runs the kernel, or plain operations if the kernel cannot run."""
    refusal = refusal_of((*inputs, *extras))
    if refusal is None and max(inputs.q.shape[-1], inputs.v.shape[-1]) > MAX_DIM:
        refusal = f"a head dim above {MAX_DIM}"
    if refusal is None:
        try:
            return run(inputs, extras, options)
        except NotImplementedError as error:
            refusal = str(error)
    _check_devices((*inputs, *extras))
    count_once(refusal)
    return math_backend.attention(inputs, extras, options)


def _check_devices(tensors: Sequence[Tensor | None]) -> None:
    """Raises ValueError for tensors on several devices. torch accepts meta tensors
    among others, and returns uninitialised memory."""
    devices = {x.device for x in tensors if x is not None}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        raise ValueError(f"tensors must be on one device, got {names}")
