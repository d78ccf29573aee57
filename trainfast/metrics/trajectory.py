"""ADE, FDE and other errors of predicted trajectories, in one pass."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainfast import _core
from trainfast.numpy.arrays import (
    Array,
    as_array,
    beside,
    current_stream,
    empty,
    is_on_cpu,
    to_numpy,
)
from trainfast.report import Report, Table
from trainfast.stats import count_call, count_fallback

# In the order of the core's columns (csrc/tfast.h).
METRICS = (
    *("ade", "fde", "min_ade", "min_fde", "miss_rate"),
    *("brier_min_ade", "brier_min_fde"),
)
_TITLES = {
    "ade": "ADE",
    "fde": "FDE",
    "min_ade": "minADE",
    "min_fde": "minFDE",
    "miss_rate": "miss rate",
    "brier_min_ade": "brier-minADE",
    "brier_min_fde": "brier-minFDE",
}


@dataclass(frozen=True, repr=False)
class TrajectoryResult(Report):
    """What `trajectory_metrics` measured.

    Attributes:
        ade: mean distance over the steps that count, of the most probable mode.
        fde: distance at the final step, of the most probable mode.
        min_ade: least ADE over the modes; "av2": ADE of the mode with the least FDE.
        min_fde: least FDE over the modes.
        miss_rate: share of agents that were missed.
        brier_min_ade: min_ade + (1 - p)^2 of its mode; None without probabilities.
        brier_min_fde: min_fde + (1 - p)^2 of its mode; None without probabilities.
        agents: how many agents have a step that counts.
        mode_note: which mode ADE and FDE are of.
        definition: "seed", "av2" or "nuscenes".

    With reduce="none" the metrics are float64 arrays with an entry for each agent, NaN
    where an agent lacks the metric.
    """

    ade: Any
    fde: Any
    min_ade: Any
    min_fde: Any
    miss_rate: Any
    brier_min_ade: Any
    brier_min_fde: Any
    agents: int
    mode_note: str
    definition: str

    def tables(self) -> list[Table]:
        """One row for each metric; of metrics per agent, their mean."""
        rows: list[tuple[Any, ...]] = []
        for name, value in self.to_dict().items():
            if name not in METRICS or value is None:
                continue
            shown = value if isinstance(value, float) else _mean(value)
            rows.append((_TITLES[name], shown))
        title = (
            f"Trajectories of {self.agents:,} agents, definition {self.definition} "
            f"({self.mode_note})"
        )
        return [Table(title, ("metric", "value"), rows)]

    def to_dict(self) -> dict[str, Any]:
        """The attributes; metrics per agent as lists."""
        found = dict(vars(self))
        for name in METRICS:
            if hasattr(found[name], "tolist"):
                found[name] = found[name].tolist()
        return found


def _mean(values: list[float]) -> float:
    counted = [value for value in values if not math.isnan(value)]
    return math.fsum(counted) / len(counted) if counted else math.nan


def trajectory_metrics(
    pred: Array,
    target: Array,
    *,
    mask: Array | None = None,
    probabilities: Array | None = None,
    definition: str = "seed",
    miss_threshold: float = 2.0,
    final: str = "last",
    top_k: int | None = None,
    reduce: str = "mean",
) -> TrajectoryResult:
    """ADE, FDE, minADE, minFDE, miss rate and brier scores, in one pass.

    ADE and FDE are those of the most probable mode, the first of equal ones; without
    probabilities of mode 0. The definitions differ in two metrics:

    ============ ============================== ====================================
    definition   min_ade                        an agent is missed if
    ============ ============================== ====================================
    "seed"       least ADE                      FDE > threshold
    "av2"        ADE of the mode of least FDE   min_fde > threshold
    "nuscenes"   least ADE                      in every mode the largest distance
                                                of a step is >= threshold
    ============ ============================== ====================================

    NaN in a step that counts makes all metrics of the agent, and so the mean, NaN; in
    other steps it has no effect. Distances are computed in float32, or float64 if pred
    or target is float64: their relative error is below 2.4e-7, or 5e-16. They are added
    in float64, with the same bits for any number of threads, instruction set and GPU.

    Args:
        pred: [agents, modes, steps, D] or, of one mode, [agents, steps, D]; D is 2 or
            3. float32, float64, float16 or bfloat16, with any strides.
        target: [agents, steps, D] of any of these dtypes.
        mask: bool [agents, steps]: True: the step counts. An agent without such a step
            leaves the means.
        probabilities: [agents, modes], in [0, 1] (not logits); NaN makes the agent NaN,
            and so does one outside of [0, 1] on a GPU, where no value is checked.
        definition: "seed", "av2" or "nuscenes".
        miss_threshold: in the unit of the coordinates.
        final: what FDE is measured at. "last": the last step that counts; "strict": the
            last step, and an agent for which it does not count leaves FDE's means.
        top_k: min_ and the miss rate look at this many most probable modes; None: all.
        reduce: "mean" over agents, or "none": arrays with an entry for each agent.

    Returns:
        The metrics; printing them gives a table.

    Raises:
        ValueError: shapes that do not fit together, probabilities outside of [0, 1], an
            unknown option.
        NotImplementedError: arrays of another dtype, or of a library other than torch
            on a GPU without a kernel.
    """
    if reduce not in ("mean", "none"):
        raise ValueError(f"reduce must be 'mean' or 'none', got {reduce!r}")
    pred = _input("pred", pred)
    totals, agents = measure(
        pred,
        target,
        mask=mask,
        probabilities=probabilities,
        per_agent=reduce == "none",
        definition=definition,
        miss_threshold=miss_threshold,
        final=final,
        top_k=top_k,
    )
    totals = to_numpy(totals)
    note = mode_note(pred, probabilities)
    has_brier = probabilities is not None
    if agents is None:
        return make_result(totals, note, definition, has_brier)
    columns: dict[str, Any] = dict.fromkeys(METRICS)
    for m, name in enumerate(METRICS if has_brier else METRICS[:5]):
        columns[name] = agents[:, m]
    return TrajectoryResult(
        **columns, agents=int(totals[1, 0]), mode_note=note, definition=definition
    )


def measure(
    pred: Array,
    target: Array,
    *,
    mask: Array | None = None,
    probabilities: Array | None = None,
    per_agent: bool = False,
    final: str = "last",
    top_k: int | None = None,
    **options: Any,
) -> tuple[Array, Array | None]:
    """The core's totals, which are sums over agents and then how many agents each sum
    has, and if asked for [agents, metrics]. They are where the kernel ran, totals of
    the CPU as NumPy's.

    Tensors on a GPU that has no kernel are measured on the CPU, which `stats()` counts.
    """
    if final not in ("last", "strict"):
        raise ValueError(f"final must be 'last' or 'strict', got {final!r}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1 or None, got {top_k}")
    options |= {"strict_final": final == "strict", "top_k": top_k}
    given = {"pred": pred, "target": target, "mask": mask}
    given["probabilities"] = probabilities
    inputs = {
        name: beside(pred, _input(name, array))
        for name, array in given.items()
        if array is not None
    }
    try:
        return _run(inputs, per_agent, options)
    except NotImplementedError as error:
        if is_on_cpu(inputs["pred"]) or not hasattr(pred, "cpu"):
            raise
        reason = f"measured on the CPU: {error}"
    inputs = {
        name: array.cpu() if hasattr(array, "cpu") else array
        for name, array in inputs.items()
    }
    totals, agents = _run(inputs, per_agent, options)
    count_fallback("trajectory", reason)
    return totals, None if agents is None else agents.to(pred.device)


def _run(
    inputs: dict[str, Array], per_agent: bool, options: dict[str, Any]
) -> tuple[Array, Array | None]:
    pred = inputs["pred"]
    shape = 2, len(METRICS)
    on_cpu = is_on_cpu(pred)
    totals = np.empty(shape) if on_cpu else empty(pred, shape, "float64")
    rows = pred.shape[0] if len(pred.shape) else 0
    agents = empty(pred, (rows, len(METRICS)), "float64") if per_agent else None
    _core.trajectory(
        totals=totals,
        agents=agents,
        scratch=lambda n: empty(pred, (n,), "float32"),
        stream=current_stream(pred),
        **inputs,
        **options,
    )
    count_call("trajectory", _core.backend_in_use() if on_cpu else "cuda")
    return totals, agents


def make_result(
    totals: np.ndarray, note: str, definition: str, has_brier: bool
) -> TrajectoryResult:
    """The means of the core's totals; NaN where no agent has the metric."""
    sums, counts = totals.tolist()
    means: dict[str, Any] = dict.fromkeys(METRICS)
    for name, total, count in zip(METRICS, sums, counts, strict=True):
        if has_brier or not name.startswith("brier"):
            means[name] = total / count if count else math.nan
    return TrajectoryResult(
        **means, agents=int(counts[0]), mode_note=note, definition=definition
    )


def mode_note(pred: Array, probabilities: Array | None) -> str:
    """Which mode ADE and FDE are of."""
    if len(pred.shape) == 3 or pred.shape[1] == 1:
        return "one mode"
    if probabilities is None:
        return "ADE and FDE of mode 0: no probabilities"
    return "ADE and FDE of the most probable mode"


def _input(name: str, array: Array) -> Array:
    """The array without its gradient."""
    array = as_array(name, array)
    return array.detach() if getattr(array, "requires_grad", False) else array
