"""Iterates over batches of a graph cache, which native threads collate."""

import operator
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from trainfast import adapters
from trainfast._core import (
    GraphBatch,
    GraphOrder,
    GraphPrefetch,
    GraphSelection,
    crc32c,
)
from trainfast.graph_cache.ahead import Ahead, Place
from trainfast.graph_cache.batch import (
    Assemble,
    BatchPlan,
    dict_assembler,
    plan_batches,
)
from trainfast.graph_cache.cache import Cache, Subset
from trainfast.graph_cache.padding import Bucket, chooser, plan_buckets
from trainfast.graph_cache.sampling import Cut, as_indices, of_subset
from trainfast.report import attributes, one_line

OUTPUTS = ("dict", "pyg")
OVERSIZE = ("error", "alone")
_MOST_THREADS = 64  # of the core


class Loader:
    """Iterates over batches of a cache (or a Subset), each epoch in another order.

    A batch is the disjoint union of its graphs: fields are concatenated, and indices
    are increased by the number of nodes before. A batch lies in one block of memory,
    which is not reused while any of its arrays lives. Native threads make batches
    ahead; there are no worker processes.

    Each iteration is the next epoch from its first batch on (an iteration that is never
    asked for a batch does not count); `set_epoch` chooses the epoch. `state_dict()` is
    the position of the newest iteration. A loader that loads it continues after the
    last batch that was handed out, in O(1); with a sampler, by iterating over the
    sampler up to there.

    Args:
        cache: the cache, or a subset of it.
        batch_size: graphs in a batch. Required, unless max_nodes, max_edges or a
            batch_sampler is given.
        shuffle: another order in each epoch, a permutation in O(1) memory.
        seed: of the orders. None: drawn when the first shuffled order is needed, from
            torch's default generator if torch is loaded (`torch.manual_seed` repeats
            the order), else from NumPy's (`np.random.seed`); `state_dict()` has it.
            With world_size above 1 all ranks need the same seed: None is 0, as in
            torch's DistributedSampler.
        drop_last: omits the last batch of an epoch if it is smaller.
        max_nodes, max_edges: budgets. A batch takes graphs as long as its nodes (of all
            types) and edges stay within them. Every graph comes once.
        oversize: a graph beyond a budget is an "error" (at once), or comes "alone".
        sampler: an iterable of indices.
        batch_sampler: an iterable of lists of indices.
        rank, world_size: this process's share. Every graph comes on exactly one rank,
            and all ranks have the same number of batches. None: those of
            torch.distributed's default process group if it is initialised when the
            loader is made, else 0 and 1; world_size=1 gives every process all graphs. A
            sampler or batch_sampler must divide the graphs among ranks itself.
        prefetch: batches made ahead.
        threads: native threads that make batches. They start when a batch takes longer
            than waking a thread, about 10 us. 0: a batch is made when it is asked for,
            a large one on torch's threads. One thread is enough unless graphs are
            large. If all cores are busy, 0 can be faster, because a thread takes time
            from the training step.
        output: "dict": a dict of arrays by key, with "batch" (the graph of each node)
            and "ptr" (the first node of each graph); "pyg": a DataBatch or
            HeteroDataBatch; or a function that takes a BatchPlan and returns a function
            from a GraphBatch to a batch. The function's attribute `array_type`, if it
            has one, is the type of the arrays (torch.Tensor); the default is NumPy's.
        pad_to: static shapes: (graphs, nodes, edges), a dict with these keys (in
            heterogeneous graphs with dicts by type), "max" (room for any batch), or a
            list, of which each batch takes the smallest that it fits in. Padding is one
            graph of zeros with all missing nodes and edges, followed by empty graphs;
            dicts get "graph_mask", bool [graphs], True for real graphs.
        pin_memory: torch tensors in pinned memory.
        device: torch tensors on this device, copied in one piece on a stream of their
            own.
        fields, exclude: keys to have, or to omit.
        follow_batch: keys for which the graph of each entry is added ("x_batch",
            "x_ptr").

    Raises:
        ValueError: arguments out of range or that contradict each other, a graph beyond
            a budget.
        TypeError: `cache` is neither a Cache nor a Subset.
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
        rank: int | None = None,
        world_size: int | None = None,
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
        alone = sampler is not None or batch_sampler is not None
        alone = alone or (rank is None and world_size == 1)
        known_rank, known_size = (0, 1) if alone else _process_group()
        self.rank = _count("rank", known_rank if rank is None else rank, 0)
        size = known_size if world_size is None else world_size
        self.world_size = _count("world_size", size, 1)
        self.prefetch = _count("prefetch", prefetch, 0)
        self.threads = _count("threads", threads, 0, _MOST_THREADS + 1)
        self.output = output if callable(output) else _one_of("output", output, OUTPUTS)
        self.pad_to, self.pin_memory, self.device = pad_to, bool(pin_memory), device
        self.fields = None if fields is None else _keys("fields", fields)
        self.exclude = _keys("exclude", exclude)
        self.follow_batch = _keys("follow_batch", follow_batch)
        self.epoch = 0
        self._resume: tuple[int, int] | None = None  # epoch and position to begin at
        self._place: Place | None = None  # of the newest iteration
        self._length: tuple[int, int] | None = None  # of an epoch
        self._prepare()

    @property
    def seed(self) -> int:
        """The seed of the shuffled orders; drawn at first access if none was given."""
        if self._seed is None:
            self._seed = 0 if self.world_size > 1 else _drawn_seed()
        return self._seed

    def __repr__(self) -> str:
        names = "batch_size shuffle drop_last max_nodes max_edges sampler "
        names += "batch_sampler rank world_size prefetch threads output pad_to device"
        dataset = vars(self).get("dataset")
        graphs = None if dataset is None else len(dataset)
        return one_line(self, graphs=graphs, **attributes(self, names))

    # ---- Iterating -------------------------------------------------------------------

    def __iter__(self) -> "Iteration":
        return Iteration(self)

    def _position_to_begin_at(self) -> int:
        """The position in its epoch at which the next iteration begins."""
        if self._resume is not None and self._resume[0] == self.epoch:
            return self._resume[1]
        return 0

    def __len__(self) -> int:
        """Batches of the running epoch, or else of the next one."""
        epoch = self._running_epoch()
        if self.batch_sampler is not None:
            return len(self.batch_sampler)  # type: ignore[arg-type]
        if self.sampler is not None:
            if self._budgets:
                raise TypeError(
                    "a loader with a sampler and budgets has no length; iterate over "
                    "it to count its batches"
                )
            whole, rest = divmod(len(self.sampler), self._batch_size)  # type: ignore
            return whole + (rest > 0 and not self.drop_last)
        if self._length is None or (self._budgets and self._length[0] != epoch):
            self._length = epoch, self._order(epoch).batches()
        return self._length[1]

    def _running_epoch(self) -> int:
        place = self._place
        return self.epoch if place is None or place.done else place.epoch

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next iteration.

        Args:
            epoch: from 0; also given to the `set_epoch` of a sampler that has one.
        """
        self.epoch = _count("epoch", epoch, 0)
        for sampler in (self.sampler, self.batch_sampler):
            forward = getattr(sampler, "set_epoch", None)
            if forward is not None:
                forward(epoch)

    # ---- Resuming --------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position of the newest iteration, as numbers and strings."""
        epoch = self.epoch
        if self._place is not None and not self._place.done:
            epoch, position = self._place.epoch, self._place.position
        else:
            position = self._position_to_begin_at()
        seed = self.seed if self.shuffle else 0
        where = {"epoch": epoch, "position": position, "seed": seed}
        return {**where, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration continues after the last batch before `state_dict()`.

        A loader to which no `seed` was given takes the state's. Rank and world_size may
        differ: the rest of the epoch is divided among the ranks anew.

        Args:
            state: what `state_dict` returned.

        Raises:
            ValueError: the cache, or an argument that decides the order, differs.
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
        """The arguments that decide the order: a position depends on them."""
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

    def _batches(self, epoch: int, position: int) -> Iterator[Any]:
        """The batches of indices of an epoch from a position on."""
        if self._cache.schema is None:
            return iter(())
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
        source = iter(batches)
        for _ in islice(source, position):
            pass
        return source

    def _prepare(self) -> None:
        """Checks arguments and derives what iterations need; reads only the index."""
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
        """Sets the budgets, the sizes of graphs, and the most graphs in a batch."""
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
            self._order(0, seed=0)  # raises where ranks cannot share the graphs

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
                f"max_{name} must be at least the {name} of every graph, got {budget} "
                f"and graph {graph} with {sizes[graph]}; raise it, or pass "
                "oversize='alone'"
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
        if self.pad_to != "max":  # "max" has room for every batch
            self._choose = chooser(self._buckets, self._cache)

    def _assembler(self) -> Assemble:
        """The function from a GraphBatch to what the user gets."""
        on_torch = self.output == "pyg" or self.device is not None or self.pin_memory
        self._array_type = getattr(self.output, "array_type", None)
        if self.output == "dict":
            assemble = dict_assembler(self._plan)
        elif self.output == "pyg":
            assemble = adapters.load("pyg").assembler(self._plan)
        else:
            assert callable(self.output)
            assemble = self.output(self._plan)
        if on_torch:
            torch_side = adapters.load("torch")
            self._array_type = torch_side.Tensor
            move = torch_side.mover(self.device, self.pin_memory)
            if move is not None:
                return lambda batch: assemble(move(batch))
        return assemble

    def _selection(self, bucket: int) -> GraphSelection:
        """The selection for one of pad_to's shapes; made once."""
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
        state = self.state_dict()  # first: it may draw the seed, and copies share it
        kept = {k: v for k, v in self.__dict__.items() if k not in made}
        return {**kept, "_place": None, "_state": state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        position = state.pop("_state")
        self.__dict__.update(state)
        self._prepare()
        self.epoch = position["epoch"]
        self._resume = self.epoch, position["position"]


class Iteration(Ahead):
    """One epoch of a Loader. Its threads end when it ends or is dropped."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(None, max(loader.prefetch, 1) if loader.threads else 1)
        self._loader = loader
        self._begun = False

    def _begin(self) -> None:
        loader = self._loader
        loader._cache._check_open()
        if not self._begun:
            place = Place(loader.epoch, loader._position_to_begin_at())
            loader._resume = None
            loader._place = self._place = place
            loader.epoch = place.epoch + 1
            self._begun = True
        self._first = self._place.position
        self._source = loader._batches(self._place.epoch, self._first)

    def _plan(self, given: Any) -> tuple[GraphPrefetch, Any, int]:
        loader, order = self._loader, self._source
        if isinstance(order, GraphOrder):
            indices, position = given, order.position
        else:
            indices, position = as_indices(given), self._first + self._submitted + 1
            if loader._subset is not None:
                indices = of_subset(loader._subset, indices)
        bucket = 0 if loader._choose is None else loader._choose(indices)
        prefetch = self._prefetches.get(bucket)
        if prefetch is None:
            prefetch = GraphPrefetch(loader._selection(bucket), loader.threads)
            self._prefetches[bucket] = prefetch
        return prefetch, indices, position

    def _assemble(self, batch: GraphBatch) -> Any:
        assemble = self._loader._assemble
        assert assemble is not None  # the cache has graphs
        return assemble(batch)


def _count(name: str, value: Any, least: int, end: int = 2**63) -> int:
    try:
        number = operator.index(value)
    except TypeError:  # arrays of several elements have __index__, too
        number = least - 1
    if number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value}")
    if number >= end:
        raise ValueError(f"{name} must be below {end}, got {value}")
    return int(number)


def _process_group() -> tuple[int, int]:
    """Rank and world size of torch's default process group; (0, 1) without one."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


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
            raise ValueError(
                f"{name} cannot be combined with {argument}; pass one of them"
            )
