"""AdamW's 8-bit state in NumPy: the code of trainfast, in float32 as the kernels
compute it, and that of bitsandbytes, to compare with."""

import numpy as np

from tests.reference import _FMA

BLOCK = 128
_FMAF = _FMA[np.float32]


def _blocks(array):
    """[blocks, BLOCK], the last one filled up with its first value."""
    flat = np.asarray(array).ravel(order="K")
    count = -(-flat.size // BLOCK)
    last = flat[(count - 1) * BLOCK :][:1]
    filled = np.concatenate([flat, np.repeat(last, count * BLOCK - flat.size)])
    return filled.reshape(count, BLOCK)


def _unblocked(blocks, like, dtype):
    out = np.empty_like(like, dtype=dtype)
    out.ravel(order="K")[...] = blocks.ravel()[: like.size]  # a view: `like` is dense
    return out


def _root(value, shift, bias):
    """About the 2nd or 4th root, by `shift` 1 or 2."""
    bits = (value.view(np.uint32) >> shift) + np.uint32(bias << 23)
    return bits.view(np.float32) - np.float32(2.0 ** (bias - 127))


def _power(root, shift, bias):
    """The inverse of _root()."""
    bits = (root + np.float32(2.0 ** (bias - 127))).view(np.uint32)
    return ((bits - np.uint32(bias << 23)) << shift).view(np.float32)


def decode(codes, scales):
    """exp_avg, where `scales` has one column, else exp_avg_sq: float32."""
    code, scales = _blocks(codes).astype(np.float32), scales.astype(np.float32)
    if scales.shape[1] == 1:
        root = (code - np.float32(128)) * scales
        value = np.where(root < 0, -1, 1).astype(np.float32) * _power(abs(root), 1, 32)
    else:
        root = _FMAF(code, scales[:, 1:], scales[:, :1]).astype(np.float32)
        value = _power(root, 2, 64)
    return _unblocked(value, codes, np.float32)


def encode(values, signed):
    """The codes of float32 values, and their scales."""
    block = _blocks(values)
    size, finite = abs(block), np.isfinite(block)
    root = _root(size, 1, 32) if signed else _root(size, 2, 64)
    high = np.where(finite, root, 0).max(1, keepdims=True)
    root = np.where(finite, np.where(signed & (block < 0), -root, root), high)
    if signed:
        code = _FMAF(root, _ratio(127, high), np.float32(128)).astype(np.float32)
        scales = high / np.float32(127)
    else:
        low = root.min(1, keepdims=True)
        code = (root - low) * _ratio(255, high - low)
        code = np.maximum(code, root > low)
        scales = np.concatenate([low, (high - low) / np.float32(255)], 1)
    return _unblocked(np.rint(code), values, np.uint8), scales


def _ratio(most, value):
    safe = np.where(value > 0, value, np.float32(1))
    return np.where(value > 0, np.float32(most) / safe, np.float32(0))


# ---- bitsandbytes ----------------------------------------------------------------


def dynamic_map(signed):
    """The 256 values of "dynamic tree quantization" (Dettmers, arXiv:2110.02861)."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2 ** (i + 1 - signed) + 1)
        middles = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*middles, *(-middles if signed else ())]
    return np.sort(np.array(values, np.float32))


def by_dynamic_map(values, signed, block=256):
    """float32 values after a round trip through blocks of the dynamic map."""
    table = dynamic_map(signed)
    blocks = values.reshape(-1, block)
    scale = abs(blocks).max(1, keepdims=True)
    scale = np.where(scale > 0, scale, 1)
    nearest = np.searchsorted((table[1:] + table[:-1]) / 2, blocks / scale)
    return (table[nearest] * scale).reshape(-1).astype(np.float32)
