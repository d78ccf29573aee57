"""Runs the probe's child once a rank, as torchrun does, and collects the results.

    python -m trainfast.torch.probe.ranks

All ranks must change a switch at the same optimizer step: a collective of one that the
others do not enter would hang. So rank 0 makes the plan and names the step at which it
begins, two steps ahead. No rank can be there before it has read the plan, because each
step needs a collective with rank 0.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainfast.torch.probe.loop import Loop, Switch
from trainfast.torch.probe.schedule import LEAST_ROUNDS, Schedule

_AHEAD = 2  # steps from rank 0's decision to its effect
_PATIENCE = 60.0  # seconds that a rank waits for the plan, or for the others to end


class RankSchedule(Schedule):
    """The plan of rank 0, in the same steps on every rank."""

    def __init__(
        self,
        loop: Loop,
        offered: Sequence[Switch],
        rounds: int,
        seconds: float,
        seed: int,
        warmed_up: Callable[[], None],
        done: Callable[[], None],
    ) -> None:
        super().__init__(loop, offered, rounds, seconds, seed, warmed_up, done)
        self.file = Path(os.environ["TRAINFAST_PROBE_PLAN"])
        self.is_first = os.environ["RANK"] == "0"
        self.begins: int | None = None  # the step of the first block
        self.may_wait = False  # all ranks begin and end a block at one step

    def step_ended(self) -> None:
        if self.plan is not None and self.warm:
            self._advance()
            return
        if self.is_first and self.begins is None:
            self._warm_up()
            if self.warm:
                self._make_plan()
                self._publish()
        elif self.begins is None and self.file.exists():
            self._read()
        if self.begins is not None:
            self.warm = self.loop.steps >= self.begins
            if self.warm:
                self._enter()

    def _publish(self) -> None:
        """Fixes how many rounds fit into the time, and tells the other ranks."""
        assert self.plan is not None
        first = [switch for number, switch in self.plan if number == 0]
        steps = sum(self.steps + switch.warm for switch in first)
        fit = int(self.seconds / max(1e-9, steps * self.step_seconds))
        self.plan = self.plan[: len(first) * max(LEAST_ROUNDS, fit)]
        self.begins = self.loop.steps + _AHEAD
        plan = [(number, switch.name) for number, switch in self.plan]
        text = json.dumps({"begins": self.begins, "steps": self.steps, "plan": plan})
        part = self.file.with_suffix(".part")
        part.write_text(text)
        part.rename(self.file)

    def _read(self) -> None:
        found = json.loads(self.file.read_text())
        self.begins, self.steps = found["begins"], found["steps"]
        switches = {"base": self.base}
        for switch in self.offered:
            switch.possible(self.loop, lambda phase: 1.0)  # some prepare here
            switches[switch.name] = switch
        self.plan = [(number, switches[name]) for number, name in found["plan"]]

    def failed_under(self, error: str) -> bool:
        return False  # the other ranks are still under the switch

    def _is_over(self) -> bool:
        return False  # the plan fits into the time

    def _is_short(self, elapsed: float, steps: int) -> bool:
        return False  # as for `may_wait`


def run_ranks(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Runs all ranks to their end; returns rank 0's result with "ranks", the median
    seconds of each rank from a step's start to its backward pass."""
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(job["ranks"]),
        "LOCAL_WORLD_SIZE": str(job["ranks"]),
        "GLOO_SOCKET_IFNAME": "lo",  # the sandbox has no other
        "TRAINFAST_PROBE_PLAN": str(folder / "plan"),
    }
    environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    paths = [folder / f"rank{rank}" for rank in range(job["ranks"])]
    processes = []
    for rank, path in enumerate(paths):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-m", "trainfast.torch.probe.child"]
        with path.open("wb") as file:
            own["TRAINFAST_PROBE_JOB"] = json.dumps({**job, "result": file.fileno()})
            processes.append(
                subprocess.Popen(
                    command, env=environment | own, pass_fds=[file.fileno()]
                )
            )
    _wait(processes)
    found = [_content(path) for path in paths]
    error = _error(processes, found)
    if error:
        return {"error": error}
    return {**found[0], "ranks": [result["own_seconds"] for result in found]}


def _error(
    processes: list[subprocess.Popen[bytes]], found: list[dict[str, Any]]
) -> str | None:
    """What ended the training: the other ranks fail because of the first that did."""
    mute = [rank for rank, result in enumerate(found) if not result]
    died = [rank for rank in mute if processes[rank].returncode != -signal.SIGKILL]
    wrong = [rank for rank, result in enumerate(found) if result.get("error")]
    if died or (mute and not wrong):
        return f"rank {(died or mute)[0]} ended without a word"
    if wrong:
        first = min(wrong, key=lambda rank: found[rank]["ended"])
        return f"rank {first}: {found[first]['error']}"
    return None


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Until all have ended; those that wait for one that has ended are killed."""
    while all(process.poll() is None for process in processes):
        time.sleep(0.02)
    late = time.monotonic() + _PATIENCE
    failed = any(process.returncode for process in processes)
    while any(process.poll() is None for process in processes):
        if failed or time.monotonic() > late:
            for process in processes:
                process.kill()
        time.sleep(0.02)
        failed = any(process.returncode for process in processes)


def _content(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(data) if data else {}
    return found


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


def main() -> None:
    job = json.loads(os.environ.pop("TRAINFAST_PROBE_JOB"))
    with tempfile.TemporaryDirectory() as folder:
        result = run_ranks(job, Path(folder))
    os.pwrite(job["result"], json.dumps(result).encode(), 0)


if __name__ == "__main__":
    main()
