"""Attention on any arrays: softmax(q k^T) v with all options, and its gradients."""

import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainfast import _core, sequence_lengths
from trainfast.numpy.arrays import (
    Array,
    as_array,
    autograd_notice,
    cast,
    dtype_name,
    empty,
    is_on_cpu,
    row_major,
    unit_stride,
)
from trainfast.report import one_line
from trainfast.stats import count_call, count_fallback

Window = tuple[int | None, int | None]


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    causal_align: str = "upper_left",
    window_size: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    seed: int | Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    kv_lens: Array | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Array | None = None,
    stream: int = 0,
) -> Any:
    """softmax(q k^T) v in one pass over the keys, in memory that grows with N, not N^2.

    With s the scores of one head of one batch item, i a query, j a key::

        s = scale * q k^T                        softcap * tanh(s / softcap) if set
        s = s + mask + bias - alibi_slope * |i + shift - j|
        out = dropout(exp(s) / (sum_j exp(s) + exp(sink))) v

    where shift is 0 with causal_align "upper_left", and with "lower_right" the item's
    number of keys less that of its queries. A row without an allowed key has output 0.

    Args:
        q: [B, H, Nq, D], of float32, bfloat16, float16 or float64. D is 1 to 256.
        k, v: [B, Hkv, Nk, D] and [B, Hkv, Nk, Dv] of q's dtype; H is a multiple of
            Hkv, and head h of q looks at head h // (H / Hkv).
        mask: bool (True: may look) or float (added), of 0 to 4 dimensions that
            broadcast to [B, H, Nq, Nk].
        bias: float, added, broadcast as the mask; it may have a gradient.
        is_causal: query i sees keys j <= i + shift. May be combined with all else.
        causal_align: "upper_left" or "lower_right", which set the shift above.
        window_size: (left, right): keys i + shift - left to i + shift + right; None is
            unbounded on that side.
        scale: 1 / sqrt(D) unless given; up to 1e37 in size (1e300 with float64).
        softcap: 1e-37 to 1e37 (1e-300 to 1e300 with float64), or 0 or None for none.
        alibi_slopes: [H] or [B, H].
        sinks: [H], a score without a value.
        dropout_p: in [0, 1), rounded to a multiple of 1 / 65536, of which 65535 is the
            most.
        seed: of the dropout: an integer, or an array of one int64 on q's device. The
            same seed drops the same elements on every device and in the gradients.
        cu_seqlens_q, cu_seqlens_k: [B + 1] of int32 or int64: q, k and v are then
            [total, H, D], and item b has rows cu_seqlens[b] to cu_seqlens[b + 1] - 1.
            On a GPU they are not checked but with TRAINFAST_CHECK_LENGTHS=1 in the
            environment, since that waits for it; nothing outside is touched.
        kv_lens: [B] of int32 or int64: the item's keys from there on are forbidden.
            Checked as cu_seqlens.
        layout: "bhsd"; "bshd" for [B, N, H, D]; or "thd", with cu_seqlens.
        return_lse: whether to return (out, lse): the natural logarithm of each row's
            sum, [B, H, Nq] or [H, total], float32 (float64 where q is); -infinity for
            a row without an allowed key.
        out: an array to write to; rows of no item stay as they are. Needed where
            neither q's library nor NumPy can make one.
        stream: the cudaStream_t to launch on, as an integer; 0 is the default stream.

    Returns:
        out: [B, H, Nq, Dv] (or [B, Nq, H, Dv], [total, H, Dv]), of q's dtype and kind;
            NumPy's where q's library makes none that can be written, as JAX.

    Arrays may have any strides of whole elements. Of q, k and v one that has not stride
    1 in its last dimension, or runs backwards, is copied, which `trainfast.stats()`
    counts. Nothing is recorded for autograd: for torch tensors that need it there is
    `trainfast.attention`.

    Raises:
        ValueError: a shape, value, length or device breaks a rule; `out` overlaps an
            input or is read-only.
        TypeError: not an array.
        NotImplementedError: another dtype or device, or strides of `out` that kernels
            do not write.

    Source: Dao, FlashAttention-2, arXiv:2307.08691.
    """
    q, k, v = (as_array(n, x) for n, x in (("q", q), ("k", k), ("v", v)))
    options = _options(
        q,
        k,
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
        kv_lens=kv_lens,
        layout=layout,
        stream=stream,
    )
    _check_shapes(options, q=q, k=k, v=v)
    fill = None if cu_seqlens_q is None else 0.0  # rows of no item
    given = out is not None
    if given:
        _check_records(out=out)
    else:
        out = empty(q, (*q.shape[:-1], v.shape[-1]), fill=fill)
    lse = None
    if return_lse:
        fill = None if cu_seqlens_q is None else -math.inf
        lse = empty(q, _lse_shape(q, options), _wide(q), fill=fill)
    tell_autograd = autograd_notice([out] if given else ())
    _run(_core.attention, (q, k, v), (out, lse), options)
    tell_autograd()
    return (out, lse) if return_lse else out


class AttentionGradients(NamedTuple):
    """What attention_backward returns; None where a gradient was not wanted."""

    dq: Array | None
    dk: Array | None
    dv: Array | None
    dbias: Array | None
    dalibi_slopes: Array | None
    dsinks: Array | None

    def __repr__(self) -> str:
        """Names, dtypes and shapes: values may be on a GPU."""
        return one_line(
            self,
            **{
                name: None if array is None else f"{array.dtype}{[*array.shape]}"
                for name, array in zip(self._fields, self, strict=True)
            },
        )


_WANTED = ("q", "k", "v", "bias", "alibi_slopes", "sinks")


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    wanted: Sequence[str] = ("q", "k", "v"),
    mask: Array | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    causal_align: str = "upper_left",
    window_size: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    seed: int | Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    kv_lens: Array | None = None,
    layout: str = "bhsd",
    stream: int = 0,
) -> AttentionGradients:
    """The gradients of `attention`, with the same options, seed included.

    Args:
        dout: the gradient of out, of its shape and dtype.
        q, k, v: what `attention` was called with.
        out, lse: what `attention(..., return_lse=True)` returned.
        dlse: the gradient of lse, of its shape and dtype; None is 0.
        wanted: of "q", "k", "v", "bias", "alibi_slopes" and "sinks" those whose
            gradients to compute.
        mask, bias, is_causal, causal_align, window_size, scale, softcap, alibi_slopes,
            sinks, dropout_p, seed, cu_seqlens_q, cu_seqlens_k, kv_lens, layout, stream:
            as `attention` was called with.

    Returns:
        An AttentionGradients: dq, dk and dv have the shapes and dtype of q, k and v;
        dbias, dalibi_slopes and dsinks the shapes of their inputs, float32 (float64
        where q is), summed over what they were broadcast over. A row without an allowed
        key adds nothing to any of them.

    Raises:
        As `attention`; ValueError for a gradient of an option that is not given.
    """
    q, k, v = (as_array(n, x) for n, x in (("q", q), ("k", k), ("v", v)))
    dout, out, lse = (
        as_array(n, x) for n, x in (("dout", dout), ("out", out), ("lse", lse))
    )
    options = _options(
        q,
        k,
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
        kv_lens=kv_lens,
        layout=layout,
        stream=stream,
    )
    _check_shapes(options, q=q, k=k, v=v, dout=dout, out=out)
    _check_records(lse=lse, dlse=dlse)
    inputs = {"q": q, "k": k, "v": v}
    inputs |= {name: options[name] for name in _WANTED[3:]}
    made = _gradients(inputs, tuple(wanted), None if cu_seqlens_q is None else 0.0)
    _run(_core.attention_backward, (dout, q, k, v, out, lse, dlse), made, options)
    return made


def _gradients(
    inputs: dict[str, Array], wanted: Sequence[str], fill: float | None
) -> AttentionGradients:
    """Arrays for the wanted gradients."""
    for name in wanted:
        if name not in _WANTED:
            raise ValueError(f"wanted must be of {_WANTED}, got {name!r}")
        if inputs[name] is None:
            raise ValueError(f"{name} must be given where its gradient is wanted")
    q = inputs["q"]
    return AttentionGradients(
        *(
            None
            if name not in wanted
            else empty(q, x.shape, fill=fill)
            if name in ("q", "k", "v")
            else empty(q, x.shape, _wide(q))
            for name, x in inputs.items()
        )
    )


# ---- Options -------------------------------------------------------------------------


def _options(
    q: Array,
    k: Array,
    *,
    mask: Array | None,
    bias: Array | None,
    is_causal: bool,
    causal_align: str,
    window_size: Window | None,
    scale: float | None,
    softcap: float | None,
    alibi_slopes: Array | None,
    sinks: Array | None,
    dropout_p: float,
    seed: int | Array | None,
    cu_seqlens_q: Array | None,
    cu_seqlens_k: Array | None,
    kv_lens: Array | None,
    layout: str,
    stream: int,
) -> dict[str, Any]:
    """The same as the core takes them."""
    if causal_align not in ("upper_left", "lower_right"):
        raise ValueError(
            f"causal_align must be 'upper_left' or 'lower_right', got {causal_align!r}"
        )
    if layout not in ("bhsd", "bshd", "thd"):
        raise ValueError(f"layout must be 'bhsd', 'bshd' or 'thd', got {layout!r}")
    if layout == "thd" and cu_seqlens_q is None:
        raise ValueError("layout 'thd' needs cu_seqlens_q and cu_seqlens_k")
    left, right = _window(window_size)
    options = {
        "mask": None if mask is None else as_array("mask", mask),
        "bias": None if bias is None else as_array("bias", bias),
        "alibi_slopes": _per_head("alibi_slopes", alibi_slopes, q),
        "sinks": _per_head("sinks", sinks, q),
        "is_causal": is_causal,
        "bottom_right": causal_align == "lower_right",
        "window_left": left,
        "window_right": right,
        "scale": _scale(q) if scale is None else scale,
        "softcap": 0.0 if softcap is None else softcap,
        "dropout_p": dropout_p,
        "seed": _seed(seed, dropout_p),
        "cu_seqlens_q": _lengths("cu_seqlens_q", cu_seqlens_q),
        "cu_seqlens_k": _lengths("cu_seqlens_k", cu_seqlens_k),
        "kv_lens": _lengths("kv_lens", kv_lens),
        "bnhd": layout == "bshd",
        "stream": stream,
        "scratch": lambda n: empty(q, (n,), "float32"),
    }
    if options["cu_seqlens_q"] is not None and not is_on_cpu(q):
        terms = [options[name] for name in ("mask", "bias")]
        options["max_seqlen_q"] = _longest(q, -2, *terms)
        options["max_seqlen_k"] = _longest(k, -1, *terms)
    return options


_LONGEST = ("max_seqlen_q", "max_seqlen_k")


def _longest(packed: Array, axis: int, *terms: Array | None) -> int:
    """A bound of the items' lengths, without waiting for a GPU that has them: a mask's
    or bias's rows or columns, or else all rows together."""
    shapes = [term.shape for term in terms if term is not None]
    sizes = [shape[axis] for shape in shapes if len(shape) >= -axis]
    return max([1, *sizes]) if max(sizes, default=1) > 1 else max(1, packed.shape[0])


def _window(window_size: Window | None) -> tuple[int, int]:
    sides = (None, None) if window_size is None else window_size
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        raise ValueError(
            f"window_size must be (left, right) or None, got {window_size!r}"
        )
    far = 2**62  # beyond any key, and within the core's integers
    try:
        left, right = (
            -1 if side is None else min(operator.index(side), far) for side in sides
        )
    except TypeError:
        raise TypeError(
            f"window_size must be None or an integer on a side, got {window_size!r}"
        ) from None
    for side, number in zip(sides, (left, right)):
        if side is not None and number < 0:
            raise ValueError(
                f"window_size must be None or >= 0 on a side, got {window_size!r}"
            )
    return left, right


def _scale(q: Array) -> float:
    dim = q.shape[-1] if len(q.shape) else 1
    return 1 / math.sqrt(dim) if dim else 1.0  # the core refuses 0 by name


def _seed(seed: int | Array | None, dropout_p: float) -> int | Array:
    if seed is None:
        try:
            needed = float(dropout_p) > 0
        except (TypeError, ValueError, OverflowError):
            needed = False  # the core says what dropout_p must be
        if needed:
            raise ValueError("seed must be given with dropout_p > 0, got None")
        return 0
    return int(seed) if isinstance(seed, np.integer) else seed


def _per_head(name: str, array: Array | None, q: Array) -> Array | None:
    """Slopes or sinks, in the dtype that the core takes; a few numbers to convert."""
    if array is None:
        return None
    array = _few_numbers(name, array)
    dtype = dtype_name(array)
    kind = getattr(array.dtype, "kind", "")
    if kind not in ("f", "i", "u") and "float" not in dtype and "int" not in dtype:
        raise NotImplementedError(f"{name} must be of floats or integers, got {dtype}")
    return row_major(cast(array, _wide(q)))


def _lengths(name: str, array: Array | None) -> Array | None:
    if array is None:
        return None
    array = _few_numbers(name, array)
    if dtype_name(array) not in ("int32", "int64"):
        raise ValueError(f"{name} must be int32 or int64, got {dtype_name(array)}")
    return row_major(cast(array, "int64"))


def _few_numbers(name: str, array: Array) -> Array:
    """An array that can be converted: NumPy's, torch's, or one that lies on a GPU."""
    if isinstance(array, list | tuple):
        try:
            return np.asarray(array) if len(array) else np.zeros(0, np.int64)
        except ValueError:
            raise ValueError(f"{name} must hold numbers, got {array!r}") from None
    array = as_array(name, array)
    if isinstance(array, np.ndarray) or hasattr(array, "to") or not is_on_cpu(array):
        return array
    return np.asarray(array) if hasattr(array, "__array__") else np.from_dlpack(array)


# ---- Arrays --------------------------------------------------------------------------


def _wide(q: Array) -> str:
    """What lse, slopes, sinks and the gradients of options have."""
    return "float64" if dtype_name(q) == "float64" else "float32"


def _check_shapes(options: dict[str, Any], **arrays: Array) -> None:
    """What has to be known before outputs can be made; the core checks the rest."""
    want = "[batch, heads, rows, dim]"
    if options["cu_seqlens_q"] is not None:
        want = "[rows, heads, dim] with cu_seqlens"
    elif options["bnhd"]:
        want = "[batch, rows, heads, dim]"
    for name, array in arrays.items():
        if len(array.shape) != want.count(",") + 1:
            shape = tuple(array.shape)
            raise ValueError(f"{name} must have dimensions {want}, got shape {shape}")
    terms = {name: options[name] for name in ("mask", *_WANTED[3:])}
    _check_records(**arrays, **terms)
    if sequence_lengths.CHECK_ON_DEVICE:
        _check_lengths(options, arrays["q"], arrays["k"])


def _check_lengths(options: dict[str, Any], q: Array, k: Array) -> None:
    """Of lengths that lie on a GPU; the core looks at others."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "kv_lens")
    lengths = {name: options[name] for name in names}
    if any(x is not None and not is_on_cpu(x) for x in lengths.values()):
        others = {name: options.get(name, 0) for name in _LONGEST}
        sequence_lengths.check_lengths(
            q.shape, k.shape, **lengths, **others, bnhd=options["bnhd"]
        )


def _check_records(**arrays: Array | None) -> None:
    """That autograd, which records nothing here, is not waiting for it."""
    for name, array in arrays.items():
        if getattr(array, "requires_grad", False) and _records():
            raise ValueError(
                f"{name} must not require a gradient: nothing is recorded here "
                "(trainfast.attention is differentiable)"
            )


def _records() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.is_grad_enabled()


def _lse_shape(q: Array, options: dict[str, Any]) -> tuple[int, ...]:
    if options["cu_seqlens_q"] is not None:
        return q.shape[1], q.shape[0]
    return (q.shape[0], q.shape[2], q.shape[1]) if options["bnhd"] else q.shape[:3]


def _run(
    core: Callable[..., None],
    inputs: Sequence[Array | None],
    outputs: Sequence[Array | None],
    options: dict[str, Any],
) -> None:
    """Calls the core; where it cannot take an input's strides, with copies."""
    try:
        core(*inputs, *outputs, **options)
    except NotImplementedError:
        # lse and dlse, which come last, need the same strides
        copies = [x if x is None else unit_stride(x) for x in inputs[:5]]
        copies += [x if x is None else row_major(x) for x in inputs[5:]]
        if all(copy is x for copy, x in zip(copies, inputs)):
            raise
        core(*copies, *outputs, **options)
        count_fallback("attention", "an array without stride 1 was copied")
    on_gpu = not is_on_cpu(inputs[0])
    count_call("attention", "cuda" if on_gpu else _core.backend_in_use())
