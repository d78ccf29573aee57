"""Monitors: what they see of GPUs, this machine and processes, and what they cost."""

import csv
import gc
import io
import json
import os
import subprocess
import sys
import threading
import time

import pytest

psutil = pytest.importorskip("psutil")

import trainfast  # noqa: E402
from tests.fake_nvml import HOT, LAPTOP, T4, nvml  # noqa: E402, F401
from trainfast.cli import main  # noqa: E402
from trainfast.monitor import formats, live, verdicts  # noqa: E402
from trainfast.monitor.eye import Eye  # noqa: E402
from trainfast.monitor.nvml import Nvml  # noqa: E402

MIB = 1 << 20


def test_answers_of_the_driver(nvml):  # noqa: F811
    nvml(T4, LAPTOP)
    t4, laptop = Nvml().gpus()
    assert (t4.index, t4.name, t4.utilization) == (0, "Tesla T4", 97)
    assert (t4.power, t4.power_limit, t4.clock, t4.clock_max) == (69.87, 70, 885, 1590)
    assert t4.throttled == ("power limit",) and t4.processes == {77: 13 << 30}
    assert (laptop.power, laptop.throttled, laptop.processes) == (None, (), {5: 0})
    assert laptop.memory_used == 300 * MIB and laptop.pcie_width_max == 8


def test_lost_gpu_does_not_hide_the_others(nvml):  # noqa: F811
    fake = nvml(T4, None, LAPTOP)
    assert [gpu.index for gpu in Nvml().gpus()] == [0, 2] and fake.opened == 1


def test_closed_library_is_opened_again(nvml):  # noqa: F811
    fake = nvml(T4)
    watched = Nvml()
    assert len(watched.gpus()) == 1
    fake.closed = True
    assert watched.gpus() == () and fake.opened == 2
    assert len(watched.gpus()) == 1


def test_no_package_and_no_driver_are_told(nvml, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Nvml().missing == "no GPU is watched: pip install nvidia-ml-py"
    fake = nvml()

    def fails():
        raise fake.NVMLError("Driver Not Loaded")

    fake.nvmlInit = fails
    assert Nvml().missing == "no GPU is watched: Driver Not Loaded"
    assert Nvml().gpus() == ()


def test_verdicts(nvml):  # noqa: F811
    nvml(T4, LAPTOP, HOT)
    t4, laptop, hot = Nvml().gpus()
    assert verdicts.utilization(t4) == ("green", "busy")
    assert verdicts.utilization(laptop) == ("red", "waits")
    assert verdicts.memory(t4) == ("green", "")
    assert verdicts.memory(laptop) == ("yellow", "room for a larger batch")
    assert verdicts.temperature(t4)[0] == "green"
    assert verdicts.temperature(hot) == ("red", "too hot")
    assert hot.throttled == ("too hot", "too hot (hardware)")
    assert verdicts.link(laptop)[1].startswith("4 of 8 lanes")
    assert verdicts.link(t4) == ("", "")


def test_formats(nvml):  # noqa: F811
    nvml(T4, LAPTOP)
    sample = Eye(os.getpid()).look()
    one, two = csv.DictReader([formats.header(), *formats.csv_lines(sample)])
    assert one["utilization.gpu [%]"] == "97" and one["memory.used [MiB]"] == "13312"
    assert int(one["memory.free [MiB]"]) == 1797
    assert two["power.draw [W]"] == "[N/A]" and two["index"] == "1"
    assert int(one["process.memory [MiB]"]) > 5
    decoded = json.loads(formats.json_line(sample))
    assert decoded["gpus"][1]["temperature"] == 51
    line = formats.text_line(sample)
    assert "gpu0 97% 13.0/14.8 GiB 76 C (power limit)" in line and "cpu " in line


def test_table_in_a_terminal(nvml):  # noqa: F811
    console = pytest.importorskip("rich.console")
    nvml(T4, HOT)
    sample = Eye(os.getpid()).look()
    out = console.Console(width=100, file=io.StringIO(), record=True)
    out.print(live.table(sample, "a note"))
    text = out.export_text()
    for words in (
        "Tesla T4",
        "97%",
        "busy",
        "power limit",
        "too hot",
        "3 x16",
        "a note",
    ):
        assert words in text
    assert "/dev/shm" in text and f"Process {os.getpid()}" in text


def test_children_are_counted_and_shared_pages_once():
    words = (
        "import time, sys; x = bytearray(64 << 20); print(flush=True); time.sleep(60)"
    )
    eye = Eye(os.getpid())
    before = eye.look().tree
    child = subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        tree = eye.look().tree
        assert tree.processes == before.processes + 1
        grown = (tree.memory - before.memory) / MIB
        assert 60 < grown < 90
    finally:
        child.kill()
        child.wait()
    assert eye.look().tree.processes == before.processes


def test_statistics():
    with trainfast.SystemMonitor(0.05) as monitor:
        time.sleep(0.5)
        assert monitor.is_running() and "running=True" in repr(monitor)
    stats = monitor.get_stats()
    assert 3 <= stats.samples <= 14 and stats.seconds == pytest.approx(0.5, abs=0.3)
    memory = stats["process.memory"]
    assert 0 < memory.min <= memory.mean <= memory.max and memory.last > 5 * MIB
    assert stats["host.cores"].mean == len(os.sched_getaffinity(0))
    assert monitor.get_stats(0.1).samples < stats.samples
    assert "process.memory MiB" in str(stats) and "<table" in monitor._repr_html_()
    assert json.loads(stats.to_json())["values"]["host.cpu"]["max"] <= 100
    assert not monitor.is_running()
    assert monitor.start().stop().get_stats().samples > stats.samples


def test_plot(nvml, tmp_path):  # noqa: F811
    nvml(T4)
    monitor = trainfast.SystemMonitor(0.05)
    with pytest.raises(ValueError, match="nothing to plot; call start"):
        monitor.plot(tmp_path / "run.svg")
    monitor.start().stop().plot(tmp_path / "run.svg")
    text = (tmp_path / "run.svg").read_text()
    for name in ("host.cpu", "process.memory", "gpu0.use", "gpu0.memory_used"):
        assert f"<!-- {name} -->" in text


def seconds_of_a_look():
    monitor = trainfast.SystemMonitor(0.05).start()
    time.sleep(2)
    looks = len(monitor.samples())
    monitor.stop()
    assert looks > 15
    return monitor.thread_seconds / looks


def test_thread_takes_little_of_a_run():
    # 0.5 % at one look a second, in one of three runs: other programs slow some down.
    assert any(seconds_of_a_look() < 0.005 for _ in range(3))


def test_thread_ends_with_the_monitor():
    monitor = trainfast.SystemMonitor(0.05).start()
    thread = monitor._thread
    del monitor
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_forked_child_has_a_stopped_monitor():
    monitor = trainfast.SystemMonitor(0.05).start()
    child = os.fork()
    if not child:
        fine = not monitor.is_running() and monitor.get_stats().samples
        monitor.stop()
        monitor.start().stop()
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert monitor.is_running()
    monitor.stop()


def test_wrong_arguments_are_named():
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(
            ValueError, match=r"`sampling_interval_sec` must be 0\.05 to"
        ):
            trainfast.SystemMonitor(wrong)
    with pytest.raises(ValueError, match="`pid` must be a process"):
        trainfast.SystemMonitor(pid=-1)


def test_nothing_waits_for_a_long_interval():
    monitor = trainfast.SystemMonitor(3600).start()
    began = time.monotonic()
    monitor.stop()
    assert time.monotonic() - began < 5
    assert threading.active_count() < 50


def test_command_line(nvml, capsys):  # noqa: F811
    nvml(T4)
    assert main(["monitor", "--once", "--pid", str(os.getpid())]) == 0
    assert "gpu0 97%" in capsys.readouterr().out
    assert main(["monitor", "--once", "--format", "csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith(
        "timestamp,index,name,utilization.gpu"
    )
    assert main(["monitor", "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"][0]["name"] == "Tesla T4"
    assert main(["monitor", "--once", "--pid", "999999999"]) == 1
    assert "process 999999999 ended" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["monitor", "-i", "0"])


def test_gpu_memory_without_a_gpu(capsys):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    trainfast.print_gpu_memory()
    assert capsys.readouterr().out == "torch sees no GPU\n"


def test_gpu_memory_names_other_processes(nvml, capsys, monkeypatch):  # noqa: F811
    torch = pytest.importorskip("torch")
    nvml(T4)
    answers = {
        "is_available": True,
        "device_count": 1,
        "mem_get_info": (1 << 30, 16 << 30),
        "memory_allocated": 3 << 30,
        "max_memory_allocated": 4 << 30,
        "memory_reserved": 5 << 30,
        "get_device_name": "Tesla T4",
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    trainfast.print_gpu_memory()
    said = capsys.readouterr().out
    assert "GPU 0: Tesla T4" in said and "process 77" in said and "13312" in said
    assert "15360" in said and "3072" in said
