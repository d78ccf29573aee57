"""How AdamW keeps what half parameters lose by rounding, in NumPy: the weight of a
parameter with its tail, and both of a weight. Integers and float32 as the kernels."""

import ml_dtypes
import numpy as np

HALVES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
MASK = (1 << 32) - 1


def philox(counter, key):
    """Philox4x32-10 of one counter, as lists of integers (Salmon et al., 2011)."""
    a, b, c, d = counter
    for i in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        k0 = (key[0] + i * 0x9E3779B9) & MASK
        k1 = (key[1] + i * 0xBB67AE85) & MASK
        a, b, c, d = (
            (second >> 32) ^ b ^ k0,
            second & MASK,
            (first >> 32) ^ d ^ k1,
            (first & MASK),
        )
    return a, b, c, d


def words(seed, step, index, places):
    """The random words of elements at these places of a whole tensor."""
    places = np.asarray(places, np.uint64)
    out = np.empty(places.shape, np.uint32)
    for high in np.unique(places >> np.uint64(32)):
        here = places >> np.uint64(32) == high
        counter = (step & MASK, step >> 32, index, int(high))
        k0, k1, _, _ = philox(counter, (seed & MASK, seed >> 32))
        h = places[here].astype(np.uint32) * np.uint32(0x9E3779B9) ^ np.uint32(k0)
        h = (h ^ h >> np.uint32(16)) * np.uint32(0x85EBCA6B)
        h = (h ^ h >> np.uint32(13)) * np.uint32(0xC2B2AE35)
        out[here] = h ^ h >> np.uint32(16) ^ np.uint32(k1)
    return out


def round_stochastic(weight, dtype, random):
    """float32 weights rounded to neighbours in the dtype, by 32-bit words."""
    dtype = HALVES[dtype]
    weight = np.asarray(weight, np.float32)
    size = np.abs(weight.astype(np.float64))
    # the ulp below `size`: 8 or 11 bits of significand; float16 has subnormals
    bits, least = (11, -24) if dtype == np.float16 else (8, -133)
    exponent = np.frexp(size)[1] - bits
    ulp = np.ldexp(1.0, np.maximum(exponent, least))
    below = np.floor(size / ulp)
    part = size / ulp - below
    if dtype == np.float16:
        small = exponent < least
        normal = (random & 0x1FFF) / 2**13
        up = np.where(small, part > (random >> 8) / 2**24, part + normal >= 1)
    else:
        up = part + (random & 0xFFFF) / 2**16 >= 1
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = np.copysign((below + up) * ulp, weight).astype(np.float32)
        return np.where(np.isfinite(weight), rounded, weight).astype(dtype)


def join(param, tail, rounding):
    """The float32 weights of parameters and tails."""
    if rounding == "split":
        bits = param.view(np.uint16).astype(np.uint32) << 16
        tail = tail.view(np.int16)
        stale = (bits & 0x7FFFFFFF == 0) & (tail < 0)
        return (bits + np.where(stale, 0, tail).astype(np.uint32)).view(np.float32)
    weight = param.astype(np.float32)
    return weight + tail.astype(np.float32) if rounding == "kahan" else weight


def split(weight, dtype, rounding):
    """Parameters and tails of float32 weights, which are not rounded at random."""
    dtype = HALVES[dtype]
    if rounding == "split":
        bits = weight.view(np.uint32).astype(np.uint64)
        param = ((bits + 0x8000) >> 16).astype(np.uint16)
        tail = (bits & 0xFFFF).astype(np.uint16)
        param = np.where(np.isnan(weight), np.uint16(0x7FC0), param)
        return param.view(dtype), np.where(np.isnan(weight), np.uint16(0), tail).view(
            dtype
        )
    with np.errstate(over="ignore", invalid="ignore"):
        param = weight.astype(dtype)
        tail = weight - param.astype(np.float32)
    return param, np.where(np.isfinite(tail), tail, 0).astype(dtype)
