"""Attention with all that trainfast's kernels can do, for torch."""

import math
from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from trainfast.torch.attention import autograd, fast_path
from trainfast.torch.attention.dispatch import (
    DTYPES,
    attend,
    autocast,
    draw_seed,
    is_watched,
    refusal_of,
)
from trainfast.torch.attention.math_backend import Extras, Inputs, Options


class _Keywords(TypedDict, total=False):
    """What the overloads of attention() have in common; for type checkers."""

    mask: Tensor | None
    bias: Tensor | None
    is_causal: bool
    causal_align: str
    window_size: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    dropout_p: float
    seed: int | Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    kv_lens: Tensor | None
    layout: str


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Keywords],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Keywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    **options: Unpack[_Keywords],
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    causal_align: str = "upper_left",
    window_size: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    kv_lens: Tensor | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask + bias) v in memory O(n), with its derivatives.

    Args:
        q: [batch, heads, n_q, dim]; with layout "bshd" [batch, n_q, heads, dim]; with
            cu_seqlens [total_q, heads, dim], which is layout "thd".
        k, v: the same with kv_heads, of which heads is a multiple; v may have another
            dim. Floating point of one dtype; dims up to 256, above by plain operations.
        mask: broadcasts to [batch, heads, n_q, n_k]. bool: True takes part; floating
            point: added to the scores, without a gradient.
        bias: broadcasts likewise, added to the scores, with a gradient of its own
            shape.
        is_causal: a query sees the keys up to its diagonal.
        causal_align: "upper_left": the diagonal of query i is key i; "lower_right": key
            i + n_k - n_q, so that the last query sees all.
        window_size: (left, right), how far from its diagonal a query sees; None on a
            side: any distance.
        scale: of the scores; None: 1 / sqrt(dim).
        softcap: scores become softcap * tanh(score / softcap), before mask and bias.
        alibi_slopes: [heads] or [batch, heads]; slope * |diagonal - key| is subtracted.
        sinks: [heads], a score of each head that takes part without a value.
        dropout_p: in [0, 1).
        seed: of the dropout, an int or an int64 tensor of one element on the device;
            None: from torch's generator.
        cu_seqlens_q, cu_seqlens_k: [batch + 1], int32 or int64: item b has the rows
            cu_seqlens[b] .. cu_seqlens[b + 1] - 1.
        max_seqlen_q, max_seqlen_k: the longest item; None: found by a look at
            cu_seqlens, which on a GPU waits for it, and therefore is only taken
            there where mask or bias need the exact number.
        kv_lens: [batch], int32 or int64: keys past it are not seen.
        layout: "bhsd", "bshd" or "thd", the order of the dimensions of q, k, v and out.
        return_lse: also returns the logarithm of each row's sum of exp(score).

    Returns:
        out like q but with v's last dim, and with return_lse lse [batch, heads, n_q] or
        [heads, total_q], float32 (float64 for float64). Rows without an allowed key
        are 0, with an lse of -infinity, and have no gradient.

    Differentiable, twice at least, in q, k, v, bias, alibi_slopes and sinks, also
    through lse. float64, float32, float16 and bfloat16; q, k and v follow autocast.
    Where the kernel cannot run (another device, function transforms), plain torch
    operations do the same, counted in trainfast.stats() with the reason.

    Raises:
        ValueError: arguments that do not go together.
        TypeError: not a tensor, or not a number.
        NotImplementedError: another dtype.

    The algorithm: Dao, arXiv:2307.08691.
    """
    if (
        bias is alibi_slopes is sinks is None
        and cu_seqlens_q is cu_seqlens_k is kv_lens is None
        and window_size is None
        and softcap is None
        and (causal_align, layout, dropout_p) == ("upper_left", "bhsd", 0)
        and not return_lse
        and fast_path.is_open(q, k, v, mask, is_causal, scale)
    ):
        out = fast_path.attend(q, k, v, mask, is_causal, scale)
        if out is not None:
            return out
    call = prepare(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        is_causal=is_causal,
        causal_align=causal_align,
        window_size=window_size,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        seed=seed,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        kv_lens=kv_lens,
        layout=layout,
    )
    out, lse = attend(*call)
    return (out, lse) if return_lse else out


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    causal_align: str = "upper_left",
    window_size: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    kv_lens: Tensor | None = None,
    layout: str = "bhsd",
) -> tuple[Inputs, Extras, Options]:
    """The arguments of attention(), checked as far as torch need not look at shapes."""
    _check_tensors(q=q, k=k, v=v)
    _check_terms(mask, bias, alibi_slopes, sinks)
    _check_lengths(cu_seqlens_q, cu_seqlens_k, kv_lens)
    q, k, v = autocast(q, k, v)
    if q.dtype not in DTYPES:
        raise NotImplementedError(
            f"q must be float64, float32, float16 or bfloat16, got {q.dtype}"
        )
    if scale is None:
        scale = 1 / math.sqrt(max(q.shape[-1], 1))
    scale, dropout_p = _number("scale", scale), _number("dropout_p", dropout_p)
    softcap = None if softcap is None else _number("softcap", softcap)
    _check_numbers(dropout_p, softcap)
    _check_words(causal_align, layout, cu_seqlens_q is not None)
    left, right = _window(window_size)
    options = Options(
        scale=scale,
        is_causal=bool(is_causal),
        bottom_right=causal_align == "lower_right",
        window_left=left,
        window_right=right,
        softcap=softcap or 0.0,
        dropout_p=dropout_p,
        max_seqlen_q=max_seqlen_q or _longest(cu_seqlens_q, q, mask, bias),
        max_seqlen_k=max_seqlen_k or _longest(cu_seqlens_k, k, mask, bias),
        bnhd=layout == "bshd" and cu_seqlens_q is None,
    )
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    inputs = Inputs(q, k, v, bias, _to(alibi_slopes, wide), _to(sinks, wide))
    extras = Extras(
        mask,
        _seed(seed, q) if dropout_p > 0 else None,
        _int64(cu_seqlens_q),
        _int64(cu_seqlens_k),
        _int64(kv_lens),
    )
    return inputs, extras, options


def _longest(ends: Tensor | None, packed: Tensor, *terms: Tensor | None) -> int:
    """A bound of the items' lengths; 0: the core looks by itself."""
    if ends is None or not ends.is_cuda:
        return 0
    if all(term is None for term in terms):
        return max([1, *packed.shape[:1]])  # no item is longer than all together
    return max(1, int(ends.diff().max())) if ends.numel() > 1 else 1


def attend_packed(
    packed: Tensor, inputs: Inputs, extras: Extras, options: Options
) -> Tensor:
    """Attention of q, k and v that are the parts of `packed`, [..., 3, heads, dim]."""
    slopes = inputs.alibi_slopes
    if (
        torch.is_grad_enabled()
        and packed.requires_grad
        and packed.dtype == inputs.q.dtype  # not cast by autocast
        and not (slopes is not None and slopes.requires_grad)
        and not is_watched(packed)
        and refusal_of((packed, slopes, *extras)) is None
    ):
        try:
            return autograd.differentiable_packed(packed, slopes, extras, options)
        except NotImplementedError:
            pass  # found again, and counted
    return attend(inputs, extras, options)[0]


def _check_tensors(**given: Tensor | None) -> None:
    for name, x in given.items():
        if not isinstance(x, Tensor):
            remedy = "; trainfast.numpy.attention takes arrays"
            raise TypeError(
                f"{name} must be a tensor, got {type(x).__name__}"
                + (remedy if hasattr(x, "__dlpack__") else "")
            )


def _check_terms(
    mask: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Plain operations would take others for numbers."""
    terms = {"mask": mask, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    _check_tensors(**{name: x for name, x in terms.items() if x is not None})
    if mask is not None:
        if mask.requires_grad:
            raise ValueError("mask must not require a gradient (bias may), got one")
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise NotImplementedError(
                f"mask must be bool or of floats, got {mask.dtype}"
            )
    if bias is not None and not bias.is_floating_point():
        raise NotImplementedError(f"bias must be of floats, got {bias.dtype}")


def _check_lengths(
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, kv_lens: Tensor | None
) -> None:
    given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    for name, x in (given | {"kv_lens": kv_lens}).items():
        if x is None:
            continue
        _check_tensors(**{name: x})
        if x.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64, got {x.dtype}")


def _number(name: str, value: float) -> float:
    """Also of a tensor of one element, but for one whose gradient would be lost."""
    if isinstance(value, Tensor) and value.requires_grad:
        raise ValueError(f"{name} must not require a gradient, got one that does")
    if isinstance(value, str):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except (TypeError, RuntimeError):
        raise TypeError(f"{name} must be a number, got {value!r}") from None
    except OverflowError:
        raise ValueError(f"{name} must fit into float64, got {value}") from None


def _is_integer(value: object) -> bool:
    """torch.compile knows what hasattr says of constants only."""
    return isinstance(value, int) or hasattr(value, "__index__")


def _check_words(causal_align: str, layout: str, packed: bool) -> None:
    if causal_align not in ("upper_left", "lower_right"):
        raise ValueError(
            f"causal_align must be 'upper_left' or 'lower_right', got {causal_align!r}"
        )
    if layout not in ("bhsd", "bshd", "thd"):
        raise ValueError(f"layout must be 'bhsd', 'bshd' or 'thd', got {layout!r}")
    if layout == "thd" and not packed:
        raise ValueError("layout 'thd' needs cu_seqlens_q and cu_seqlens_k")


def _check_numbers(dropout_p: float, softcap: float | None) -> None:
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be None or above 0, got {softcap}")


def _window(window_size: tuple[int | None, int | None] | None) -> tuple[int, int]:
    """As the core takes it: -1 for any distance."""
    if window_size is not None and (
        not isinstance(window_size, (tuple, list)) or len(window_size) != 2
    ):
        raise ValueError(
            f"window_size must be (left, right) or None, got {window_size!r}"
        )
    left, right = (None, None) if window_size is None else window_size
    for side in (left, right):
        if side is not None and (not _is_integer(side) or side < 0):
            raise ValueError(
                f"window_size must be None or integers >= 0, got {window_size}"
            )
    far = 2**62  # beyond any key, and within the core's integers
    return -1 if left is None else min(left, far), (
        -1 if right is None else min(right, far)
    )


def _to(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return x if x is None else x.to(dtype).contiguous()


def _int64(x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    return (x.to(torch.int64) if x.dtype == torch.int32 else x).contiguous()


def _seed(seed: int | Tensor | None, q: Tensor) -> Tensor:
    if seed is None:
        return draw_seed(q)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64:
            raise ValueError(f"seed must be int64, got {seed.dtype}")
        return seed
    if not _is_integer(seed):
        raise ValueError(f"seed must be an integer or a tensor, got {seed!r}")
    if isinstance(seed, int) and not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must fit into 64 bits with sign, got {seed}")
    return torch.full((), seed, dtype=torch.int64, device=q.device)
