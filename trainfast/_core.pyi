from collections.abc import Callable, Hashable, Mapping, Sequence
from os import PathLike
from typing import Any, Protocol, Self, TypeAlias, final

import numpy as np
from typing_extensions import Buffer

version: str

class _SupportsDLPack(Protocol):
    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

# What the kernels read and write: arrays of NumPy, torch, CuPy, JAX and others.
_Array: TypeAlias = _SupportsDLPack | Buffer
_Indices: TypeAlias = Sequence[int] | np.ndarray
# What a graph has for a field; None: the graph lacks the field.
_Value: TypeAlias = np.ndarray | bool | int | float | str | bytes | None

class PlacementError(ValueError): ...

@final
class Workspace: ...

@final
class SmallCalls:
    """Decides by size which attention calls are left to torch; see
    csrc/python/small_calls.c."""

    def __new__(
        cls,
        types: tuple[type, type],
        dtypes: tuple[Any, Any, Any, Any],
        is_grad_enabled: Callable[[], bool],
        amx: bool,
        /,
    ) -> SmallCalls: ...
    # types: Tensor, Parameter; dtypes: float32, float64, float16, bfloat16.
    def leaves_attention(
        self, query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, /
    ) -> bool: ...
    def leaves_module(self, x: Any, heads: int, /) -> bool: ...
    def count_module(self) -> None: ...
    def counts(self, reset: bool, /) -> tuple[int, int, int]: ...

@final
class GraphWriter:
    """Writes one segment of a graph cache; see csrc/graph_cache/."""

    def __new__(
        cls,
        path: str | PathLike[str],
        schema: bytes,
        keys: Sequence[Hashable],
        *,
        durable: bool = True,
    ) -> GraphWriter: ...
    # keys: graph[keys[i]] is the value of the schema's field i.
    appended: int
    committed: int
    def append(
        self,
        graph: Mapping[Any, Any],
        key: bytes | None = None,
        counts: Sequence[int] | None = None,
        /,
    ) -> int | None: ...
    # None: appended. An index: the size of that field does not fit the schema, and
    # nothing was appended.
    def commit(self) -> int: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...

@final
class GraphCache:
    """An open cache. verify: graphs are checked 0 never, 1 at the first, 2 at every
    access. pread: files are read, not mapped; None: on network file systems."""

    def __new__(
        cls,
        path: str | PathLike[str],
        *,
        verify: int = 1,
        pread: bool | None = None,
        partial: bool = False,
    ) -> GraphCache: ...
    schema: bytes | None
    fingerprint: bytes
    file_bytes: int
    segments: int
    pread: bool
    def __len__(self) -> int: ...
    def get(self, index: int, /) -> list[_Value]: ...
    # One value for each field. An array is a read-only view of the record, or a copy if
    # it is stored in a narrower dtype.
    def counts(self, count: int, /) -> np.ndarray: ...  # int64 [len]; -1: file bytes
    def keys(self) -> bytes: ...  # 16 bytes a graph
    def verify(self, first: int, end: int, values: bool) -> list[tuple[int, str]]: ...
    # Index -1: commit frames, checked if the range is empty or all graphs.

@final
class GraphSelection:
    """Contents and array type of batches; see tfast_graph_selection."""

    def __new__(
        cls,
        cache: GraphCache,
        fields: Sequence[int],
        batch_of: Sequence[int] = (),
        *,
        n_slots: int = 0,
        totals: Sequence[int] | None = None,
        array_type: type | None = None,
    ) -> GraphSelection: ...
    # array_type: None for NumPy arrays, object for DLPack capsules, or a type that has
    # the DLPack exchange API or whose module has from_dlpack(), such as torch.Tensor.

@final
class GraphBatch:
    """One collated batch; its arrays keep its memory alive."""

    n_graphs: int
    n_slots: int
    totals: tuple[int, ...]
    nbytes: int
    # Arrays are of the selection's array_type.
    fields: list[Any]  # None for a field that no graph of the batch has
    ptrs: list[Any]  # for each count: int64 [n_slots + 1], prefix sums over graphs
    slices: list[Any]  # a copy of ptrs outside the arena
    starts: list[Any]  # slices without the last element
    batches: list[Any]  # batch vectors, int64 [total]
    arena: Any  # the whole arena, uint8 [nbytes]
    offsets: tuple[list[int], list[int], list[int]]  # in the arena, bytes

def graph_collate(selection: GraphSelection, indices: _Indices, /) -> GraphBatch: ...

@final
class GraphPrefetch:
    """Collates submitted batches ahead on native threads."""

    def __new__(cls, selection: GraphSelection, threads: int) -> GraphPrefetch: ...
    def submit(self, number: int, indices: _Indices, /) -> None: ...
    # Numbers are >= 0 and increase; a number that is not larger is ignored.
    def next(self, number: int, /) -> GraphBatch: ...
    # Waits; signal handlers run. Repeating the last number returns the same batch.
    @property
    def failed_number(self) -> int: ...
    # Of the last batch whose own error next() raised, not a signal handler's; or -1.

@final
class GraphOrder:
    """Iterates over a rank's batches of an epoch; see tfast_graph_order."""

    def __new__(
        cls,
        n: int,
        *,
        subset: np.ndarray | None = None,
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool = False,
        rank: int = 0,
        world_size: int = 1,
        batch_size: int,
        drop_last: bool = False,
        sizes: Sequence[np.ndarray] = (),
        budgets: Sequence[int] = (),
        oversize_alone: bool = False,
    ) -> GraphOrder: ...
    position: int  # 0, or a saved value to resume from
    def __iter__(self) -> Self: ...
    def __next__(self) -> np.ndarray: ...  # graph indices, int64
    def batches(self) -> int: ...

def adamw(
    params: Sequence[_Array],
    grads: Sequence[_Array],
    exp_avgs: Sequence[_Array],
    exp_avg_sqs: Sequence[_Array],
    max_exp_avg_sqs: Sequence[_Array] | None,
    step: int | Sequence[_Array],
    workspace: Workspace,
    *,
    lr: float | _Array,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    decoupled_weight_decay: bool,
    grad_scale: _Array | None = None,
    found_inf: _Array | None = None,
    relayout: Callable[[Any, Any], _Array] | None = None,
    stream: int = 0,
    scales: Sequence[_Array | None] | None = None,
    emas: Sequence[_Array] | None = None,
    copies: Sequence[_Array | None] | None = None,
    ema_decay: float = 0.0,
    clip_coef: _Array | None = None,
    zero_grad: bool = False,
    write_back_grads: bool = False,
    tails: Sequence[_Array | None] | None = None,
    rounding: str = "nearest",
    seed: int = 0,
    origins: list[Any] | None = None,
) -> None: ...
def adamw_groups(
    groups: list[Any],
    state: dict[Any, dict[str, Any]],
    bump: Callable[[list[Any]], object],
    relayout: Callable[[Any, Any], _Array],
    workspace: Workspace,
    measure_inf: bool,
    measure_norm: bool,
    max_norm: float,
    grad_scale: _Array | None = None,
    found_inf: _Array | None = None,
    total_norm: _Array | None = None,
    total_norm_f64: _Array | None = None,
    clip_coef: _Array | None = None,
    stream: int = 0,
    only_prepare: bool = False,
    wrapper: tuple[type, Any, Any, Callable[[Any, Any], bool]] | None = None,
) -> tuple[int, bool] | None: ...
def amp_grads(
    grads: list[Any],
    workspace: Workspace,
    *,
    found_inf: _Array | None = None,
    total_norm: _Array | None = None,
    total_norm_f64: _Array | None = None,
    clip_coef: _Array | None = None,
    norm_type: float = 2.0,
    max_norm: float = ...,
    rewrite: str = "read",
    clip_value: float = 0.0,
    grad_scale: _Array | None = None,
    factor: _Array | None = None,
    stream: int = 0,
) -> None: ...
def amp_update(
    scale: _Array,
    growth_tracker: _Array,
    found_infs: list[Any],
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float = 0.0,
    max_scale: float = ...,
    hysteresis: int = 1,
    hysteresis_tracker: _Array | None = None,
    stream: int = 0,
) -> None: ...
def attention(
    q: _Array,
    k: _Array,
    v: _Array,
    out: _Array,
    lse: _Array | None,
    /,
    *,
    mask: _Array | None = None,
    bias: _Array | None = None,
    alibi_slopes: _Array | None = None,
    sinks: _Array | None = None,
    is_causal: bool = False,
    bottom_right: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    scale: float,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: int | _Array = 0,
    cu_seqlens_q: _Array | None = None,
    cu_seqlens_k: _Array | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    kv_lens: _Array | None = None,
    bnhd: bool = False,
    stream: int = 0,
    scratch: Callable[[int], object] | None = None,
) -> None: ...
def attention_backward(
    dout: _Array,
    q: _Array,
    k: _Array,
    v: _Array,
    out: _Array,
    lse: _Array,
    dlse: _Array | None,
    dq: _Array | None,
    dk: _Array | None,
    dv: _Array | None,
    dbias: _Array | None,
    dalibi: _Array | None,
    dsinks: _Array | None,
    /,
    *,
    mask: _Array | None = None,
    bias: _Array | None = None,
    alibi_slopes: _Array | None = None,
    sinks: _Array | None = None,
    is_causal: bool = False,
    bottom_right: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    scale: float,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: int | _Array = 0,
    cu_seqlens_q: _Array | None = None,
    cu_seqlens_k: _Array | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    kv_lens: _Array | None = None,
    bnhd: bool = False,
    stream: int = 0,
    scratch: Callable[[int], object] | None = None,
) -> None: ...
def gemm(
    a: _Array, b: _Array, out: _Array, *, allow_tf32: bool = False, stream: int = 0
) -> None: ...

# make(edges): neighbour, centre, distance, relative_position, unit_vector.
def neighbours(
    points: _Array,
    centres: _Array | None,
    ptr: _Array,
    centres_ptr: _Array | None,
    make: Callable[[int], tuple[_Array | None, ...]],
    *,
    r: float = 0.0,
    most: int = -1,
    below: bool = False,
    first: bool = False,
    loop: bool = False,
    unit: bool = False,
    short_indices: bool = False,
    scratch: Callable[[int], object] | None = None,
    stream: int = 0,
) -> tuple[Any, ...]: ...
def trajectory(
    pred: _Array,
    target: _Array,
    totals: _Array,
    agents: _Array | None = None,
    mask: _Array | None = None,
    probabilities: _Array | None = None,
    *,
    definition: str = "seed",
    top_k: int | None = None,
    miss_threshold: float = 2.0,
    strict_final: bool = False,
    scratch: Callable[[int], object] | None = None,
    stream: int = 0,
) -> None: ...
def backend_in_use() -> str: ...
def backends() -> list[tuple[str, str | None, bool]]: ...
def num_threads() -> int: ...
def thread_runtime() -> str: ...
def use_backend(name: str | None, /) -> None: ...
def graph_adopt(path: str | PathLike[str], /) -> tuple[int, int]: ...
def graph_schema(path: str | PathLike[str], /) -> bytes | None: ...
def graph_build_begin(path: str | PathLike[str], /) -> None: ...
def graph_build_anew(path: str | PathLike[str], /) -> None: ...
def graph_is_building(path: str | PathLike[str], /) -> bool: ...
def graph_build_end(path: str | PathLike[str], order: np.ndarray | None, /) -> None: ...
def graph_repair(
    source: str | PathLike[str],
    target: str | PathLike[str],
    line: Callable[[str], object],
    /,
) -> dict[str, int]: ...
def crc32c(data: Buffer | np.ndarray, crc: int = 0) -> int: ...
