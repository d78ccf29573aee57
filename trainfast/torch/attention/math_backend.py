"""Attention in plain torch operations: what the kernels compute, differentiable to any
order, on any device and under any transform, a tile of queries at a time.

It stands in where a kernel does not do, and gives the second derivatives. Formulas are
those of csrc/tfast.h.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainfast.torch import private

TILE = 1 << 22  # scores at a time


def is_exporting() -> bool:
    return private.is_exporting()


# torch.compile calls it at tracing. It takes torch's own for True before torch 2.13.
is_exporting.__dict__["_dynamo_marked_constant"] = True


class Options(NamedTuple):
    """What is not a tensor; names as in trainfast._core.attention."""

    scale: float
    is_causal: bool = False
    bottom_right: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    bnhd: bool = False


class Inputs(NamedTuple):
    """Tensors that may have a gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None


class Extras(NamedTuple):
    """Tensors that have none."""

    mask: Tensor | None = None
    seed: Tensor | None = None  # int64, of no dimensions
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    kv_lens: Tensor | None = None


# ---- Dropout -------------------------------------------------------------------------

_LOW = 0xFFFFFFFF


def _philox(seed: Tensor, r: Tensor, c: Tensor, head: Tensor) -> Tensor:
    """Philox4x32-10 for counters (r, c, head, 0): [..., 4] of int64 below 2^32.

    Salmon et al., SC 2011. Products of 32-bit words wrap around in int64, whose upper
    half is right all the same.
    """
    zero = torch.zeros_like(r + c + head)
    words = [zero + r, zero + c, zero + head, zero]
    key = [seed & _LOW, seed >> 32 & _LOW]
    for _ in range(10):
        a, b = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            (b >> 32 & _LOW) ^ words[1] ^ key[0],
            b & _LOW,
            (a >> 32 & _LOW) ^ words[3] ^ key[1],
            a & _LOW,
        ]
        key = [key[0] + 0x9E3779B9 & _LOW, key[1] + 0xBB67AE85 & _LOW]
    return torch.stack(words, -1)


def dropout_factors(
    p: float, seed: Tensor, heads: Tensor, first: int, last: int, n_k: int
) -> Tensor:
    """[*heads.shape, last - first, n_k]: 0 for what is dropped, else 1 / (1 - p).

    `heads` holds the numbers batch * heads + head, queries are first .. last - 1.
    """
    device = heads.device
    i = torch.arange(first, last, device=device)
    j = torch.arange(n_k, device=device)
    start = first // 16 * 8
    r = torch.arange(start, (last + 15) // 16 * 8, device=device)
    c = torch.arange((n_k + 15) // 16 * 4, device=device)
    words = _philox(seed, r[:, None], c, heads[..., None, None])
    row, column = i // 16 * 8 + i % 8 - start, j // 16 * 4 + j % 8 // 2
    word = (i // 8 % 2 * 2)[:, None] + j // 8 % 2
    number = words[..., row[:, None], column, word]
    number = torch.where(j % 2 == 1, number >> 16, number & 0xFFFF)
    threshold = int(p * 65536 + 0.5)
    return (number >= threshold).double() * (65536 / (65536 - threshold))


# ---- One tile ------------------------------------------------------------------------


class _Tile(NamedTuple):
    """Queries first .. last - 1 of some batch items that have the same sizes."""

    items: slice
    rows_q: slice  # with cu_seqlens: where the item's rows lie among all
    rows_k: slice
    first: int
    last: int
    n_q: int
    n_k: int

    def rows(self, x: Tensor, where: slice, bnhd: bool) -> Tensor:
        """[b, heads, n, dim] of x, the rows of q or of k."""
        if x.dim() == 3:
            return x[where].transpose(0, 1)[None]
        return x[self.items].transpose(1, 2) if bnhd else x[self.items]

    def queries(self, x: Tensor, bnhd: bool) -> Tensor:
        return self.rows(x, self.rows_q, bnhd)[:, :, self.first : self.last]

    def lse(self, x: Tensor) -> Tensor:
        """[b, heads, n] of lse or of its gradient."""
        if x.dim() == 2:
            return x[None, :, self.rows_q][:, :, self.first : self.last]
        return x[self.items, :, self.first : self.last]

    def term(self, x: Tensor) -> Tensor:
        """What belongs to the tile of an array that broadcasts to the scores."""
        x = x[(None,) * (4 - x.dim())]
        if x.shape[0] != 1:
            x = x[self.items]
        if x.shape[2] != 1:
            x = x[:, :, self.first : self.last]
        return x if x.shape[3] == 1 else x[..., : self.n_k]


def _tiles(inputs: Inputs, extras: Extras, options: Options) -> Iterator[_Tile]:
    q, k, dims = inputs.q, inputs.k, (1 if options.bnhd else 2)
    if extras.cu_seqlens_q is not None and extras.cu_seqlens_k is not None:
        ends_q, ends_k = extras.cu_seqlens_q.tolist(), extras.cu_seqlens_k.tolist()
        heads = q.shape[1]
        sizes = [
            (slice(b, b + 1), slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2]))
            for b in range(len(ends_q) - 1)
        ]
    else:
        heads = q.shape[0] * q.shape[3 - dims]
        whole = slice(0, q.shape[dims]), slice(0, k.shape[dims])
        sizes = [(slice(0, q.shape[0]), *whole)]
    for items, rows_q, rows_k in sizes:
        n_q, n_k = rows_q.stop - rows_q.start, rows_k.stop - rows_k.start
        fixed = all(type(n) is int for n in (heads, n_q, n_k))
        if is_exporting() and not fixed:  # a loop would hold for this length alone
            yield _Tile(items, rows_q, rows_k, 0, n_q, n_q, n_k)
            continue
        step = max(16, TILE // max(1, heads * n_k) // 16 * 16)
        for first in range(0, n_q, step):
            yield _Tile(items, rows_q, rows_k, first, min(first + step, n_q), n_q, n_k)


def _allowed(
    tile: _Tile, like: Tensor, extras: Extras, o: Options
) -> tuple[Tensor | None, Tensor]:
    """Which keys a query may see (None: all), and i + shift - j."""
    lengths = extras.kv_lens
    shift: Tensor | int = tile.n_k - tile.n_q if o.bottom_right else 0
    if lengths is not None:
        lengths = lengths[tile.items, None, None, None]
        shift = lengths - tile.n_q if o.bottom_right else 0
    i = torch.arange(tile.first, tile.last, device=like.device)[:, None]
    j = torch.arange(tile.n_k, device=like.device)
    distance = i + shift - j
    conditions = []
    if lengths is not None:
        conditions.append(j < lengths)
    if o.is_causal:
        conditions.append(distance >= 0)
    if o.window_left >= 0:
        conditions.append(distance <= o.window_left)
    if o.window_right >= 0:
        conditions.append(-distance <= o.window_right)
    if extras.mask is not None:
        mask = tile.term(extras.mask)
        conditions.append(mask if mask.dtype == torch.bool else mask > -torch.inf)
    allowed = None
    for condition in conditions:
        allowed = condition if allowed is None else allowed & condition
    return allowed, distance


def _grouped(x: Tensor, heads: int) -> Tensor:
    """[b, kv_heads, queries of the group's heads, ...] of [b, heads, queries, ...]."""
    batch, n_heads, n, last = x.shape  # of which any may be 0, where -1 will not do
    return x.reshape(batch, heads, n_heads // max(heads, 1) * n, last)


def _tile_scores(
    tile: _Tile, inputs: Inputs, extras: Extras, o: Options
) -> tuple[Tensor, Tensor]:
    """The scores, -inf where a key is forbidden, and the values, in float32 or 64."""
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    q = tile.queries(inputs.q, o.bnhd).to(wide)
    k = tile.rows(inputs.k, tile.rows_k, o.bnhd).to(wide)
    v = tile.rows(inputs.v, tile.rows_k, o.bnhd).to(wide)
    allowed, distance = _allowed(tile, q, extras, o)
    if inputs.bias is not None:
        seen = tile.term(inputs.bias) > -torch.inf
        allowed = seen if allowed is None else allowed & seen
    if allowed is not None:  # NaN times the probability 0 of a padding key is NaN
        allowed = allowed[(None,) * (4 - allowed.dim())]
        used = allowed.any(2).any(1)[:, None, :, None]
        k, v = (torch.where(used, x, torch.zeros((), dtype=wide)) for x in (k, v))
    s = _grouped(q * o.scale, k.shape[1]) @ k.transpose(-2, -1)
    s = s.reshape(*q.shape[:3], tile.n_k)
    if o.softcap > 0:
        s = o.softcap * torch.tanh(s / o.softcap)
    if extras.mask is not None and extras.mask.dtype != torch.bool:
        s = s + tile.term(extras.mask).to(wide)
    if inputs.bias is not None:
        s = s + tile.term(inputs.bias).to(wide)
    if inputs.alibi_slopes is not None:
        slopes = inputs.alibi_slopes.to(wide)
        if slopes.dim() == 2 and slopes.shape[0] > 1:
            slopes = slopes[tile.items]
        s = s - slopes.reshape(-1, slopes.shape[-1], 1, 1) * distance.abs()
    if allowed is not None:
        s = torch.where(allowed, s, torch.full((), -torch.inf, dtype=wide))
    return s, v


def _tile_attention(
    tile: _Tile, inputs: Inputs, extras: Extras, o: Options
) -> tuple[Tensor, Tensor]:
    """out [b, heads, n, dim] and lse [b, heads, n] of a tile, in float32 or float64."""
    s, v = _tile_scores(tile, inputs, extras, o)
    batch, heads, n, _ = s.shape
    top = (
        s.detach().amax(-1, keepdim=True) if tile.n_k else s.new_full((1,), -torch.inf)
    )
    empty = (top == -torch.inf).expand(batch, heads, n, 1)
    top = top.masked_fill(top == -torch.inf, 0)
    if inputs.sinks is not None:
        sinks = inputs.sinks.to(s.dtype)[:, None, None]
        top = torch.maximum(top, sinks.detach())
    weights = torch.exp(s - top)
    total = weights.sum(-1, keepdim=True)
    if inputs.sinks is not None:
        total = total + torch.exp(sinks - top)
    total = torch.where(empty, 1, total)
    lse = torch.where(empty, -torch.inf, top + torch.log(total)).squeeze(-1)
    if o.dropout_p > 0 and extras.seed is not None:
        first = tile.items.start * heads
        numbers = torch.arange(first, first + batch * heads, device=s.device)
        weights = weights * dropout_factors(
            o.dropout_p,
            extras.seed,
            numbers.view(batch, heads),
            tile.first,
            tile.last,
            tile.n_k,
        ).to(s.dtype)
    out = _grouped(weights / total, v.shape[1]) @ v
    return out.reshape(batch, heads, n, v.shape[-1]), lse


# ---- The whole -----------------------------------------------------------------------


def attention(
    inputs: Inputs, extras: Extras, options: Options
) -> tuple[Tensor, Tensor]:
    """out and lse, as the kernels give them."""
    q, v = inputs.q, inputs.v
    outs, lses = [], []
    for tile in _tiles(inputs, extras, options):
        out, lse = _tile_attention(tile, inputs, extras, options)
        outs.append(out)
        lses.append(lse)
    if not outs:  # no query at all
        history = q[:0].sum()  # is 0
        out = q.new_zeros((*q.shape[:-1], v.shape[-1])) + history
        lse = out.sum(-1).to(torch.promote_types(q.dtype, torch.float32)) - torch.inf
        heads_second = q.dim() == 3 or options.bnhd
        return out, lse.transpose(-1, -2) if heads_second else lse
    out, lse = torch.cat(outs, 2), torch.cat(lses, 2)
    if q.dim() == 3:
        out, lse = out[0].transpose(0, 1), lse[0]
        missing = q.shape[0] - out.shape[0]
        if missing:  # rows after the last item
            out = torch.cat([out, out.new_zeros(missing, *out.shape[1:])])
            lse = torch.cat([lse, lse.new_full((len(lse), missing), -torch.inf)], 1)
    elif options.bnhd:
        out = out.transpose(1, 2)
    return out.to(q.dtype), lse


def double_backward(
    grads: tuple[Tensor | None, ...],
    dout: Tensor,
    dlse: Tensor | None,
    inputs: Inputs,
    extras: Extras,
    options: Options,
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """Gradients of dout, dlse and the six inputs through the backward pass.

    `grads` are those of dq, dk, dv, dbias, dalibi_slopes and dsinks; `needed` says
    which of the eight results are wanted. Recomputes one tile of queries after another,
    so that memory is O(N), unless a third derivative may be asked for.
    """
    third = torch.is_grad_enabled()
    given = (dout, dlse, *inputs)
    with torch.enable_grad():
        # names of their own in the graph, in case that q is k
        leaves: list[Any] = [
            x.view_as(x) if x is not None and x.requires_grad else x for x in given
        ]
        targets = [x for x, n in zip(leaves, needed) if n and x is not None]
        sums: list[Tensor | None] = [None] * len(targets)
        own = Inputs(*leaves[2:])
        for tile in _tiles(inputs, extras, options):
            first = _tile_grads(tile, grads, leaves[0], leaves[1], own, extras, options)
            if not first:
                continue
            parts = torch.autograd.grad(
                [x for x, _ in first],
                targets,
                [g for _, g in first],
                create_graph=third,
                allow_unused=True,
            )
            sums = [
                a if b is None else b if a is None else a + b
                for a, b in zip(sums, parts)
            ]
    made = iter(sums)
    return [next(made) if n and x is not None else None for x, n in zip(leaves, needed)]


def _tile_grads(
    tile: _Tile,
    grads: tuple[Tensor | None, ...],
    dout: Tensor,
    dlse: Tensor | None,
    inputs: Inputs,
    extras: Extras,
    options: Options,
) -> list[tuple[Tensor, Tensor]]:
    """What a tile adds to each first gradient, with that one's own gradient."""
    out, lse = _tile_attention(tile, inputs, extras, options)
    loss = (out * tile.queries(dout, options.bnhd).to(out.dtype)).sum()
    if dlse is not None:
        empty = lse == -torch.inf
        loss = loss + (lse.masked_fill(empty, 0) * tile.lse(dlse).to(lse.dtype)).sum()
    pairs = [(x, g) for x, g in zip(inputs, grads) if x is not None and g is not None]
    if not pairs:
        return []
    first = torch.autograd.grad(
        loss, [x for x, _ in pairs], create_graph=True, allow_unused=True
    )
    return [
        (mine, g.to(mine.dtype))
        for mine, (_, g) in zip(first, pairs)
        if mine is not None and mine.requires_grad
    ]
