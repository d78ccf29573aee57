"""What the gains mean: findings, best first, each with a place and a cure."""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from trainfast.probe.gains import WHOLE, Gain, Process, Result, Sample, interval

LEAST = 1.15  # of a gain that is worth a finding
LEAST_BOUND = 1.2  # of a bound, which no mending reaches
_SURE = 1.05  # the interval of a finding lies above
_MOST_SHARE = 0.9  # of a step, of a statement with its share of the backward pass
_LEAST_SLOPE = 1.5  # a doubled batch that costs less than this has a fixed cost

EXACT = True
BOUND = False
# Phases whose lines are the place of a switch, where its name is another.
_PHASES = {
    **dict.fromkeys(("workers", "worker-restart", "worker-start"), "data"),
    "needed": "backward",
}
_DATA = {("data", None)}

# By switch or event: the finding's id, whether its gain is exact or a bound, whether it
# changes what is trained, and its cure.
CURES: dict[str, tuple[str, bool, bool, str]] = {
    "data": ("data", BOUND, False, "make batches cheaper: see {dataset}"),
    "graph cache": (
        *("data", EXACT, False),
        "store the graphs: trainfast.torch.pyg.cached(dataset, path, transform=None), "
        "with trainfast.torch.pyg.DataLoader; random transforms stay outside",
    ),
    "worker-restart": (
        *("worker-restart", EXACT, False),
        "create the DataLoader once, with persistent_workers=True, and iterate it to "
        "its end",
    ),
    "worker-start": (
        *("worker-restart", BOUND, False),
        "keep the workers: DataLoader(persistent_workers=True)",
    ),
    "no optimizer step": (
        *("optimizer", BOUND, False),
        "take an optimizer of torch.optim with fused=True, or trainfast.AdamW; for a "
        "large embedding sparse=True with SparseAdam",
    ),
    "fused optimizer": (
        "optimizer", EXACT, False, "pass fused=True to the optimizer",
    ),
    "trainfast optimizer": (
        "optimizer", EXACT, False, "use trainfast.AdamW, or call trainfast.patch()",
    ),
    "needed gradients": (
        *("statement", EXACT, False),
        "a backward pass computes gradients that no step uses: detach() the input that "
        "comes from the other model, or call backward(inputs=...)",
    ),
    "padding": (
        "padding", EXACT, False, "pad each batch to its longest sequence only",
    ),
    "attention": (
        *("attention", EXACT, False),
        "pass need_weights=False to nn.MultiheadAttention",
    ),
    "anomaly": (
        "anomaly", EXACT, False, "switch torch.autograd.set_detect_anomaly off",
    ),
    "threads": ("threads", EXACT, False, "let torch use all cores"),
    "one thread": (
        *("threads", EXACT, False),
        "torch.set_num_threads(1); or set OMP_WAIT_POLICY=passive, if other programs "
        "or workers use the cores: torch's threads keep theirs while they wait",
    ),
    "deterministic": (
        *("deterministic", EXACT, True),
        "switch torch.use_deterministic_algorithms off",
    ),
    "dtype": ("dtype", EXACT, True, "train in float32 instead of float64"),
    "tf32": ("tf32", EXACT, True, 'torch.set_float32_matmul_precision("high")'),
    "cudnn benchmark": (
        "cudnn-benchmark", EXACT, False, "torch.backends.cudnn.benchmark = True",
    ),
    "channels-last": (
        *("channels-last", EXACT, False),
        "model.to(memory_format=torch.channels_last), and the same for images",
    ),
    "compile": ("compile", EXACT, False, "torch.compile(model){payback}"),
    "bfloat16": (
        "bfloat16", EXACT, True, "torch.autocast(..., dtype=torch.bfloat16)",
    ),
    "float16": (
        *("float16", EXACT, True),
        "torch.autocast(..., dtype=torch.float16) with trainfast.GradScaler",
    ),
    "batch": (
        *("batch", EXACT, True),
        "take larger batches: this is the gain of batches of twice the size",
    ),
    "optimizer": (
        *("optimizer", BOUND, False),
        "take an optimizer of torch.optim with fused=True, or trainfast.AdamW",
    ),
    "save": ("save", BOUND, False, "save less often, or only the best model's weights"),
    "evaluation": (
        "evaluation", BOUND, True, "evaluate less often, or on fewer batches",
    ),
    "logging": ("logging", BOUND, False, "log every N steps instead of each"),
}  # fmt: skip


@dataclass
class Finding:
    """A cause of slowness, and what mending it gives.

    Attributes:
        id: the kind of cause: "data", "optimizer", "save", ...
        file, line: where it is in the script, if known.
        gain, low, high: how many times as fast a step becomes, and the interval.
        exact: the change was tried as it would be made; otherwise the gain is a bound,
            because what was left out cannot be left out in training.
        changes_training: the cure changes what is computed; decide for yourself.
        fix: the cure, in a sentence.
        how: what the probe did.
    """

    id: str
    file: str | None
    line: int | None
    gain: float
    low: float
    high: float
    exact: bool
    changes_training: bool
    fix: str
    how: str

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        for name in ("gain", "low", "high"):
            found[name] = round(found[name], 3)
        return found


@dataclass
class Row:
    """A switch or event that was tried, whether it gained or not."""

    name: str
    gain: Gain
    label: str = ""  # for people


def rows(results: list[Result]) -> list[Row]:
    """What each switch and each kind of event gains, best first."""
    processes = [Process.of(result) for result in results]
    for process in processes:  # what those with stopwatches at statements have seen
        process.rest = {k: max(p.rest[k] for p in processes) for k in WHOLE}
    switches = {block[1] for result in results for block in result["blocks"]} - {"base"}
    events = {e[0] for r in results if r["blocks"] for e in r["events"]}
    found = []
    for name in sorted(switches):
        have = [p for p in processes if any(name in r for r in p.rounds)]
        gain = interval(have, lambda s, n=name: s.gain_of_switch(n))  # type: ignore
        found.append((name, gain))
    for kind in sorted(events - switches - _known_as_events(results)):
        have = [p for p in processes if kind in p.costs]
        gain = interval(have, lambda s, k=kind: s.gain_of_event(k))  # type: ignore
        found.append((kind, gain))
    kept = [
        Row(name, gain, label(name, results))
        for name, gain in found
        if gain is not None
    ]
    return sorted(kept, key=lambda row: -row.gain.gain)


def label(name: str, results: list[Result]) -> str:
    """What a report calls a switch or an event: for a statement, its line."""
    for result in results:
        for known in result.get("statements", ()):
            if name == f"statement {known['number']}":
                return f"without line {known['line']}: {known['text'][:40]}"
    return name


def _known_as_events(results: list[Result]) -> set[str]:
    """Statements that save or evaluate: these rows stand for them."""
    statements = [s for r in results for s in r.get("statements", ())]
    return {f"statement {s['number']}" for s in statements if s["kind"] in WHOLE}


def findings(rows: list[Row], results: list[Result], script: str) -> list[Finding]:
    """The rows that are worth a finding: one for each cause, best first."""
    gains = {row.name: row.gain for row in rows}
    made: list[Finding] = []
    for row in rows:
        finding = _finding(row, results, script)
        bound = gains.get("no optimizer step")
        if finding.id == "optimizer" and finding.exact and bound is not None:
            finding.gain = min(
                finding.gain, bound.gain
            )  # what a step takes, and no more
            finding.high = max(finding.gain, min(finding.high, bound.high))
        least = LEAST if finding.exact else LEAST_BOUND
        if finding.gain < least or not _is_sure(finding):
            continue
        if row.name == "batch" and (slope(results) or 2.0) > _LEAST_SLOPE:
            continue  # most of a step grows with the batch
        if row.name == "no optimizer step" and not _has_a_cure(results):
            continue
        if row.name.startswith("statement ") and not _was_skipped(row, results):
            _add_backward(finding, _statement(row.name, results).get("backward", 0.0))
        made.append(finding)
    return _one_a_cause(made)


def idle_gpus(results: list[Result], script: str) -> list[Finding]:
    """GPUs that a second process could train on."""
    idle = results[0].get("idle_gpus", 0)
    if not idle:
        return []
    gain = 1.0 + idle
    fix = (
        f"{idle} more GPUs are here and idle: wrap the model in "
        "DistributedDataParallel and start the script with torchrun --nproc-per-node "
        f"{1 + idle}"
    )
    how = "counted, not tried"
    return [Finding("idle-gpu", script, None, gain, 1.0, gain, BOUND, True, fix, how)]


def slow_rank(results: list[Result], script: str) -> list[Finding]:
    """The rank that the others wait for, if a balanced load gained enough."""
    worst, gains = set(), []
    for result in results:
        own = result.get("ranks", [])
        step = result["whole_seconds"] if own else 0
        if not step:
            return []
        rank = max(range(len(own)), key=own.__getitem__)
        others = statistics.median(own[:rank] + own[rank + 1 :])
        worst.add(rank)
        gains.append(step / (step - min(own[rank] - others, 0.9 * step)))
    if len(worst) > 1 or min(gains) < LEAST_BOUND:
        return []
    (rank,) = worst
    fix = (
        f"rank {rank} reaches its backward pass last, and the others wait for it: give "
        "it the same batches, data and device as them"
    )
    gain = statistics.mean(gains)
    bounds = min(gains), max(gains)
    how = "its time from a step's start to the backward pass, against the others'"
    return [Finding("slow-rank", script, None, gain, *bounds, BOUND, False, fix, how)]


def _is_sure(finding: Finding) -> bool:
    """Whether the interval is above 1 by a part of the gain: noise makes both large."""
    return finding.low >= 1 + max(_SURE - 1, min(0.3, 0.25 * (finding.gain - 1)))


def _has_a_cure(results: list[Result]) -> bool:
    """Whether an optimizer's cost comes from how it is used."""
    first = results[0]
    return first.get("own_optimizer", False) or first["dense_embeddings"] > 0.5


def _finding(row: Row, results: list[Result], script: str) -> Finding:
    g = row.gain
    how, exact, changes = row.name, BOUND, False
    lines: list[int] = []
    if row.name.startswith("workers "):
        number = row.name.split()[1]
        name, exact = "workers", EXACT
        fix = f"DataLoader(num_workers={number}, persistent_workers={number != '0'})"
    elif row.name.startswith("statement "):
        known = _statement(row.name, results)
        name, lines = known["kind"], [known["line"]]
        how = f"without `{known['text']}`"
        fix = f"make this statement cheaper, or run it less often: {known['text']}"
        if name in CURES:
            _, _, changes, fix = CURES[name]
    else:
        name, exact, changes, fix = CURES[row.name]
    phase = _PHASES.get(row.name.split()[0], name)
    lines = lines or _lines(phase, results)
    file, line = script, lines[0] if lines else None
    dataset: dict[str, Any] = next(
        (r["dataset"] for r in results if "dataset" in r), {}
    )
    if name == "data" and "file" in dataset and "site-packages" not in dataset["file"]:
        file, line = dataset["file"], dataset["line"]
    elif phase == "data":  # in whatever file the loader is built
        loader = next((r["loader"] for r in results if "loader" in r), None)
        file, line = loader.values() if loader else (file, line)
    payback = _payback(row.gain, results) if row.name == "compile" else ""
    fix = fix.format(dataset=dataset.get("name", "the data set"), payback=payback)
    return Finding(name, file, line, g.gain, g.low, g.high, exact, changes, fix, how)


def _was_skipped(row: Row, results: list[Result]) -> bool:
    """Whether blocks left the statement out, and with it all that follows from it."""
    return any(block[1] == row.name for result in results for block in result["blocks"])


def _add_backward(finding: Finding, backward: float) -> None:
    """Adds a statement's share of the backward pass to its bound.

    Args:
        backward: seconds of that share over seconds of the statement.
    """
    for name in ("gain", "low", "high"):
        gain = getattr(finding, name)
        share = (1 - 1 / gain) * (1 + backward)
        setattr(finding, name, max(gain, 1 / (1 - min(_MOST_SHARE, share))))


def _payback(gain: Gain, results: list[Result]) -> str:
    """After how many steps the compiler's time has been gained."""
    seconds, step = next(
        (r["once"]["compile"], r["step_seconds"])
        for r in results
        if "compile" in r["once"]
    )
    steps = seconds / (step * (1 - 1 / gain.gain)) if gain.gain > 1 else 0
    return f": it compiles for {seconds:.0f} s, which {steps:.0f} steps pay back"


def _lines(phase: str, results: list[Result]) -> list[int]:
    return next((r["lines"][phase] for r in results if r["lines"].get(phase)), [])


def _statement(name: str, results: list[Result]) -> dict[str, Any]:
    """The last process knows best: it has timed the statement longest."""
    number = int(name.split()[1])
    timed = [r["statements"] for r in results if r.get("statements")]
    return next(s for s in reversed(timed[0]) if s["number"] == number)


def _one_a_cause(found: list[Finding]) -> list[Finding]:
    """Keeps one finding of each cause; statements are causes by themselves."""
    kept: dict[Any, Finding] = {}
    for finding in found:
        key = (finding.id, finding.line if finding.id == "statement" else None)
        if key not in kept or _says_more(finding, kept[key]):
            kept[key] = finding
    cures = [kept[k] for k in kept if k[0] in ("workers", "worker-restart")]
    if any(
        _is_most(cure, kept[bound]) for bound in _DATA & kept.keys() for cure in cures
    ):
        del kept[
            "data", None
        ]  # how batches are loaded is the cause, not what they cost
    return sorted(kept.values(), key=lambda f: -f.gain)


def _is_most(cure: Finding, bound: Finding) -> bool:
    return cure.exact and cure.gain - 1 > 0.45 * (bound.gain - 1)


def _says_more(finding: Finding, known: Finding) -> bool:
    """A place beats none; a cure beats a bound of which it gives most."""
    if known.line is None and finding.line is not None:
        return True
    return not known.exact and _is_most(finding, known)


def slope(results: list[Result]) -> float | None:
    """Forward and backward of a doubled batch, over those of a single one."""
    sample = Sample([Process.of(result, column=3) for result in results], None)
    with_loader = sample.ratio("batch", "data")
    return sample.ratio("batch") if with_loader is None else with_loader
