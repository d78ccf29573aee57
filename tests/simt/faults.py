"""Faults planted in kernels and in the host's files, all in one copy of cuda/, so that
one build for each sanitizer tries them all: TRAINFAST_SIMT_FAULT gives the number of
the one that is on.

Every barrier, fence and wait of a kernel is one, found by its name: it is left out. The
others are written down below."""

import re

from tests.simt import faults_positions
from tests.simt.fault import BOUNDS, CUDA, DIFFERS, MISALIGNED, RACE, Fault, barriers

# Changes that are always on: blocks get several works.
ALWAYS = [
    ("attention.c", r"blocks_of\(([\w.]+), MOST_BLOCKS\)", r"blocks_of(\1, 3)"),
    ("attention_terms.c", "MOST_BLOCKS", "2"),
]
DECLARED = "extern const int simt_fault;\n"  # kernels have it from simt.h


def switched(number, old, new):
    on = f"simt_fault == {number}"
    if old.rstrip().endswith((";", "}")):
        return f"if ({on}) {{ {new} }} else {{ {old} }}"
    return f"({on} ? ({new}) : ({old}))"


def planted(name, source, places):
    """The file's text with these faults."""
    before = len(source)
    for begin, end, number, new in sorted(places, reverse=True):
        assert end <= before, f"{name}: faults overlap at {source[begin:end]!r}"
        before = begin
        source = (
            source[:begin] + switched(number, source[begin:end], new) + source[end:]
        )
    for file, pattern, new in ALWAYS:
        if file == name:
            source, count = re.subn(pattern, new, source)
            assert count, f"{file}: {pattern} is not there"
    return DECLARED + source if name.endswith(".c") else source


def plant(folder):
    """Writes the copy; files that have not changed stay as they are."""
    paths = [*CUDA.glob("device/*.cu*"), *CUDA.glob("*.c")]
    sources = {path.name: path.read_text() for path in paths}
    assert len(sources) == len(paths), "two files of cuda/ share a name"
    places = {name: [] for name in sources}
    for number, fault in enumerate(FAULTS.values(), 1):
        for begin, end, new in fault.places(sources[fault.file]):
            places[fault.file].append((begin, end, number, new))
    for path in [*folder.glob("device/*.cu*"), *folder.glob("*.c")]:
        if path.name not in sources:
            path.unlink()
    for original in paths:
        path = folder / original.relative_to(CUDA)
        text = planted(path.name, sources[path.name], places[path.name])
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return folder


def number_of(name):
    return 1 + list(FAULTS).index(name)


PLAIN, PLAIN_FORWARD = "attention_plain.cuh", "attention_plain_forward.cuh"
PLAIN_BACKWARD, HEAD = "attention_plain_backward.cuh", "attention_head.cuh"
MMA, FORWARD = "attention_mma.cuh", "attention_mma_forward.cuh"
BACKWARD, DECODE = "attention_mma_backward.cuh", "attention_decode.cuh"
SCORES = "attention_mma_backward_scores.cuh"
MMA_TERM = "attention_mma_term.cuh"
ADAMW, AMP = "adamw_kernel.cuh", "amp_kernel.cuh"
HOST_MMA, LAUNCHES, DRIVER = "attention_mma.c", "launch.c", "driver.c"

FAULTS = {
    # ---- AdamW ----
    "counters advanced by the first block": Fault(
        "rows.cuh", "== @gridDim.x - 1@;", "0", "thread", RACE
    ),
    "one element too many": Fault(
        ADAMW,
        "if (@odd < (lane < 16 ? head : end)@)",
        "odd <= (lane < 16 ? head : end)",
        "address",
        BOUNDS,
    ),
    "last vector of an item left out": Fault(
        ADAMW, "limit = aligned + @ITEM@;", "ITEM - 4", "plain", DIFFERS
    ),
    "copy rounded from the old parameter": Fault(
        ADAMW, "set_element(&copied, d.copy, e, @p@);", "g", "plain", DIFFERS
    ),
    "ema taken for aligned": Fault(
        "adamw_rows.c",
        "aligned_at(row->extra.ema, row->extra.ema_dtype, head, vector)",
        "true",
        "address",
        MISALIGNED,
    ),
    "copy taken for aligned": Fault(
        "adamw_rows.c",
        "aligned_at(row->extra.copy, row->extra.copy_dtype, head, vector)",
        "true",
        "address",
        MISALIGNED,
    ),
    "rest of a parameter taken for aligned": Fault(
        "adamw_rows.c",
        "aligned_at(row->extra.tail, row->param_dtype, head, vector)",
        "true",
        "address",
        MISALIGNED,
    ),
    "one bit pattern too many": Fault(
        "adamw_blocks.cuh",
        "if (@e < at.have@) { to[e]",
        "e <= at.have",
        "address",
        BOUNDS,
    ),
    "element behind a block's end loaded": Fault(
        "adamw_blocks.cuh",
        "if (@e >= at.have@) { continue;",
        "e > at.have",
        "address",
        BOUNDS,
    ),
    # ---- Loss scaling ----
    "blocks counted on from the launch before": Fault(
        "rows.cuh",
        "@atomicInc(blocks_done, gridDim.x - 1)@ ==",
        "atomicAdd(blocks_done, 1u)",
        "plain",
        DIFFERS,
        "amp",
    ),
    "tail of a tensor read past its end": Fault(
        AMP,
        "if (@i + e < chunk.n@) { quad.set",
        "i + e <= chunk.n",
        "address",
        BOUNDS,
    ),
    "vector across the end of a tensor": Fault(
        AMP,
        "if (chunk.vectors && @i + QUAD <= chunk.n@) { quad.read",
        "i < chunk.n",
        "address",
        BOUNDS,
    ),
    "found kept for the next launch": Fault(
        AMP, "@table->found = 0;@ /* for the next launch */", "", "plain", DIFFERS
    ),
    "lanes halved in another order": Fault(
        AMP,
        "for (int half = @16@; @half > 0@; @half /= 2@) {",
        ("1", "half < 32", "half *= 2"),
        "plain",
        DIFFERS,
    ),
    # ---- Attention: what a query may look at ----
    "query past the end looks": Fault(
        HEAD,
        "if (@query >= h.n_q@) { return {0, 0};",
        "query > h.n_q",
        "plain",
        DIFFERS,
    ),
    "window begins one key late": Fault(
        HEAD,
        "@i + h.shift - args.window_left@, 0, h.n_k",
        "i + h.shift - args.window_left + 1",
        "plain",
        DIFFERS,
    ),
    "window ends one key early": Fault(
        HEAD, "@i + h.shift + right + 1@", "i + h.shift + right", "plain", DIFFERS
    ),
    "first query of a key left out": Fault(
        HEAD,
        "clamped(@j - h.shift - right@, 0, h.n_q)",
        "j - h.shift - right + 64",
        "plain",
        DIFFERS,
    ),
    "last query of a key left out": Fault(
        HEAD,
        "@j - h.shift + args.window_left + 1@",
        "j - h.shift + args.window_left - 63",
        "plain",
        DIFFERS,
    ),
    "mask of -infinity added": Fault(
        HEAD,
        "term.data)[at] != 0 ? score : @-(REAL)INFINITY@",
        "score - 1",
        "plain",
        DIFFERS,
    ),
    "dropout of the block's other half": Fault(
        HEAD,
        "(j & 8) != 0 ? @word[1]@ : @word[0]@",
        ("word[0]", "word[1]"),
        "plain",
        DIFFERS,
    ),
    # ---- Attention by multiply-adds ----
    "row past the end read": Fault(
        PLAIN, "if (@row < rows.n@ && dim + column", "row <= rows.n", "address", BOUNDS
    ),
    "dim past the end read": Fault(
        PLAIN,
        "&& @dim + column < rows.dims@) {",
        "dim + column <= rows.dims",
        "address",
        BOUNDS,
    ),
    "row past the end written": Fault(
        PLAIN,
        "if (@tile_row(a) < rows.n@ && dim",
        "tile_row(a) <= rows.n",
        "address",
        f"{BOUNDS}|{DIFFERS}",
    ),
    "dim past the end written": Fault(
        PLAIN,
        "&& @dim < rows.dims@) {",
        "dim <= rows.dims",
        "address",
        f"{BOUNDS}|{DIFFERS}",
    ),
    "lse of a row past the end written": Fault(
        PLAIN_FORWARD,
        "@tile_row(a) < out.n@) {",
        "tile_row(a) <= out.n",
        "address",
        BOUNDS,
    ),
    "first tile of a window left out": Fault(
        PLAIN_FORWARD,
        "@first_key(args, h, first) / TILE * TILE@;",
        "(first_key(args, h, first) + TILE - 1) / TILE * TILE",
        "plain",
        DIFFERS,
    ),
    "last tile of keys left out": Fault(
        PLAIN_FORWARD, "@key < end@; key += TILE", "key + TILE < end", "plain", DIFFERS
    ),
    "number of a row past the end read": Fault(
        PLAIN_BACKWARD,
        "@first + row < h.n_q ? first + row : h.n_q - 1@;",
        "first + row",
        "address",
        BOUNDS,
    ),
    "heads that share keys left out": Fault(
        PLAIN_BACKWARD, "@kv_head * group + i@", "kv_head * group", "plain", DIFFERS
    ),
    "term past its end written": Fault(
        PLAIN_BACKWARD,
        "@first + n < size ? first + n : size@",
        "first + n",
        "address",
        f"{BOUNDS}|{DIFFERS}",
    ),
    "term's keys before its tile": Fault(
        PLAIN_BACKWARD,
        "@keys.begin > begin ? keys.begin : begin@",
        "begin",
        "plain",
        DIFFERS,
    ),
    # ---- Attention by tensor cores: tiles ----
    "chunks of a tile not permuted": Fault(
        MMA,
        "return @CHUNKS == 8 ? row & 7 : row >> 1 & 3@;",
        "row * 0",
        "plain",
        "wavefronts",
    ),
    "one row too many fetched": Fault(
        MMA, "@part_row(i) < part.n@ &&", "part_row(i) <= part.n", "address", BOUNDS
    ),
    "chunk that is not aligned fetched": Fault(
        MMA, "else if (@whole@) { fetch_whole(to", "true", "address", "aligned"
    ),
    "one element too many gathered": Fault(
        MMA, "@n < 8 ? n - 1 : 7@", "n < 8 ? n : 7", "address", f"{BOUNDS}|{DIFFERS}"
    ),
    "own row past the end read": Fault(
        MMA, "if (@row < rows.n@) { low", "row <= rows.n", "address", BOUNDS
    ),
    "own pair past the dims read": Fault(
        MMA,
        "rows.n && pairs && @column + 1 < rows.dims@",
        "column < rows.dims + 7",
        "address",
        f"{BOUNDS}|{DIFFERS}",
    ),
    "own dim past the end read": Fault(
        MMA,
        "@column < rows.dims@ ? from[0]",
        "column <= rows.dims",
        "address",
        f"{BOUNDS}|{DIFFERS}",
    ),
    "row past the end written by pairs": Fault(
        MMA, "if (@row >= rows.n@) {", "row > rows.n", "address", f"{BOUNDS}|{DIFFERS}"
    ),
    "first of a pair past the dims written": Fault(
        MMA,
        "if (@column < rows.dims@) { to[0]",
        "column <= rows.dims",
        "address",
        f"{BOUNDS}|{DIFFERS}",
    ),
    "second of a pair past the dims written": Fault(
        MMA,
        "if (@column + 1 < rows.dims@) { to[1]",
        "column < rows.dims",
        "address",
        f"{BOUNDS}|{DIFFERS}",
    ),
    # ---- Attention by tensor cores: forward ----
    "rows taken for aligned": Fault(
        HOST_MMA,
        "call.chunks = @is_aligned(&args->q, 8) && is_aligned(&args->k, 8) && "
        "is_aligned(&args->v, 8)@; call",
        "true",
        "address",
        "aligned",
    ),
    "output taken for aligned": Fault(
        HOST_MMA,
        "is_aligned(&args->out, 2)",
        "true",
        "address",
        MISALIGNED,
    ),
    "one key too many in bounds": Fault(
        FORWARD, "|| @key >= reach.end@) {", "key > reach.end", "plain", DIFFERS
    ),
    "keys before the window in bounds": Fault(
        FORWARD, "if (@key < reach.first@ ||", "key + 1 < reach.first", "plain", DIFFERS
    ),
    "tile's first keys taken for in bounds": Fault(
        FORWARD,
        "S::OPTIONS || @tile < block.free_begin@ ||",
        "false",
        "plain",
        DIFFERS,
    ),
    "tile's last keys taken for in bounds": Fault(
        FORWARD,
        "|| @tile >= block.free_end@;",
        "false",
        "plain",
        DIFFERS,
    ),
    "first keys of a window left out": Fault(
        FORWARD,
        "(@first_key(args, h, block->first) / S::STREAMED@)",
        "(first_key(args, h, block->first) + S::STREAMED - 1) / S::STREAMED",
        "plain",
        DIFFERS,
    ),
    "last keys left out": Fault(
        FORWARD,
        "(@end_key(args, h, block->last) + S::STREAMED - 1@) / S",
        "end_key(args, h, block->last)",
        "plain",
        DIFFERS,
    ),
    "keys fetched where they are read": Fault(
        FORWARD, "stage ^= S::STAGES == 2;", "", "thread", RACE
    ),
    "output rescaled for the first of two rows alone": Fault(
        FORWARD, "@fade[0] != 1 || fade[1] != 1@", "fade[0] != 1", "plain", DIFFERS
    ),
    "last group of copies not counted": Fault(
        FORWARD,
        "@cp_async_commit();@ /* empty, so that",
        "",
        "plain",
        f"{DIFFERS}|never waited for",
    ),
    "number of a row past the end written": Fault(
        FORWARD, "lane % 4 == 0 && @row < out.n@", "row <= out.n", "address", BOUNDS
    ),
    "fragment's halves dropped for one another": Fault(
        FORWARD,
        "word[@i / 2 % 2 * 2 + i / 4@]",
        "i / 4 * 2 + i / 2 % 2",
        "plain",
        DIFFERS,
    ),
    # ---- Attention by tensor cores: backward ----
    "gradients taken for aligned": Fault(
        HOST_MMA,
        "call.pairs = @is_aligned(&args->dq, 2) && is_aligned(&args->dk, 2) && "
        "is_aligned(&args->dv, 2)@;",
        "true",
        "address",
        MISALIGNED,
    ),
    "number of a query past the end read": Fault(
        BACKWARD,
        "2 * S::STREAMED && @query < h.n_q@;",
        "query <= h.n_q",
        "address",
        BOUNDS,
    ),
    "number of an own query past the end read": Fault(
        BACKWARD,
        "!S::KEYS && @query <= block.last@;",
        "query <= block.last + 1",
        "address",
        BOUNDS,
    ),
    "delta of a query past the end made": Fault(
        "attention_rows.cu",
        "if (@query < h.n_q@ && left > 0)",
        "query <= h.n_q",
        "address",
        BOUNDS,
    ),
    "keys past kv_lens not written": Fault(
        BACKWARD,
        "dk.n = dv.n = mma_left(@block.h.rows_k@,",
        "block.h.n_k",
        "plain",
        DIFFERS,
    ),
    "step's numbers from the other stage": Fault(
        SCORES,
        "(@stage * 2 + second@) * S::STREAMED + fragment",
        "(stage ^ 1) * 2 + second",
        "plain",
        DIFFERS,
    ),
    "step's tiles brought where they are read": Fault(
        BACKWARD, "whole, @stage ^ (S::STAGES - 1)@);", "stage", "thread", RACE
    ),
    "step's head always the first": Fault(
        BACKWARD, "h.head += S::KEYS ? @step.head@ : 0;", "0", "plain", DIFFERS
    ),
    "step's bounds ignored": Fault(
        BACKWARD,
        "S::OPTIONS || @step.tile < block.free_begin@ ||",
        "false",
        "plain",
        DIFFERS,
    ),
    "step's last keys taken for in bounds": Fault(
        BACKWARD,
        "@step.tile >= block.free_end@;",
        "false",
        "plain",
        DIFFERS,
    ),
    "slope of the softcap left out": Fault(
        SCORES, "? @*x * slope.at[i / 4][i % 4]@ : *x", "*x", "plain", DIFFERS
    ),
    "power of two not given back": Fault(
        "attention_mma_scale.cuh", "@exponent - 15@)", "exponent - 14", "plain", DIFFERS
    ),
    # ---- Attention by tensor cores: options ----
    "term past its keys written": Fault(
        MMA_TERM,
        "@key < call.mma.args.n_k@)) {",
        "true",
        "address",
        f"{BOUNDS}|{DIFFERS}",
    ),
    "walk over the first head alone": Fault(
        MMA_TERM, "@walk % heads % walks[1]@;", "0", "plain", DIFFERS
    ),
    "keys past the term's tile": Fault(
        MMA_TERM, "all ? args.n_k : @key + S::STREAMED@;", "args.n_k", "plain", DIFFERS
    ),
    "piece brought where it is read": Fault(
        MMA_TERM, "next, @stage ^ (S::STAGES - 1)@);", "stage", "thread", RACE
    ),
    "first dims multiplied again": Fault(
        MMA_TERM, "columns_from(keys, @column@)", "0", "plain", DIFFERS
    ),
    "gradients' power of two kept": Fault(
        MMA_TERM, "@call.mma.bounds[first + query] - 15@", "0", "plain", DIFFERS
    ),
    "part of the last split left out": Fault(
        MMA_TERM, "@split < call.splits@;", "split + 1 < call.splits", "plain", DIFFERS
    ),
    # ---- Attention of few queries: splits of the keys ----
    "rows past a tile's end summed": Fault(
        DECODE,
        "if (@row >= block.n_rows@) {",
        "false",
        "address",
        f"{BOUNDS}|{DIFFERS}",
    ),
    "sums past their pitch written": Fault(
        DECODE,
        "if (@column < call.plan.pitch@ &&",
        "true",
        "address",
        f"{BOUNDS}|{DIFFERS}",
    ),
    "sums that no split wrote read": Fault(
        "attention_decode.cu", "if (@number.y != 0@) {", "true", "plain", DIFFERS
    ),
    "split without keys says nothing": Fault(
        DECODE, "if (@(int)threadIdx.x < block->n_rows@) {", "false", "plain", DIFFERS
    ),
    "rows all of the first head": Fault(
        DECODE, "h.head += @block.rows[fragment_row(r)].head@;", "0", "plain", DIFFERS
    ),
    "products of a tile's last warp left out": Fault(
        DECODE,
        "i < @S::SHARING * N@; i++",
        "(S::SHARING - 1) * N",
        "plain",
        DIFFERS,
    ),
    "values of a tile's first warp for all": Fault(
        DECODE, "v_at + @now + panel@);", "now", "plain", DIFFERS
    ),
    "empty group of a split not counted": Fault(
        DECODE,
        "@cp_async_commit();@ /* an empty group",
        "",
        "plain",
        f"{DIFFERS}|never waited for",
    ),
    # ---- The host's side ----
    "48 KB for dynamic arrays alone": Fault(
        LAUNCHES,
        "facts->shared > @UNASKED_BYTES@)",
        "48 << 10",
        "plain",
        "not allow",
        "attention",
    ),
    "kernel of another context launched": Fault(
        LAUNCHES,
        "if (@of->context == context@)",
        "true",
        "plain",
        "invalid resource handle",
        "host",
    ),
    "image that is newer than the GPU taken": Fault(
        LAUNCHES,
        "(@image->arch > capability@ ||",
        "false",
        "plain",
        "no kernel image",
        "host",
    ),
    "arguments of another size launched": Fault(
        LAUNCHES,
        "if (@bytes != facts->arguments@ ||",
        "false",
        "plain",
        "arguments of another size",
        "host",
    ),
    "captures not told that calls are safe": Fault(
        DRIVER,
        ".mode = @CU_STREAM_CAPTURE_MODE_RELAXED@}",
        "CU_STREAM_CAPTURE_MODE_GLOBAL",
        "plain",
        "would invalidate the capture",
        "host",
    ),
    "mode of captures not given back": Fault(
        DRIVER,
        "if (@scope->relaxed@)",
        "false",
        "plain",
        "another capture mode",
        "host",
    ),
    "context before a call not given back": Fault(
        DRIVER, "if (@scope->moved@)", "false", "plain", "context current", "host"
    ),
    "device of the call not made current": Fault(
        DRIVER,
        "if (@current != device@)",
        "current < 0",
        "plain",
        "resource handle",
        "host",
    ),
}
FAULTS |= faults_positions.FAULTS | barriers()
