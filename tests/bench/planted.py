"""Results of `trainfast bench` with planted times."""

import math
import random

from trainfast.bench.results import Results, Timing


def processes(seconds, *, n=5, between=0.01, within=0.02, rng):
    """Rounds that differ by `within`, in processes that differ by `between`."""
    return [
        [seconds * math.exp(shift + abs(rng.gauss(0, within))) for _ in range(15)]
        for shift in (rng.gauss(0, between) for _ in range(n))
    ]


def timing(name="adamw-large", ours=1e-3, rival=2e-3, device="cpu", **more):
    times = {"trainfast": ours, "torch fused": rival}
    return Timing(
        name,
        device,
        title="a case",
        dtype="float32",
        nbytes=more.pop("nbytes", 8_000_000),
        flops=more.pop("flops", 0),
        roles={"trainfast": "ours", "torch fused": "rival"},
        times={who: processes(each, **more) for who, each in times.items()},
        skipped={},
    )


def results(*timings, roofs=None, **more):
    facts = {
        "machine": {"cpu": "Fast CPU", "cores": 2, "backend": "avx2", "gpu": None},
        "versions": {"trainfast": "0.1", "torch": "2.13.0"},
        "threads": 2,
        "processes": 5,
        "seconds": 0.5,
        "others_share": 0.0,
        "missing": {},
        "failed": {},
        "left_out": 0,
    }
    roofs = roofs or {"cpu": {"float32": 0.2, "copy": 16.0, "update": 20.0}}
    return Results(roofs=roofs, timings=list(timings), **(facts | more))


def seeded(seed=0):
    return random.Random(seed)
