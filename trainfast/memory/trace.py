"""The storages of a training step in the order in which they come and go."""

from dataclasses import dataclass, field

from trainfast.memory.allocator import Allocator, Block, OutOfMemory

FORWARD, BACKWARD, STEP, VALIDATION = MOMENTS = (
    *("forward", "backward", "optimizer step", "validation"),
)


@dataclass
class Trace:
    """Events are numbers of storages: positive where one comes, negative where it goes.

    Storages are numbered from 1; `sizes`, `kinds` and `modules` are by number, and
    `moments` holds (index of the first event, name of the moment).
    """

    events: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=lambda: [0])
    kinds: list[str] = field(default_factory=lambda: [""])
    modules: list[str] = field(default_factory=lambda: [""])
    moments: list[tuple[int, str]] = field(default_factory=list)

    def allocate(self, size: int, kind: str, module: str = "") -> int:
        self.sizes.append(size)
        self.kinds.append(kind)
        self.modules.append(module)
        self.events.append(len(self.sizes) - 1)
        return len(self.sizes) - 1

    def release(self, number: int) -> None:
        self.events.append(-number)

    def scratch(self, size: int, kind: str = "temporaries") -> None:
        """Memory that a kernel takes and gives back inside of one operation."""
        self.release(self.allocate(size, kind))

    def begin(self, moment: str) -> None:
        self.moments.append((len(self.events), moment))


@dataclass
class Replay:
    """What the events come to in an allocator.

    Attributes:
        allocated: most bytes in use at once, with the allocator's rounding.
        reserved: most bytes in segments at once.
        kinds: bytes in use by kind at the moment of the most.
        moments: most bytes in use by moment, in the order in which they began.
        activations: bytes by module at the fullest point of the forward pass.
        curve: (moment, bytes in use) after each event.
        failed: the moment at which the capacity did not suffice, None where it did;
            the figures are those up to there.
    """

    allocated: int = 0
    reserved: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    moments: dict[str, int] = field(default_factory=dict)
    activations: dict[str, int] = field(default_factory=dict)
    curve: list[tuple[str, int]] = field(default_factory=list)
    failed: str | None = None


class _Exact:
    """Counts bytes as they are requested, as on the CPU."""

    def __init__(self) -> None:
        self.allocated = 0

    def allocate(self, size: int) -> Block:
        self.allocated += size
        return Block(size, 0, 0, small=False)

    def release(self, block: Block) -> None:
        self.allocated -= block.size


def replay(
    trace: Trace,
    allocator: Allocator | None = None,
    workspaces: tuple[int, ...] = (),
) -> Replay:
    """Runs a trace through an allocator, or without one adds up what is in use.

    Args:
        trace: what comes and goes.
        allocator: a new one.
        workspaces: bytes of libraries' workspaces, which are taken first and stay.
    """
    memory, done = allocator or _Exact(), Replay()
    blocks: dict[int, Block] = {}
    now = dict.fromkeys([*trace.kinds, "activations"], 0)
    by_module = dict.fromkeys(trace.modules, 0)
    begins, moment, most_forward = dict(trace.moments), "", 0
    try:
        for size in workspaces:
            now["workspaces"] = now.get("workspaces", 0) + memory.allocate(size).size
        for i, event in enumerate(trace.events):
            moment = begins.get(i, moment)
            number = abs(event)
            kind, module = trace.kinds[number], trace.modules[number]
            if not trace.sizes[number]:
                continue
            if event > 0:
                blocks[number] = memory.allocate(trace.sizes[number])
                size = blocks[number].size
            else:
                block = blocks.pop(number)
                size = -block.size
                memory.release(block)
            now[kind] += size
            if kind == "activations":
                by_module[module] += size
            done.curve.append((moment, memory.allocated))
            peak = max(done.moments.get(moment, 0), memory.allocated)
            done.moments[moment] = peak
            if memory.allocated > done.allocated:
                done.allocated = memory.allocated
                done.kinds = {k: n for k, n in now.items() if n}
            if moment == FORWARD and now["activations"] > most_forward:
                most_forward = now["activations"]
                done.activations = {m: n for m, n in by_module.items() if n}
    except OutOfMemory:
        done.failed = moment or "start"
    done.reserved = allocator.most_reserved if allocator else done.allocated
    done.moments.pop("", None)
    return done
