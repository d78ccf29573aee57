"""Hashes of what a few hundred calls compute, for every backend of the CPU.

    python tests/core/output_hashes.py            compare with output_hashes.txt
    python tests/core/output_hashes.py --write    update the lines of the backends here
    python tests/core/output_hashes.py --print    print one line a call

A refactoring must leave all hashes as they are. To compare two builds on one machine,
run the script with PYTHONPATH set to each. Inputs come from an integer generator, so
they are the same on every machine. Calls that use the C library's exp2, log2 or pow are
compared only where that library gives the bits that it gave when the file was written.
"""

import hashlib
import itertools
import math
import platform
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

import trainfast
from trainfast import _core, graph_cache

FILE = Path(__file__).with_suffix(".txt")
BACKENDS = ("scalar", "avx2", "avx512", "avx512_bf16", "wide")
DTYPES = {
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


def words(seed, n):
    """n words of 64 bits (SplitMix64)."""
    with np.errstate(over="ignore"):
        x = np.arange(n, dtype=np.uint64) + np.uint64(seed << 32)
        x = x * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def numbers(seed, shape, dtype="f64"):
    """Numbers in [-2, 2), multiples of 2^-22 before they are rounded to `dtype`."""
    bits = words(seed, math.prod(shape)) >> np.uint64(40)
    return (bits / 2.0**22 - 2).reshape(shape).astype(DTYPES[dtype])


def digest(arrays):
    """A hash of the arrays' bits; all NaNs count as one."""
    state = hashlib.sha256()
    for array in arrays:
        array = np.ascontiguousarray(array)
        if array.dtype.kind not in "biuS" and np.isnan(array).any():
            array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
        state.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return state.hexdigest()[:12]


def libm_digest():
    """A hash of what the C library's functions give."""
    x = numbers(99, (2000,)).tolist()
    found = [math.exp2(9 * a) for a in x] + [math.log2(9 + 4 * a) for a in x]
    return digest([np.array(found + [math.pow(2 + a, 3 - a) for a in x])])


# ---- AdamW ---------------------------------------------------------------------------

ADAMW_DTYPES = [
    *(("f32", "f32", "f32"), ("f64", "f64", "f64"), ("bf16", "bf16", "bf16")),
    *(("bf16", "bf16", "f32"), ("f16", "f16", "f16"), ("f16", "f16", "f32")),
    *(("f32", "bf16", "f32"), ("f32", "f16", "f32"), ("f64", "f32", "f64")),
    *(("f32", "f64", "f32"), ("f16", "f32", "bf16"), ("f32", "f32", "f64")),
]
ADAMW_OPTIONS = {
    "plain": {},
    "amsgrad": {"amsgrad": True},
    "l2 maximize": {"decoupled_weight_decay": False, "maximize": True},
    "small beta1": {"betas": (0.25, 0.75)},
    "zero grad": {"zero_grad": True},
    "scaled": {"grad_scale": 8.0, "clip_coef": 0.3, "write_back_grads": True},
    "ema copy": {"ema": True, "copy": "bf16", "ema_decay": 0.9},
    "copy f16": {"ema": True, "copy": "f16", "ema_decay": 0.0, "amsgrad": True},
}
ADAMW_SIZES = (1, 7, 8, 9, 15, 17, 255, 257, 1025)


def adamw(dtypes, options):
    options = dict(options)
    param, grad, state = dtypes
    wide = "f64" if "f64" in (param, state) else "f32"

    def lists(seed, dtype, skew=1):
        made = [
            numbers(seed + i, (n + skew,), dtype) for i, n in enumerate(ADAMW_SIZES)
        ]
        return [x[skew:] if i % 2 else x[:-skew] for i, x in enumerate(made)]

    params, grads = lists(100, param), lists(200, grad, 3)
    first, second = lists(300, state), [abs(x) for x in lists(400, state)]
    arrays = [params, grads, first, second]
    if options.pop("amsgrad", False):
        options["max_exp_avg_sqs"] = [abs(x) for x in lists(500, state)]
        arrays.append(options["max_exp_avg_sqs"])
    if options.pop("ema", False):
        options["emas"] = lists(600, wide)
        arrays.append(options["emas"])
    if copy := options.pop("copy", None):
        options["copies"] = lists(700, copy)
        arrays.append(options["copies"])
    for name, dtype in (("grad_scale", np.float32), ("clip_coef", np.float64)):
        if name in options:
            options[name] = np.array(options[name], dtype)
    trainfast.numpy.adamw_step(
        params, grads, first, second, step=3, lr=0.01, weight_decay=0.1, **options
    )
    return [x for one in arrays for x in one]


def adamw_calls():
    for dtypes, (name, options) in itertools.product(
        ADAMW_DTYPES, ADAMW_OPTIONS.items()
    ):
        yield f"adamw {'/'.join(dtypes)} {name}", False, adamw, (dtypes, options)


# ---- AMP -----------------------------------------------------------------------------

AMP_SIZES = (1, 7, 8, 9, 127, 128, 129, 8191, 8193, 20000)


def amp_grads(dtype, norm_type, rewrite, bad):
    grads = [numbers(i + 1, (n + 1,), dtype)[1:] for i, n in enumerate(AMP_SIZES)]
    if bad is not None:
        grads[-1][777] = bad
    results = {"found_inf": "f32", "total_norm": "f32"}
    results |= {"total_norm_f64": "f64", "clip_coef": "f64"}
    made = {name: np.array(7, DTYPES[kind]) for name, kind in results.items()}
    _core.amp_grads(
        grads,
        _core.Workspace(),
        norm_type=norm_type,
        max_norm=1.5,
        rewrite=rewrite,
        clip_value=0.75,
        grad_scale=np.array(4, np.float32),
        factor=np.array(0.3),
        **made,
    )
    return [*made.values(), *grads]


def amp_update(found, tracker):
    scale, growth = np.array(1000, np.float32), np.array(tracker, np.int32)
    _core.amp_update(
        scale,
        growth,
        [np.array(found, np.float32)],
        growth_factor=1.7,
        backoff_factor=0.3,
        growth_interval=3,
    )
    return scale, growth


def amp_calls():
    norms = (2.0, 1.0, math.inf, -math.inf, 3.0)
    rewrites = ("read", "multiply", "clamp")
    for dtype, norm, rewrite in itertools.product(DTYPES, norms, rewrites):
        name = f"amp_grads {dtype} norm {norm:g} {rewrite}"
        yield name, norm == 3, amp_grads, (dtype, norm, rewrite, None)
    for dtype, bad in itertools.product(DTYPES, (math.inf, math.nan)):
        yield (
            f"amp_grads {dtype} {bad}",
            False,
            amp_grads,
            (dtype, 2.0, "multiply", bad),
        )
    for found, tracker in itertools.product((0, 1), (0, 2)):
        yield f"amp_update {found} {tracker}", False, amp_update, (found, tracker)


# ---- Attention -----------------------------------------------------------------------

# batch, heads, heads of k and v, queries, keys, dim, dim of v
ATTENTION_CALLS = {
    "one": ((1, 1, 1, 1, 1, 1, 1), {}),
    "odd dims": ((1, 2, 2, 33, 47, 31, 17), {}),
    "whole tiles": ((1, 1, 1, 96, 128, 64, 64), {}),
    "past tiles": ((2, 1, 1, 97, 131, 20, 16), {}),
    "several tiles": ((1, 1, 1, 200, 270, 32, 32), {}),
    "causal": ((1, 2, 1, 130, 130, 16, 16), {"is_causal": True}),
    "causal end": ((1, 1, 1, 40, 150, 24, 8), {"is_causal": True, "end": True}),
    "window": ((1, 1, 1, 210, 210, 16, 16), {"window_size": (37, 20)}),
    "narrow window": ((1, 2, 2, 65, 65, 33, 33), {"window_size": (0, 0), "bnhd": True}),
    "softcap": ((1, 2, 1, 50, 70, 16, 16), {"softcap": 3.0}),
    "bool mask": ((2, 2, 2, 35, 60, 16, 16), {"mask": "bool"}),
    "padding": ((2, 2, 2, 35, 60, 16, 16), {"mask": "padding"}),
    "added mask": ((1, 2, 2, 35, 60, 16, 16), {"mask": "added"}),
    "bias": ((2, 2, 2, 49, 100, 16, 16), {"bias": (2, 2, 49, 100)}),
    "shared bias": ((17, 1, 1, 20, 33, 8, 8), {"bias": (1, 1, 20, 33)}),
    "bias of keys": ((2, 2, 2, 20, 33, 8, 8), {"bias": (2, 1, 1, 33)}),
    "alibi": ((2, 2, 2, 40, 60, 16, 16), {"alibi": True, "is_causal": True}),
    "sinks": ((1, 2, 2, 40, 60, 16, 16), {"sinks": True}),
    "dropout": ((1, 2, 2, 99, 97, 8, 8), {"dropout_p": 0.25, "seed": 3}),
    "all": (
        (1, 2, 1, 45, 99, 24, 24),
        {"bias": (1, 2, 45, 99), "alibi": True, "sinks": True, "softcap": 5.0}
        | {"dropout_p": 0.1, "seed": 9, "window_size": (60, 5)},
    ),
    "kv lens": ((2, 2, 2, 33, 80, 16, 16), {"kv_lens": [80, 19]}),
    "packed": ((3, 2, 2, 120, 120, 16, 16), {"packed": [0, 50, 51, 120]}),
    "decode": ((2, 4, 2, 1, 700, 64, 64), {}),
    "decode few": ((1, 2, 1, 4, 1500, 40, 32), {"is_causal": True, "end": True}),
    "decode terms": ((1, 2, 2, 3, 300, 16, 16), {"alibi": True, "softcap": 4.0}),
    "few heads": ((1, 1, 1, 300, 2000, 16, 16), {}),
    "shared keys": ((1, 4, 1, 110, 230, 24, 24), {"is_causal": True}),
    "far": ((1, 1, 1, 40, 50, 16, 16), {"scale": 150.0}),
    "far mask": ((1, 1, 1, 20, 50, 16, 16), {"mask": "far"}),
    "no scale": ((1, 1, 1, 20, 50, 16, 16), {"scale": 0.0, "sinks": True}),
    "infinite key": ((1, 1, 1, 120, 120, 16, 16), {"is_causal": True, "bad": 90}),
}


def attention_mask(kind, shape, wide):
    batch, heads, _, n_q, n_k, _, _ = shape
    if kind == "bool":
        return numbers(21, (batch, heads, n_q, n_k)) > -1
    if kind == "padding":
        keys = np.arange(n_k)
        return np.stack([(keys >= 3) & (keys < n_k - 5 - b) for b in range(batch)])[
            :, None, None
        ]
    if kind == "far":
        return np.full((1, 1, n_q, n_k), -1e9, wide)
    added = numbers(22, (batch, 1, n_q, n_k)).astype(wide)
    return np.where(added < -1.5, np.array(-np.inf, wide), added)


def attention_options(shape, options, dtype):
    """The options of the public functions."""
    heads = shape[1]
    wide = np.float64 if dtype == "f64" else np.float32
    options = dict(options)
    if options.pop("end", False):
        options["causal_align"] = "lower_right"
    if options.pop("bnhd", False):
        options["layout"] = "bshd"
    if "mask" in options:
        options["mask"] = attention_mask(options["mask"], shape, wide)
    if "bias" in options:
        options["bias"] = numbers(23, options["bias"]).astype(wide)
    if options.pop("alibi", False):
        options["alibi_slopes"] = np.array([0.25, 0.03125], wide)[:heads]
    if options.pop("sinks", False):
        options["sinks"] = numbers(24, (heads,)).astype(wide)
    if "kv_lens" in options:
        options["kv_lens"] = np.array(options["kv_lens"])
    if packed := options.pop("packed", None):
        options["cu_seqlens_q"] = options["cu_seqlens_k"] = np.array(packed)
    return options


def attention(shape, options, dtype):
    batch, heads, kv_heads, n_q, n_k, dim, dim_v = shape
    bad = options.get("bad")
    options = {name: value for name, value in options.items() if name != "bad"}
    options = attention_options(shape, options, dtype)

    def rows(seed, heads, n, dim):
        size = (batch, heads, n, dim)
        if "cu_seqlens_q" in options:
            size = (n, heads, dim)
        elif "layout" in options:
            size = (batch, n, heads, dim)
        return numbers(seed, size, dtype)

    q, k = rows(11, heads, n_q, dim), rows(12, kv_heads, n_k, dim)
    v, dout = rows(13, kv_heads, n_k, dim_v), rows(14, heads, n_q, dim_v)
    if bad is not None:
        k[:, :, bad, 2] = v[:, :, bad, 3] = np.inf
    out, lse = trainfast.numpy.attention(q, k, v, return_lse=True, **options)
    names = [n for n in ("bias", "alibi_slopes", "sinks") if n in options]
    dlse = numbers(15, lse.shape).astype(lse.dtype)
    grads = trainfast.numpy.attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, wanted=["q", "k", "v", *names], **options
    )
    return [out, lse, *[x for x in grads if x is not None]]


def attention_calls():
    for dtype, (name, call) in itertools.product(DTYPES, ATTENTION_CALLS.items()):
        libm = dtype == "f64" or "sinks" in call[1] or name.startswith("decode")
        yield f"attention {dtype} {name}", libm, attention, (*call, dtype)


# ---- Graph cache ---------------------------------------------------------------------


def graph(i, dtype):
    n = i % 9 + (40 if i % 5 == 0 else 1)
    edges = (words(1000 + i, 6 * n) % np.uint64(n)).astype(dtype).reshape(2, 3 * n)
    signed = (words(2000 + i, n) % np.uint64(500)).astype(np.int64) - 250
    return {
        "x": numbers(3000 + i, (n, 3), "f32"),
        "edge_index": edges,
        "signed": signed.astype(np.int16 if i % 2 else np.int64).astype(np.int64),
        "label": i,
    }


def graph_batches(dtype):
    made = []
    with tempfile.TemporaryDirectory() as folder:
        with graph_cache.Writer(Path(folder) / "c") as writer:
            for i in range(60):
                writer.append(graph(i, dtype))
        cache = graph_cache.open(Path(folder) / "c", "always")
        assert cache.verify(values=True).ok
        for one in cache:
            made += one.values()
        for batch in graph_cache.Loader(cache, 16):
            made += [batch["x"], batch["edge_index"], batch["signed"]]
        files = sorted((Path(folder) / "c").rglob("*"))
        made += [np.array(sum(f.stat().st_size for f in files if f.is_file()))]
    return made


def crc(n):
    data = words(5, n // 8 + 2).tobytes()
    return [np.array([_core.crc32c(data[at : at + n], at) for at in range(4)])]


def graph_calls():
    for dtype in ("int64", "int32", "uint8", "int16"):
        yield f"graph {dtype}", False, graph_batches, (dtype,)
    for n in (0, 1, 7, 8, 63, 64, 255, 256, 1000, 4096, 70000):
        yield f"crc32c {n}", False, crc, (n,)


# ---- The table -----------------------------------------------------------------------


def calls():
    """(name, whether it uses the C library's functions, function, arguments)."""
    yield from adamw_calls()
    yield from amp_calls()
    yield from attention_calls()
    yield from graph_calls()


def multiplies_pairs():
    cpu = Path("/proc/cpuinfo")
    return platform.machine() == "x86_64" and "avx512_bf16" in cpu.read_text()


def column(backend, name):
    """Where the backend's hash of this call stands: its BF16 instructions count only
    for bfloat16 attention."""
    pairs = backend == "avx512" and name.startswith("attention bf16")
    return "avx512_bf16" if pairs and multiplies_pairs() else backend


def hashes(backend, libm=True):
    """{(call, column): hash} of the backend, which stays in use."""
    trainfast.use_backend(backend)
    return {
        (name, column(backend, name)): digest(function(*arguments))
        for name, uses_libm, function, arguments in calls()
        if libm or not uses_libm
    }


def read():
    """({(call, column): hash}, the C library's hash) of the file."""
    table, libm = {}, None
    for line in FILE.read_text().splitlines():
        value, columns, name = line.split(" ", 2)
        if name == "C library":
            libm = value
        for one in columns.split(","):
            table[name, one] = value
    return table, libm


def lines(table):
    yield f"{libm_digest()} - C library"
    for name in dict.fromkeys(name for name, _ in table):
        found = {c: table[name, c] for c in BACKENDS if (name, c) in table}
        for value in dict.fromkeys(found.values()):
            yield f"{value} {','.join(c for c in found if found[c] == value)} {name}"


def usable():
    names = [b["name"] for b in trainfast.backends() if b["usable"]]
    return [name for name in names if name in BACKENDS]


def main(argument=None):
    found = {key: value for name in usable() for key, value in hashes(name).items()}
    if argument == "--write":
        old = read()[0] if FILE.exists() else {}
        FILE.write_text("\n".join(lines({**old, **found})) + "\n")
    elif argument == "--print":
        print("\n".join(f"{value} {c} {name}" for (name, c), value in found.items()))
    else:
        expected = read()[0]
        wrong = [key for key, value in found.items() if expected.get(key) != value]
        print(*(f"{c}: {name} differs" for name, c in wrong), sep="\n")
        print(f"{len(found)} hashes of {', '.join(usable())}: {len(wrong)} differ")
        return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
