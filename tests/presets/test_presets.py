"""Presets: the guides' numbers for each machine, and files that can be used."""

import itertools
import json

import pytest

from trainfast import cli
from trainfast.config import load_config
from trainfast.launch.settings import read_settings
from trainfast.presets.machine import Machine, machine_of
from trainfast.presets.text import to_yaml, write_new
from trainfast.presets.values import PROFILES, preset, progressive
from trainfast.tools import optimize

GPU = Machine("cuda", 64, 16, 24, 8.6)
T4 = Machine("cuda", 16, 2, 15, 7.5)
CPU = Machine("cpu", 64, 2)
MAC = Machine("mps", 16, 8)
MACHINES = [GPU, T4, CPU, MAC, Machine("cuda", 4, 1), Machine("cuda", 32, 4, 4, 6.1)]


def settings(values):
    return {value.key: value.value for value in values}


def is_part(part, whole):
    return part.items() <= whole.items()


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (GPU, ("cuda", "multiprocessing", 524288, True, True)),
        (MAC, ("mps", "multiprocessing", 65536, True, False)),
        (CPU, ("cpu", "serial", 32768, False, False)),
    ],
)
def test_device_decides_batch_compile_and_precision(machine, expected):
    found = settings(preset(machine))
    keys = ("batch_size", "compile", "use_mixed_precision")
    names = ("device", "vectorization", *(f"trainer.{key}" for key in keys))
    assert tuple(found[name] for name in names) == expected


@pytest.mark.parametrize(
    ("ram", "batch"),
    [(4, 8192), (8, 32768), (12, 65536), (16, 131072), (32, 524288), (512, 524288)],
)
def test_batch_grows_with_ram(ram, batch):
    found = settings(preset(Machine("cuda", ram, 8, 24, 8.6)))
    assert found["trainer.batch_size"] == batch


@pytest.mark.parametrize(
    ("vram", "batch"), [(4, 32), (8, 64), (12, 96), (16, 128), (24, 192), (80, 192)]
)
def test_batch_of_a_transformer_grows_with_gpu_memory(vram, batch):
    found = settings(preset(Machine("cuda", 32, 8, vram, 8.6)))
    assert found["training.batch_size"] == batch


@pytest.mark.parametrize(
    ("cores", "workers"), [(1, 1), (2, 1), (4, 2), (8, 4), (64, 4)]
)
def test_workers_follow_the_cores(cores, workers):
    found = settings(preset(Machine("cuda", 32, cores, 16, 8.9)))
    assert found["training.num_workers"] == workers
    assert found["env_vars.OMP_NUM_THREADS"] == str(min(4, cores))


def test_old_gpu_neither_compiles_nor_has_tf32():
    assert "float32_matmul_precision" not in settings(preset(T4))
    assert settings(preset(T4))["trainer.compile"] is True
    old = settings(preset(Machine("cuda", 32, 8, 8, 6.1)))
    assert old["trainer.compile"] is old["training.use_compile"] is False
    assert settings(preset(GPU))["float32_matmul_precision"] == "high"


def test_unknown_gpu_memory_leaves_its_batch_out():
    assert "training.batch_size" not in settings(preset(Machine("cuda", 32, 8)))


def test_profiles_are_those_of_the_guide():
    production = {
        "device": "cuda",
        "trainer.batch_size": 1048576,
        "trainer.minibatch_size": 32768,
        "trainer.num_workers": 8,
        "env_vars.OMP_NUM_THREADS": "8",
    }
    found = settings(preset(GPU, "production"))
    assert is_part(production, found)
    allocator = found["env_vars.PYTORCH_CUDA_ALLOC_CONF"]
    assert allocator.startswith("max_split_size_mb:256")
    debug = {
        "vectorization": "serial",
        "trainer.batch_size": 8192,
        "trainer.compile": False,
        "env_vars.CUDA_LAUNCH_BLOCKING": "1",
    }
    assert is_part(debug, settings(preset(GPU, "debug")))
    assert settings(preset(CPU, "debug"))["device"] == "cpu"
    assert settings(preset(GPU, "ci")) == {
        "device": "cpu",
        "vectorization": "serial",
        "trainer.batch_size": 1024,
        "trainer.compile": False,
        "trainer.profiler.interval_epochs": 0,
    }


def test_production_fits_a_small_gpu_and_needs_one():
    found = settings(preset(T4, "production"))
    assert found["trainer.batch_size"] == 131072
    assert found["trainer.num_workers"] == 2
    with pytest.raises(ValueError, match="CUDA GPUs, got cpu; leave --profile out"):
        preset(CPU, "production")


def test_progressive_steps_grow_and_say_what_does_not_fit():
    first, second, third = progressive(T4)
    assert settings(first) == {"batch_size": 32, "d_model": 64, "num_layers": 3}
    assert settings(second) == {"batch_size": 32, "d_model": 128, "num_layers": 6}
    assert is_part(settings(second), settings(third))
    assert "segformer-b2" in settings(third)["model_name"]
    assert third[0].reason.endswith("about 14 GB")
    small = progressive(Machine("cuda", 16, 4, 8, 8.6))
    assert small[1][0].reason.endswith("about 10 GB, more than the GPU's 8 GB")


def test_machine_takes_its_smallest_gpu():
    gpus = [
        {"memory": "24564 MiB", "capability": "8.6"},
        {"memory": "16376 MiB", "capability": "8.9"},
        {"memory": "[N/A]", "capability": "[N/A]"},
    ]
    ram = int(31.2 * 2**30)
    assert machine_of(gpus, ram, 8) == Machine("cuda", 32, 8, 16, 8.6)
    assert machine_of(gpus, ram, 8, "cpu") == Machine("cpu", 32, 8)
    assert machine_of([], ram, 8) == Machine("cpu", 32, 8)
    assert machine_of([], ram, 8, "cuda") == Machine("cuda", 32, 8)


def all_presets():
    for machine, profile in itertools.product(MACHINES, (None, *PROFILES)):
        if profile != "production" or machine.device == "cuda":
            yield preset(machine, profile)
    for machine in MACHINES:
        yield from progressive(machine)


@pytest.mark.parametrize("values", list(all_presets()))
def test_file_is_read_by_trainfast_run(tmp_path, values):
    text = to_yaml(values)
    assert text.startswith("# @package _global_\n")
    for line in text.splitlines():
        if not line.startswith("#") and not line.endswith(":"):
            assert "  # not measured: " in line
    (tmp_path / "a.yaml").write_text(text)
    config = load_config(tmp_path / "a.yaml")
    for value in values:
        found = config
        for name in value.key.split("."):
            found = found[name]
        assert found == value.value and type(found) is type(value.value)
    read_settings(config)


# ---- the verb ------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch):
    gpu = {"memory": "15360 MiB", "capability": "7.5"}
    monkeypatch.setattr(optimize, "gpus", lambda: [gpu])


def test_file_is_written_once(tmp_path, capsys):
    path = tmp_path / "configs" / "hardware" / "optimized.yaml"
    words = ["optimize", "--output", str(path)]
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"wrote {path}\n"
    assert load_config(path)["training"]["batch_size"] == 120
    path.write_text("mine: 1\n")
    assert cli.main(words) == 1
    assert capsys.readouterr().err == (
        f"trainfast optimize: {path} exists; pass --force to replace it\n"
    )
    assert path.read_text() == "mine: 1\n"
    assert cli.main([*words, "--force", "--profile", "ci"]) == 0
    assert load_config(path)["device"] == "cpu"


def test_none_of_three_is_written_if_one_is_there(tmp_path):
    (tmp_path / "a_3.yaml").write_text("mine: 1\n")
    words = ["optimize", "--progressive", "--output", str(tmp_path / "a.yaml")]
    assert cli.main(words) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a_3.yaml"]
    assert cli.main([*words, "--force"]) == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["a_1.yaml", "a_2.yaml", "a_3.yaml"]


def test_without_output_it_is_printed(capsys):
    assert cli.main(["optimize", "--device", "cpu"]) == 0
    assert 'device: "cpu"' in capsys.readouterr().out
    assert cli.main(["optimize", "--progressive"]) == 0
    assert capsys.readouterr().out.count("# @package _global_\n") == 3


def test_json_says_that_nothing_is_measured(capsys):
    assert cli.main(["optimize", "--json", "--profile", "ci"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["files"] == [] and len(found["configs"][0]) == 5
    assert not any(value["measured"] for value in found["configs"][0])


@pytest.mark.parametrize(
    "words",
    [["--profile", "fast"], ["--device", "tpu"], ["--profile", "ci", "--progressive"]],
)
def test_wrong_command_line_exits_with_2(words, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["optimize", *words])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("usage: ")


def test_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    words = ["optimize", "--output", str(tmp_path / "file" / "a.yaml")]
    assert cli.main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("trainfast optimize: ") and error.count("\n") == 1


def test_file_that_appears_meanwhile_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "a.yaml"
    path.write_text("mine: 1\n")
    monkeypatch.setattr(type(path), "exists", lambda self: False)
    with pytest.raises(FileExistsError):
        write_new({path: "a: 1\n"}, force=False)
    assert path.read_text() == "mine: 1\n"
