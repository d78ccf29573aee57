"""`MemoryMonitor`: which tensors the objects of a run hold."""

import weakref
from dataclasses import dataclass, field
from typing import Any

from trainfast.report import Report, Table, one_line
from trainfast.torch.leaks.reach import cycles, reach

MIB = 1 << 20


@dataclass(repr=False)
class MemoryStats(Report):
    """What `MemoryMonitor.stats` has found.

    Attributes:
        sizes: bytes by name, then by (device, dtype); memory that several names reach
            counts for the first.
        shared: bytes of each name that an earlier name already counts.
        cycles: by name, reference cycles that hold tensors, as "path is path".
        gone: names of objects that no longer exist.
    """

    sizes: dict[str, dict[tuple[str, str], int]] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    cycles: dict[str, list[str]] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Bytes of all names."""
        return sum(sum(sizes.values()) for sizes in self.sizes.values())

    def to_dict(self) -> dict[str, Any]:
        sizes = {
            name: [{"device": d, "dtype": t, "bytes": n} for (d, t), n in each.items()]
            for name, each in self.sizes.items()
        }
        return {**vars(self), "sizes": sizes, "total": self.total}

    def tables(self) -> list[Table]:
        rows: list[tuple[Any, ...]] = []
        for name, sizes in self.sizes.items():
            for (device, dtype), size in sizes.items():
                rows.append((name, device, dtype, round(size / MIB, 2)))
            if self.shared[name]:
                shared = round(self.shared[name] / MIB, 2)
                rows.append((name, "", "counted above", shared))
        rows += [(name, "", "no longer exists", None) for name in self.gone]
        title = f"Memory of tensors and arrays: {self.total / MIB:.1f} MiB"
        tables = [Table(title, ("what", "device", "dtype", "MiB"), rows)]
        loops = [(name, loop) for name, each in self.cycles.items() for loop in each]
        if loops:
            title = "Reference cycles: freed by the garbage collector only"
            tables.append(Table(title, ("what", "cycle"), loops))
        return tables


class MemoryMonitor:
    """Tells which tensors and NumPy arrays objects hold, and through which cycles.

        monitor = trainfast.MemoryMonitor()
        monitor.add(model, "model").add(optimizer, "optimizer")
        print(monitor.stats())

    Objects are referenced weakly. Lists, dicts and other built-in containers, which
    allow no weak reference, are held until `remove`.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, bool]] = {}

    def __repr__(self) -> str:
        return one_line(self, names=list(getattr(self, "_known", ())))

    def add(
        self, obj: Any, name: str | None = None, track_attributes: bool = True
    ) -> "MemoryMonitor":
        """Adds an object.

        Args:
            obj: the object.
            name: in the statistics; None: the name of its class.
            track_attributes: follow attributes; False: items of containers only.

        Raises:
            ValueError: the name is taken.
        """
        name = type(obj).__name__ if name is None else name
        if name in self._known:
            raise ValueError(f"`name` must be new, got {name!r}; remove() it first")
        try:
            hold: Any = weakref.ref(obj)
        except TypeError:

            def hold(obj: Any = obj) -> Any:
                return obj

        self._known[name] = hold, track_attributes
        return self

    def remove(self, name: str) -> None:
        """Forgets an object.

        Args:
            name: in the statistics.

        Raises:
            KeyError: no object has this name.
        """
        del self._known[name]

    def stats(self) -> MemoryStats:
        """Walks the objects now. Reads sizes only: nothing waits for a GPU."""
        found = MemoryStats()
        counted: set[int] = set()
        for name, (hold, attributes) in self._known.items():
            obj = hold()
            if obj is None:
                found.gone.append(name)
                continue
            seen = reach(obj, attributes)
            sizes: dict[tuple[str, str], int] = {}
            found.shared[name] = 0
            for key, buffer in seen.buffers().items():
                if key in counted:
                    found.shared[name] += buffer.size
                    continue
                counted.add(key)
                kind = buffer.device, buffer.dtype
                sizes[kind] = sizes.get(kind, 0) + buffer.size
            found.sizes[name] = sizes
            loops = cycles(seen)
            if loops:
                found.cycles[name] = loops
        return found

    def _repr_html_(self) -> str:
        return self.stats()._repr_html_()
