"""The times that independent processes measured, and their file."""

import json
import math
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
_KIND = "trainfast bench"

Processes = list[list[float]]  # seconds of the rounds of each process


@dataclass(frozen=True)
class Timing:
    """One case on one device.

    Attributes:
        nbytes, flops: what a call moves and computes; 0: has no meaning here.
        roles: "ours" or "rival" by contender.
        times: the seconds of a call by contender, each process, and round. A round of
            one contender is beside the same round of the others.
        skipped: why other contenders did not run.
    """

    name: str
    device: str
    title: str
    dtype: str
    nbytes: int
    flops: int
    roles: dict[str, str]
    times: dict[str, Processes]
    skipped: dict[str, str]

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.device

    def contenders(self, role: str) -> list[str]:
        return [name for name in self.times if self.roles[name] == role]

    def seconds(self, contender: str) -> float:
        """The median over processes of the median round."""
        return statistics.median(map(statistics.median, self.times[contender]))

    def check(self) -> None:
        """ValueError unless this can have been measured."""
        rounds = {tuple(map(len, processes)) for processes in self.times.values()}
        numbers = [t for ps in self.times.values() for p in ps for t in p]
        if not (
            len(rounds) == 1
            and numbers
            and all(min(each, default=0) > 0 for each in rounds)
            and all(type(t) is float and 0 < t < math.inf for t in numbers)
            and set(self.roles) >= set(self.times)
            and type(self.nbytes) is type(self.flops) is int
        ):
            raise ValueError(f"{self.name} has no times, or wrong ones")


@dataclass(frozen=True)
class Results:
    """What one run measured.

    Attributes:
        machine: "cpu", "cores", "backend" and "gpu" (None: no GPU was measured).
        versions: of packages by name.
        seconds: for each case and process.
        others_share: the share of the cores that other programs used meanwhile.
        roofs: TFLOP/s by dtype, and GB/s of a "copy" and an "update", by device.
        missing, failed: why a case did not run, by "case on device".
        left_out: how often a case in a process was left out because others disturbed.
    """

    machine: dict[str, Any]
    versions: dict[str, str | None]
    threads: int
    processes: int
    seconds: float
    others_share: float | None
    roofs: dict[str, dict[str, float]]
    timings: list[Timing]
    missing: dict[str, str]
    failed: dict[str, str]
    left_out: int

    def to_dict(self) -> dict[str, Any]:
        return {"kind": _KIND, "schema": SCHEMA, **asdict(self)}


def save(results: Results, path: str | os.PathLike[str]) -> None:
    """Writes the file whole or not at all."""
    path = Path(path)
    text = json.dumps(results.to_dict(), indent=1, allow_nan=False) + "\n"
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with new.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Results:
    """Reads what `save` wrote.

    Raises:
        ValueError: the file is another one, damaged, or of another schema.
        OSError: it cannot be read.
    """
    try:
        data = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({' '.join(str(error).split())})") from error
    if not isinstance(data, dict) or data.pop("kind", None) != _KIND:
        raise ValueError("was not written by trainfast bench --save")
    schema = data.pop("schema", None)
    if schema != SCHEMA:
        raise ValueError(
            f"has schema {schema!r}, but this version of trainfast reads {SCHEMA}; "
            "measure the base again"
        )
    try:
        timings = [Timing(**timing) for timing in data.pop("timings")]
        for timing in timings:
            timing.check()
        results = Results(timings=timings, **data)
        _check_facts(results)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"is damaged: {' '.join(str(error).split())}") from error
    return results


def _check_facts(results: Results) -> None:
    """ValueError unless a comparison finds here what it reads."""
    dicts = (results.machine, results.versions, *results.roofs.values())
    numbers = [rate for rates in results.roofs.values() for rate in rates.values()]
    if not all(isinstance(each, dict) for each in dicts):
        raise ValueError("machine, versions and roofs must be objects")
    if not all(type(number) is float and number > 0 for number in numbers):
        raise ValueError("rates must be positive numbers")
