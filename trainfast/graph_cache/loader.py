"""Batches of a graph cache, put together by native threads."""

import operator
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from trainfast._core import (
    GraphBatch,
    GraphIteration,
    GraphOrder,
    GraphPrefetch,
    GraphSelection,
    crc32c,
)
from trainfast.graph_cache.batch import (
    Assemble,
    BatchPlan,
    dict_assembler,
    plan_batches,
)
from trainfast.graph_cache.cache import Cache, Subset
from trainfast.graph_cache.padding import Bucket, chooser, plan_buckets
from trainfast.graph_cache.sampling import Cut, Sampled, as_indices

OUTPUTS = ("dict", "pyg", "jraph")
OVERSIZE = ("error", "alone")
_MOST_THREADS = 64  # of the core


class Loader:
    """Iterates over batches of a cache (or a Subset), each epoch in another order.

    A batch is the disjoint union of its graphs: fields concatenated, indices moved on
    by the nodes before, in one block of memory that is never reused while any array of
    it lives. Native threads make batches ahead, without worker processes.

    batch_size: graphs in a batch. It must be given, unless max_nodes or max_edges (as
    many graphs as fit) or a batch_sampler decides.
    shuffle, seed: a permutation of its own for each (seed, epoch), in O(1) memory.
    seed=None: drawn when the loader's first shuffled order is needed, from torch's
    default generator if torch is loaded (`torch.manual_seed` repeats the order), else
    from NumPy's (`np.random.seed`); `state_dict()` has it. With world_size above 1 all
    ranks need the same seed: None is 0, as in torch's DistributedSampler.
    drop_last: without the last batch where it would be smaller.
    max_nodes, max_edges: budgets. A batch takes graphs as long as its nodes (of all
    types) and edges stay within them; nothing comes twice and nothing is left out.
    oversize: a graph beyond a budget is an "error" (at once), or comes "alone".
    sampler: an iterable of indices; batch_sampler: of lists of indices.
    rank, world_size: this process's share; every graph comes in exactly one rank, and
    all ranks have as many batches.
    prefetch: batches made ahead. threads: that make them; 0: made when asked for, where
    they are large on torch's threads. One is enough unless graphs are large; where all
    cores are busy 0 can be faster, as a thread that takes a core from the training step
    costs more than it gives.
    output: "dict" (see batch.dict_assembler), "pyg" (a DataBatch or HeteroDataBatch),
    "jraph" (a GraphsTuple); or a function that makes of a BatchPlan one that makes
    what you get of a GraphBatch (its attribute array_type, if it has one, says what the
    arrays are: torch.Tensor; otherwise they are NumPy's).
    pad_to: static shapes, (graphs, nodes, edges), a dict with these keys (in
    heterogeneous graphs with dicts by type), "max" (room for any batch), or a list, of
    which each batch takes the smallest that it fits in. It is filled up with one graph
    that has all that is missing, zeros, and then empty ones; dicts get "graph_mask".
    pin_memory, device: torch tensors in pinned memory, or on a device, copied in one
    piece on a stream of its own.
    fields, exclude: keys to have or to leave out. follow_batch: keys for which it is
    wanted which graph each entry is of.

    Each iteration is the next epoch, from its first batch on (one that is never asked
    for a batch counts for nothing); `set_epoch` says which. `state_dict()` is where
    the newest iteration stands: a loader that gets it goes on after the last batch
    that was handed out, in O(1) (with a sampler of one's own, by asking it again).
    """

    def __init__(
        self,
        cache: Cache | Subset,
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool = False,
        max_nodes: int | None = None,
        max_edges: int | None = None,
        oversize: str = "error",
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        rank: int = 0,
        world_size: int = 1,
        prefetch: int = 2,
        threads: int = 1,
        output: str | Callable[[BatchPlan], Assemble] = "dict",
        pad_to: Any = None,
        pin_memory: bool = False,
        device: Any = None,
        fields: Iterable[Hashable] | None = None,
        exclude: Iterable[Hashable] = (),
        follow_batch: Iterable[Hashable] = (),
    ) -> None:
        self.dataset = cache
        self.batch_size = batch_size
        self.shuffle = bool(shuffle)
        self._seed_given = seed is not None
        self._seed = None if seed is None else _seed_number(seed)
        self.drop_last = bool(drop_last)
        self.max_nodes, self.max_edges = max_nodes, max_edges
        self.oversize = _one_of("oversize", oversize, OVERSIZE)
        self.sampler, self.batch_sampler = sampler, batch_sampler
        self.rank = _count("rank", rank, 0)
        self.world_size = _count("world_size", world_size, 1)
        self.prefetch = _count("prefetch", prefetch, 0)
        self.threads = _count("threads", threads, 0, _MOST_THREADS + 1)
        self.output = output if callable(output) else _one_of("output", output, OUTPUTS)
        self.pad_to, self.pin_memory, self.device = pad_to, bool(pin_memory), device
        self.fields = None if fields is None else _keys("fields", fields)
        self.exclude = _keys("exclude", exclude)
        self.follow_batch = _keys("follow_batch", follow_batch)
        self.epoch = 0
        self._resume: tuple[int, int] | None = None  # epoch and position to begin at
        self._place: _Place | None = None  # of the newest iteration
        self._length: tuple[int, int] | None = None  # of an epoch
        self._prepare()

    @property
    def seed(self) -> int:
        """The seed of the shuffled orders; drawn now unless it was before, or given."""
        if self._seed is None:
            self._seed = 0 if self.world_size > 1 else _drawn_seed()
        return self._seed

    # ---- Iterating -------------------------------------------------------------------

    def __iter__(self) -> "Iteration":
        return Iteration(self)

    def _begin(self) -> "_Place":
        """Where an iteration begins that asks for its first batch."""
        position = 0
        if self._resume is not None and self._resume[0] == self.epoch:
            position = self._resume[1]
        self._resume = None
        self._place = _Place(self.epoch, position)
        self.epoch += 1
        return self._place

    def __len__(self) -> int:
        """Batches of the running epoch, or else of the next one."""
        epoch = self._running_epoch()
        if self.batch_sampler is not None:
            return len(self.batch_sampler)  # type: ignore[arg-type]
        if self.sampler is not None:
            if self._budgets:
                raise TypeError("a loader with a sampler and budgets has no length")
            whole, rest = divmod(len(self.sampler), self._batch_size)  # type: ignore
            return whole + (rest > 0 and not self.drop_last)
        if self._length is None or (self._budgets and self._length[0] != epoch):
            self._length = epoch, self._order(epoch).batches()
        return self._length[1]

    def _running_epoch(self) -> int:
        place = self._place
        return self.epoch if place is None or place.done else place.epoch

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch; it is passed on to a sampler that asks."""
        self.epoch = _count("epoch", epoch, 0)
        for sampler in (self.sampler, self.batch_sampler):
            forward = getattr(sampler, "set_epoch", None)
            if forward is not None:
                forward(epoch)

    # ---- Resuming --------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the newest iteration stands, in a few numbers and strings."""
        epoch, position = self.epoch, 0
        if self._place is not None and not self._place.done:
            epoch, position = self._place.epoch, self._place.position
        elif self._resume is not None and self._resume[0] == epoch:
            position = self._resume[1]
        seed = self.seed if self.shuffle else 0
        where = {"epoch": epoch, "position": position, "seed": seed}
        return {**where, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on after the last batch before `state_dict()`.

        A loader to which no `seed` was given takes the state's. Raises ValueError where
        the cache, or what decides the order, is another. Rank and world_size may be
        others: what is left of the epoch is shared out anew.
        """
        identity = self._identity()
        for name in ("epoch", "position", "seed", *identity):
            if name not in state:
                raise ValueError(f"state must be of a Loader, got one without {name!r}")
        if self.shuffle and self._seed_given:
            identity["seed"] = self.seed
        for name, value in identity.items():
            if state[name] != value:
                got = f"{value!r} here"
                if name == "fingerprint":
                    got += ": another cache, or it has changed since"
                rule = f"must be {state[name]!r} as in the state"
                raise ValueError(f"the loader's {name} {rule}, got {got}")
        epoch = _count("epoch", state["epoch"], 0)
        position = _count("position", state["position"], 0)
        if self.shuffle:
            self._seed = _seed_number(state["seed"])
        self._place = None
        self.set_epoch(epoch)
        self._resume = epoch, position

    def _identity(self) -> dict[str, Any]:
        """What a position means something for."""
        subset = self._subset
        names = ("shuffle", "drop_last", "max_nodes", "max_edges", "oversize")
        sampled = self.sampler is not None or self.batch_sampler is not None
        return {
            "fingerprint": self._cache.fingerprint,
            "graphs": len(self.dataset),
            "subset": 0 if subset is None else crc32c(subset),
            "batch_size": self._batch_size,
            "sampled": sampled,
            **{name: getattr(self, name) for name in names},
        }

    # ---- What iterations need --------------------------------------------------------

    def _order(self, epoch: int, seed: int | None = None) -> GraphOrder:
        """The core's order of an epoch, at its beginning."""
        if seed is None:
            seed = self.seed if self.shuffle else 0
        return GraphOrder(
            len(self.dataset),
            subset=self._subset,
            seed=seed % 2**64,
            epoch=epoch,
            shuffle=self.shuffle,
            rank=self.rank,
            world_size=self.world_size,
            batch_size=self._batch_size,
            drop_last=self.drop_last,
            sizes=self._sizes,
            budgets=self._budgets,
            oversize_alone=self.oversize == "alone",
        )

    def _batches(self, epoch: int, position: int) -> Any:
        """What gives an epoch's batches of indices from a position on."""
        if self.batch_sampler is None and self.sampler is None:
            order = self._order(epoch)
            order.position = position
            return order
        batches: Iterable[Any] | None = self.batch_sampler
        if batches is None:
            assert self.sampler is not None
            limit = self._batch_size
            sizes = [self._of_dataset(sizes) for sizes in self._sizes]
            batches = Cut(self.sampler, limit, self.drop_last, sizes, self._budgets)
        return Sampled(batches, self._subset, position)

    def _prepare(self) -> None:
        """Checks the arguments and derives all that follows; reads only the index."""
        dataset = self.dataset
        if not isinstance(dataset, Cache | Subset):
            kind = type(dataset).__name__
            raise TypeError(f"cache must be a Cache or a Subset, got {kind}")
        self._cache = dataset.cache if isinstance(dataset, Subset) else dataset
        self._subset = dataset.indices if isinstance(dataset, Subset) else None
        self._length = None
        self._check_arguments()
        self._plan_budgets()
        self._selections: dict[int, GraphSelection] = {}
        self._buckets: list[Bucket] = []
        self._choose: Callable[[np.ndarray], int] | None = None
        self._assemble: Assemble | None = None
        if self._cache.schema is None:
            return
        self._plan = plan_batches(
            self._cache.schema,
            self.fields,
            self.exclude,
            self.follow_batch,
            padded=self.pad_to is not None,
        )
        self._assemble = self._assembler()
        if self.pad_to is not None:
            self._plan_padding()

    def _check_arguments(self) -> None:
        if self.rank >= self.world_size:
            limit = f"below world_size, {self.world_size}"
            raise ValueError(f"rank must be {limit}, got {self.rank}")
        if self.batch_size is not None:
            self.batch_size = _count("batch_size", self.batch_size, 1)
        for name in ("max_nodes", "max_edges"):
            if getattr(self, name) is not None:
                setattr(self, name, _count(name, getattr(self, name), 1))
        given = {
            "sampler": self.sampler is not None,
            "shuffle": self.shuffle,
            "world_size": self.world_size > 1,
            "batch_size": self.batch_size is not None,
            "drop_last": self.drop_last,
            "max_nodes": self.max_nodes is not None,
            "max_edges": self.max_edges is not None,
        }
        if self.batch_sampler is not None:
            _forbid("batch_sampler", given, list(given))
            return
        if self.sampler is not None:
            _forbid("sampler", given, ["shuffle", "world_size"])
        if not (given["batch_size"] or given["max_nodes"] or given["max_edges"]):
            raise ValueError(
                "batch_size must be given, got None; pass the graphs of a batch "
                "(batch_size=32), or max_nodes, max_edges or batch_sampler"
            )

    def _plan_budgets(self) -> None:
        """The budgets, what counts against them, and how many graphs fit at most."""
        self._sizes: list[np.ndarray] = []
        self._budgets: list[int] = []
        for name, budget in (("nodes", self.max_nodes), ("edges", self.max_edges)):
            if budget is not None:
                total = getattr(self._cache.sizes, f"total_{name}")()
                self._sizes.append(np.ascontiguousarray(total, np.int64))
                self._budgets.append(budget)
                self._check_oversize(name, total, budget)
        self._batch_size = self.batch_size or self._most_graphs()
        if self.sampler is None and self.batch_sampler is None:
            self._order(0, seed=0)  # which refuses what cannot be shared out

    def _most_graphs(self) -> int:
        if not self._budgets:
            return 1  # a batch_sampler decides
        most = max(len(self.dataset), 1)
        for sizes, budget in zip(self._sizes, self._budgets):
            smallest = int(self._of_dataset(sizes).min(initial=2**62))
            if smallest > 0:
                most = min(most, max(budget // smallest, 1))
        return most

    def _check_oversize(self, name: str, sizes: np.ndarray, budget: int) -> None:
        if self.oversize == "alone":
            return
        over = np.flatnonzero(self._of_dataset(sizes) > budget)
        if len(over):
            graph = int(over[0] if self._subset is None else self._subset[over[0]])
            raise ValueError(
                f"max_{name} must be at least the {name} of every graph, or oversize "
                f"'alone', got {budget} and graph {graph} with {sizes[graph]}"
            )

    def _of_dataset(self, values: np.ndarray) -> np.ndarray:
        return values if self._subset is None else values[self._subset]

    def _plan_padding(self) -> None:
        sampled = self.sampler is not None or self.batch_sampler is not None
        limits = {"nodes": self.max_nodes, "edges": self.max_edges}
        self._buckets = plan_buckets(
            self.pad_to,
            self._cache,
            self._subset,
            None if self.batch_sampler is not None else self._batch_size,
            sampled,
            {role: limit for role, limit in limits.items() if limit is not None},
        )
        if self.pad_to != "max":  # that has room for all
            self._choose = chooser(self._buckets, self._cache)

    def _assembler(self) -> Assemble:
        """What makes of the core's batch what the user gets."""
        on_torch = self.output == "pyg" or self.device is not None or self.pin_memory
        self._array_type = getattr(self.output, "array_type", None)
        if on_torch and self.output == "jraph":
            raise ValueError("device and pin_memory must be left out with jraph")
        if self.output == "dict":
            assemble = dict_assembler(self._plan)
        elif self.output == "pyg":
            assemble = import_module("trainfast.torch.pyg").assembler(self._plan)
        elif self.output == "jraph":
            jraph = import_module("trainfast.graph_cache.jraph")
            assemble = jraph.jraph_assembler(self._plan)
        else:
            assert callable(self.output)
            assemble = self.output(self._plan)
        if on_torch:
            torch_side = import_module("trainfast.torch.graph_device")
            self._array_type = torch_side.Tensor
            move = torch_side.mover(self.device, self.pin_memory)
            if move is not None:
                return lambda batch: assemble(move(batch))
        return assemble

    def _selection(self, bucket: int) -> GraphSelection:
        """What the batches of one of pad_to's shapes hold; made once."""
        if bucket not in self._selections:
            shape = self._buckets[bucket] if self._buckets else Bucket(0, (), ())
            self._selections[bucket] = self._plan.selection(
                self._cache._core,
                self._array_type,
                shape.slots,
                shape.totals if self._buckets else None,
            )
        return self._selections[bucket]

    # ---- Other processes -------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        made = {
            "_selections",
            "_plan",
            "_assemble",
            "_choose",
            "_buckets",
            "_array_type",
        }
        made |= {"_cache", "_subset", "_sizes", "_budgets", "_batch_size", "_length"}
        state = self.state_dict()  # first: it may draw the seed, which copies share
        kept = {k: v for k, v in self.__dict__.items() if k not in made}
        return {**kept, "_place": None, "_state": state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        position = state.pop("_state")
        self.__dict__.update(state)
        self._prepare()
        self.epoch = position["epoch"]
        self._resume = self.epoch, position["position"]


class _Place:
    """How far an iteration is: what has been handed out, not what is in flight."""

    __slots__ = ("done", "epoch", "position")

    def __init__(self, epoch: int, position: int) -> None:
        self.epoch, self.position, self.done = epoch, position, False


class Iteration(GraphIteration):
    """One epoch of a Loader. Its threads end with it, also when it is left early.

    The core hands out the batches: where nothing has to look at their graphs, also
    without what is here.
    """

    _indices = staticmethod(as_indices)

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._place: _Place | None = None  # not begun
        self._queue: deque[tuple[GraphPrefetch, int]] = deque()
        self._prefetches: dict[int, GraphPrefetch] = {}
        self._error: Exception | None = None
        self._held: tuple[GraphBatch, int] | None = None
        self._source: Any = None

    def _begin(self) -> None:
        """The core's first call, made again where it fails."""
        loader = self._loader
        if self._place is None:
            self._place = loader._begin()
        place = self._place
        assemble = self._assemble = loader._assemble
        if assemble is None:
            return
        source = loader._batches(place.epoch, place.position)
        if loader._choose is None:
            order = source.batches if isinstance(source, Sampled) else source
            self._follow(self._prefetch(0), order, assemble, place)
        else:
            self._source = source

    def _fill(self) -> None:
        """The core's second call."""
        loader = self._loader
        submit = self._submit if loader._choose is None else self._submit_chosen
        ahead = loader.prefetch if loader.threads else 1
        for _ in range(max(ahead, 1)):
            if not submit():
                break

    def _other(self) -> Any:
        """The next batch where somebody chooses its shape, or the end."""
        if self._held is None and not self._queue and not self._submit_chosen():
            return self._end()
        if self._held is None:
            prefetch, position = self._queue[0]
            try:
                batch = prefetch.next()
            except BaseException:
                self._forget_failed(prefetch)
                raise
            self._queue.popleft()
            self._held = batch, position
        self._submit_chosen()  # Ctrl-C in the sampler loses no batch
        (batch, position), self._held = self._held, None
        assert self._assemble is not None and self._place is not None
        made = self._assemble(batch)
        self._place.position = position
        return made

    def _submit_chosen(self) -> bool:
        """Hands the next batch to the threads; False where there is none.

        An error of the user's sampler waits until the batches before it are out.
        """
        source = self._source
        if source is None:
            return False
        try:
            indices = source.next()
            if indices is None:
                self._source = None
                return False
            choose = self._loader._choose
            prefetch = self._prefetch(0 if choose is None else choose(indices))
            prefetch.submit(indices)
            self._queue.append((prefetch, source.position))
        except Exception as error:
            self._error, self._source = error, None
        return self._source is not None

    def _prefetch(self, bucket: int) -> GraphPrefetch:
        prefetch = self._prefetches.get(bucket)
        if prefetch is None:
            loader = self._loader
            prefetch = GraphPrefetch(loader._selection(bucket), loader.threads)
            self._prefetches[bucket] = prefetch
        return prefetch

    def _forget_failed(self, prefetch: GraphPrefetch) -> None:
        """After an error: was it the batch's own, or did a signal end the wait?"""
        waiting = sum(1 for other, _ in self._queue if other is prefetch)
        if prefetch.pending < waiting:
            self._queue.popleft()
            self._submit_chosen()

    def _end(self) -> Any:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._place is not None:
            self._place.done = True
        self._prefetches.clear()
        raise StopIteration

    def __reduce__(self) -> Any:
        raise TypeError("an iteration cannot be pickled: pickle its loader")


def _count(name: str, value: Any, least: int, end: int = 2**63) -> int:
    try:
        number = operator.index(value)
    except TypeError:  # arrays have __index__, too
        number = least - 1
    if number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value}")
    if number >= end:
        raise ValueError(f"{name} must be below {end}, got {value}")
    return int(number)


def _seed_number(seed: Any) -> int:
    return _count("seed", seed, -(2**63), 2**64)


def _drawn_seed() -> int:
    """A seed from the generator that the user seeds: torch's, or else NumPy's."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        return int(torch.empty((), dtype=torch.int64).random_().item())
    return int(np.random.randint(2**63 - 1, dtype=np.int64))


def _keys(name: str, keys: Iterable[Hashable]) -> tuple[Hashable, ...]:
    if isinstance(keys, str):
        raise ValueError(f"{name} must be a list of keys, got {keys!r}")
    return tuple(keys)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {list(allowed)}, got {value!r}")
    return str(value)


def _forbid(argument: str, given: Mapping[str, bool], names: list[str]) -> None:
    for name in names:
        if given[name]:
            raise ValueError(f"{name} must be left out with a {argument}, got it")
