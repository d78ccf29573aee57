"""Reading configuration files: values, and errors that say what is wrong."""

import os
import sys

import pytest

import trainfast

pytest.importorskip("yaml")

HYDRA = """\
# @package _global_
device: cuda
trainer:
  batch_size: 524288  # large batches
  compile: true
env_vars:
  OMP_NUM_THREADS: "4"
"""


def write(folder, text):
    path = folder / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("kind", [str, os.fspath, lambda path: path])
def test_hydras_file_is_a_mapping(tmp_path, kind):
    assert trainfast.load_config(kind(write(tmp_path, HYDRA))) == {
        "device": "cuda",
        "trainer": {"batch_size": 524288, "compile": True},
        "env_vars": {"OMP_NUM_THREADS": "4"},
    }


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_empty_file_is_an_empty_mapping(tmp_path, text):
    assert trainfast.load_config(write(tmp_path, text)) == {}


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml"):
        trainfast.load_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "a: [1, 2\n",
        "a: b: c\n",
        "a: !!python/object/apply:os.getcwd []\n",
        b"a: \xff\xfe\n",
        "a: 2001-99-99\n",
        "[" * 20000,
    ],
)
def test_what_is_not_yaml_is_a_value_error_of_one_line(tmp_path, text):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=r"config\.yaml must be YAML, got") as caught:
        trainfast.load_config(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "kind"), [("- a\n", "list"), ("7\n", "int")])
def test_top_level_must_be_a_mapping(tmp_path, text, kind):
    with pytest.raises(ValueError, match=f"must be a mapping, got a {kind}"):
        trainfast.load_config(write(tmp_path, text))


def test_without_pyyaml_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match=r"pip install 'trainfast\[tools\]'"):
        trainfast.load_config(write(tmp_path, HYDRA))
