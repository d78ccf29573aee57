"""Keys and values of a configuration, and the variables that follow from them."""

import re
from pathlib import Path

import pytest

from trainfast.config import load_config
from trainfast.launch.environment import changed_variables, cores_of_quota
from trainfast.launch.launcher import has_tf32, interpreter_options
from trainfast.launch.settings import Settings, read_settings


def test_empty_configuration_is_the_default():
    assert read_settings({}) == Settings()
    assert read_settings({"trainer": None, "env_vars": None}) == Settings()


def test_keys_of_the_guides_are_known():
    settings = read_settings(
        {
            "device": "cuda",
            "vectorization": "serial",
            "trainer": {"batch_size": 8192, "profiler": {"interval_epochs": 0}},
            "training": {"use_compile": True, "gradient_clip": 1.0, "threads": 2},
            "env_vars": {"OMP_NUM_THREADS": "8", "CUDA_LAUNCH_BLOCKING": 1},
        }
    )
    assert settings.of_the_script == [
        *("device", "vectorization", "trainer.batch_size", "trainer.profiler"),
        *("training.use_compile", "training.gradient_clip"),
    ]
    assert settings.threads == 2
    assert settings.env_vars == {"OMP_NUM_THREADS": "8", "CUDA_LAUNCH_BLOCKING": "1"}


def test_configuration_of_the_page_is_read(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "run.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.S)
    (tmp_path / "a.yaml").write_text(text)
    settings = read_settings(load_config(tmp_path / "a.yaml"))
    assert settings.float32_matmul_precision == "high" and settings.threads == 2
    assert settings.of_the_script == ["trainer.batch_size", "trainer.compile"]


def test_patch_takes_a_switch_or_names():
    assert read_settings({"patch": True}).patch == []
    assert read_settings({"patch": False}).patch is None
    assert read_settings({"patch": ["pyg", "clip"]}).patch == ["pyg", "clip"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"batchsize": 3}, "batchsize is not a setting; did you mean batch_size?"),
        ({"trainer": {"num_worker": 3}}, "trainer.num_worker .* mean num_workers?"),
        ({"zzz": 3}, "zzz is not a setting; known: accumulation_steps, batch_size"),
        ({"trainer": 3}, "trainer must be a section, got 3; indent its keys"),
        ({"threads": 0}, "threads must be a positive integer, got 0"),
        ({"threads": True}, "threads must be a positive integer, got True"),
        ({"malloc": "on"}, "malloc must be true or false, got 'on'"),
        ({"float32_matmul_precision": "low"}, "one of highest, high, medium"),
        ({"float32_matmul_precision": [1]}, r"one of .* got \[1\]"),
        ({"patch": "adamw"}, "patch must be true, false or a list of names"),
        ({"patch": ["adam"]}, "patch: name must be one of adamw, .* got 'adam'"),
        ({"env_vars": {"A B": 1}}, "must have names of variables, got 'A B'"),
        ({"env_vars": {"A": True}}, "env_vars.A must be text or a number, got True;"),
    ],
)
def test_wrong_setting_is_an_error_with_a_remedy(config, message):
    with pytest.raises(ValueError, match=message):
        read_settings(config)


def changed(environment=(), torch=(2, 13), cores=None, **settings):
    settings = Settings(**{"malloc": False, **settings})
    return changed_variables(settings, dict(environment), torch, cores)


def test_default_does_not_replace_what_the_user_has_set():
    environment = {"MALLOC_TRIM_THRESHOLD_": "1", "OMP_NUM_THREADS": "3"}
    assert changed(environment, cores=2, malloc=True) == (
        {"MALLOC_MMAP_THRESHOLD_": "33554432"},
        [],
    )
    assert changed(cores=2) == ({"OMP_NUM_THREADS": "2"}, [])


def test_configuration_replaces_it_and_a_variable_is_more_than_threads():
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    asked = {"OMP_NUM_THREADS": "1"}
    found, _ = changed({"OMP_NUM_THREADS": "3"}, cores=2, threads=4, env_vars=asked)
    assert found == dict.fromkeys(names, "4") | asked


@pytest.mark.parametrize("asked", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("torch", "used"),
    [
        ((2, 11), "PYTORCH_CUDA_ALLOC_CONF"),
        ((2, 12), "PYTORCH_ALLOC_CONF"),
        (None, "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_allocator_has_the_name_that_torch_reads(asked, torch, used):
    both = dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "old")
    unused = next(name for name in both if name != used)
    found, _ = changed(both, torch, env_vars={asked: "max_split_size_mb:128"})
    assert found == {used: "max_split_size_mb:128", unused: None}


def test_quota_counts_only_below_the_cores():
    assert cores_of_quota(None, 8) is None and cores_of_quota(8.0, 8) is None
    assert cores_of_quota(1.5, 8) == 2 and cores_of_quota(0.0, 8) == 1


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ([], False),
        (["7.5"], False),
        (["8.0"], True),
        (["12.0", "8.6"], True),
        (["9.0", "7.5"], False),
        (["[N/A]"], False),
    ],
)
def test_tf32_needs_capability_8_of_every_gpu(capabilities, expected):
    assert has_tf32([{"capability": text} for text in capabilities]) is expected


def test_variable_that_does_nothing_is_named():
    _, notes = changed(env_vars={"TORCH_CUDNN_BENCHMARK": "1"})
    assert notes == [
        "TORCH_CUDNN_BENCHMARK has no effect: torch does not read it; "
        "use `cudnn_benchmark: true`"
    ]


@pytest.mark.parametrize(
    ("original", "argv", "options"),
    [
        (["py", "-m", "trainfast", "run", "a"], ["m", "run", "a"], []),
        (["py", "-u", "-m", "trainfast", "run"], ["m", "run"], ["-u"]),
        (["py", "-W", "x", "/bin/trainfast", "run"], ["t", "run"], ["-W", "x"]),
    ],
)
def test_interpreter_options_are_what_stands_before_trainfast(original, argv, options):
    assert interpreter_options(original, argv) == options
