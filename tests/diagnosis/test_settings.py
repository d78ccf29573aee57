"""Configurations and scripts, as rules see them."""

from pathlib import Path

import pytest

from trainfast.diagnosis import scripts
from trainfast.diagnosis.settings import Settings


@pytest.mark.parametrize(
    ("config", "name", "shown", "number", "switch"),
    [
        ({"batch_size": 8}, "batch_size", "batch_size: 8", 8, None),
        ({"a": {"b": {"num_workers": "4"}}}, "workers", "a.b.num_workers: 4", 4, None),
        ({"a": {"compile": "yes"}}, "compile", "a.compile: yes", None, True),
        ({"pin_memory": False}, "pin_memory", "pin_memory: False", None, False),
        ({"image_size": [8, 8]}, "image_size", "image_size: [8, 8]", None, None),
        ({"a": {"workers": 1}, "workers": 9}, "workers", "workers: 9", 9, None),
        ({"max_chars": float("inf")}, "limit", "max_chars: inf", None, None),
    ],
)  # fmt: skip
def test_setting_is_found_at_any_depth(config, name, shown, number, switch):
    settings = Settings(config)
    assert str(settings.find(name)) == shown
    assert settings.number(name) == number
    assert settings.on(name) is switch


def test_setting_that_is_not_there_is_none():
    settings = Settings({"batch_size": None, "other": {}})
    for name in ("batch_size", "workers"):
        assert settings.find(name) is None
        assert settings.number(name) is None and settings.on(name) is None
    assert settings.precision() is None and settings.dataset() is None
    assert settings.variables() == {}


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        ({"precision": "16-mixed"}, "float16"),
        ({"precision": 16}, "float16"),
        ({"precision": "bf16-mixed"}, "bfloat16"),
        ({"precision": "32-true"}, "float32"),
        ({"mixed_precision": "no"}, "float32"),
        ({"mixed_precision": "fp16"}, "float16"),
        ({"mixed_precision": True}, "float16"),
        ({"trainer": {"use_mixed_precision": False}}, "float32"),
        ({"fp16": False, "bf16": True}, "bfloat16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"use_amp": True, "amp_dtype": "bfloat16"}, "bfloat16"),
        ({"use_amp": True, "dtype": "float32"}, "float16"),
        ({"fp16": False}, None),
        ({"precision": "double"}, None),
    ],
)
def test_precision_by_the_names_of_frameworks(config, precision):
    found = Settings(config).precision()
    assert (found and found[0]) == precision


def test_variables_of_a_configuration_are_text():
    config = {"env_vars": {"OMP_NUM_THREADS": 8, "CUDA_LAUNCH_BLOCKING": True}}
    found = {"OMP_NUM_THREADS": "8", "CUDA_LAUNCH_BLOCKING": "1"}
    assert Settings(config).variables() == found
    assert Settings({"env": "prod"}).variables() == {}


def test_data_is_looked_for_beside_the_configuration(tmp_path):
    (tmp_path / "a.txt").write_text("12345")
    settings = Settings({"data": {"path": "a.txt", "dataset": "wikitext"}}, tmp_path)
    assert settings.dataset() == (tmp_path / "a.txt", 5)
    for name in ("a\0b", "x" * 5000):
        assert Settings({"dataset": name}, tmp_path).dataset() is None


SCRIPT = """
import os
import torch
import torch.cuda.amp as amp
from torch.cuda.amp import GradScaler as Scaler
os.environ["TORCH_CUDNN_BENCHMARK"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "4")
os.environ[name] = value
torch.backends.cuda.matmul.allow_tf32 = True
with amp.autocast(), torch.cpu.amp.autocast():
    f().shape
torch.cuda.is_bf16_supported(including_emulation=False)
raise RuntimeError("a script that is read does not run")
"""


def test_script_is_read_and_not_run(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    script = scripts.read(path)
    assert script.path == str(path)
    assert script.names["torch.cuda.amp.GradScaler"] == 5
    assert script.names["torch.cuda.amp.autocast"] == 10
    assert script.names["torch.cpu.amp.autocast"] == 10
    assert script.names["torch.cuda.amp.autocast()"] == 10
    assert "torch.cuda.is_bf16_supported()" not in script.names
    assert script.assigned == {"torch.backends.cuda.matmul.allow_tf32": 9}
    found = {"TORCH_CUDNN_BENCHMARK": "1", "OMP_NUM_THREADS": "4"}
    assert script.variables == found


@pytest.mark.parametrize(
    ("content", "error"),
    [(b"def (", SyntaxError), (b"\0", (SyntaxError, ValueError)), (None, OSError)],
)
def test_file_that_is_no_script_is_an_error(tmp_path: Path, content, error):
    path = tmp_path / "train.py"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error):
        scripts.read(path)
