"""Each rule alone finds what is planted for it; healthy facts have no finding."""

from dataclasses import replace

import pytest

from tests.diagnosis.machines import HEALTHY, KAGGLE, RTX_3050, T4, with_gpu
from trainfast.diagnosis.facts import Gpu, Machine
from trainfast.diagnosis.process import Running
from trainfast.diagnosis.rules import RULES
from trainfast.diagnosis.rules.rule import Case, findings
from trainfast.diagnosis.scripts import Script
from trainfast.diagnosis.settings import Settings

CARDS = (T4, RTX_3050)
# What the guides recommend, as one configuration.
GOOD = {
    "device": "auto",
    "training": {
        "batch_size": 128,
        "precision": "16-mixed",
        "grad_scaler_enabled": True,
        "use_compile": True,
        "float32_matmul_precision": "high",
        "allow_tf32": True,
    },
    "data": {
        "num_workers": 4,
        "persistent_workers": True,
        "prefetch_factor": 2,
        "pin_memory": True,
    },
    "model": {"d_model": 128, "nhead": 8},
    "env_vars": {"OMP_NUM_THREADS": "4", "CUDA_LAUNCH_BLOCKING": 0},
}


def on(machine=HEALTHY, config=None, **facts):
    """A case: a machine with some other facts, and a configuration."""
    return Case(replace(machine, **facts), Settings(config or {}))


def gpu(**facts):
    return Case(with_gpu(**facts))


def running(**state):
    return on(running=Running(**state))


def reading(machine=HEALTHY, **parts):
    return Case(machine, scripts=(Script("train.py", **parts),))


MIXED_TF32 = {
    "torch.backends.cuda.matmul.allow_tf32": 3,
    "torch.backends.cuda.matmul.fp32_precision": 9,
}
P100 = with_gpu(name="Tesla P100-PCIE-16GB", capability=(6, 0), pcie_width=16)

# (rule, a case that it alone finds, a part of its evidence)
PLANTED = [
    ("below-minimum", on(affinity=2, cores=2), "cores 2 of 4"),
    ("below-minimum", on(memory=12 << 10), "RAM 12 of 16 GB"),
    ("below-minimum", gpu(memory=2048), "GPU memory 2 of 4 GB"),
    ("below-minimum", on(disk=3 << 10), "free disk 3 of 10 GB"),
    ("torch-without-cuda", on(torch="2.13.0+cpu", torch_cuda=None), "CPU build"),
    ("driver-too-old", gpu(driver="570.86.15"), "CUDA 13.0 needs 580"),
    ("gpu-too-old-for-torch", gpu(capability=(7, 0)), "starts at capability 7.5"),
    ("gpu-too-old-for-torch", on(P100, torch_cuda="12.8"), "at capability 7.0"),
    ("torch-too-old", on(torch="2.5.1+cu124", torch_cuda="12.4"), "older than 2.6"),
    ("cores-limited", on(quota=8.0), "says 16 cores, the control group's quota is 8"),
    ("cores-limited", on(affinity=8), "this process may run on 8"),
    ("shm-small", on(shm=64), "/dev/shm has 64 MiB"),
    ("pcie-narrow", gpu(pcie_width_max=4, pcie_width=4), "4 PCIe lanes at most"),
    ("pcie-narrow", gpu(pstate="P0"), "8 of 16 PCIe lanes"),
    ("gpu-throttled", gpu(slowdowns=("hw_thermal_slowdown",)), "hw_thermal"),
    ("gpu-hot", gpu(temperature=86), "at 86 degrees C"),
    ("gpu-memory-taken", gpu(memory_used=9000), "9000 of 12282 MiB"),
    ("gpu-underused", gpu(memory_used=6000, utilization=12), "12 % of the time"),
    ("gpu-memory-unused", gpu(memory_used=1300, utilization=95), "uses 1300 of"),
    ("rotating-disk", on(rotating=True), "rotating"),
    (
        "variable-without-effect",
        on(variables={"TORCH_CUDNN_V8_API_ENABLED": "1", "TORCH_CUDNN_BENCHMARK": "1"}),
        "read TORCH_CUDNN_V8_API_ENABLED, TORCH_CUDNN_BENCHMARK",
    ),
    (
        "variable-without-effect",
        reading(variables={"TORCH_CUDNN_BENCHMARK": "1"}),
        "TORCH_CUDNN_BENCHMARK",
    ),
    ("launch-blocking", on(variables={"CUDA_LAUNCH_BLOCKING": "1"}), "BLOCKING=1"),
    ("launch-blocking", on(config={"env": {"CUDA_LAUNCH_BLOCKING": True}}), "=1"),
    (
        "allocator-variable",
        on(
            variables={
                "PYTORCH_ALLOC_CONF": "expandable_segments:True",
                "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128",
            }
        ),
        "differ",
    ),
    (
        "allocator-variable",
        on(torch="2.9.1+cu130", variables={"PYTORCH_ALLOC_CONF": "x:y"}),
        "torch 2.9.1+cu130 may ignore it",
    ),
    ("too-many-threads", on(variables={"OMP_NUM_THREADS": "32"}), "32 on 16 usable"),
    ("flush-to-zero", running(flush_to_zero=True), "by a library that is loaded"),
    (
        "flush-to-zero",
        running(flush_to_zero=True, fast_math=("/x/fast.so",)),
        "switched by /x/fast.so",
    ),
    ("tf32-mixed", running(tf32_mixed="torch.backends.cudnn.allow_tf32"), "cudnn"),
    ("tf32-mixed", reading(assigned=MIXED_TF32), "train.py, lines 3 and 9"),
    ("deprecated-amp", running(deprecated=("torch.cuda.amp.GradScaler",)), "process"),
    (
        "deprecated-amp",
        reading(names={"torch.cuda.amp.autocast": 7}),
        'train.py:7: torch.cuda.amp.autocast is now torch.amp.autocast("cuda")',
    ),
    ("device-is-cpu", on(gpus=(), config={"device": "auto"}), "no NVIDIA GPU"),
    (
        "device-is-cpu",
        on(config={"device": "cuda:0"}, variables={"CUDA_VISIBLE_DEVICES": ""}),
        "hides every GPU",
    ),
    ("bfloat16-emulated", on(KAGGLE, {"precision": "bf16-mixed"}), "Tesla T4"),
    ("bfloat16-emulated", on(KAGGLE, {"bf16": True}), "bf16: True"),
    (
        "bfloat16-emulated",
        reading(KAGGLE, names={"torch.cuda.is_bf16_supported()": 4}),
        "train.py:4: torch.cuda.is_bf16_supported() is true, and Tesla T4",
    ),
    ("tf32-unavailable", on(KAGGLE, {"tf32": True}), "has no TF32"),
    ("tf32-unavailable", on(KAGGLE, {"matmul_precision": "high"}), "has no TF32"),
    ("mixed-precision-off", on(config={"precision": 32}), "precision: 32"),
    ("mixed-precision-off", on(config={"use_mixed_precision": False}), "tensor cores"),
    (
        "scaler-off",
        on(config={"fp16": True, "grad_scaler_enabled": False}),
        "fp16: True with grad_scaler_enabled: False",
    ),
    ("compile-unavailable", on(compiler=False, config={"compile": True}), "C compiler"),
    (
        "compile-unavailable",
        on(P100, {"compile": True}, torch_cuda="12.6"),
        "Triton supports no Tesla P100",
    ),
    ("flash-unavailable", on(KAGGLE, {"nhead": 8, "d_model": 512}), "is below 8.0"),
    ("flash-unavailable", on(config={"nhead": 2, "d_model": 1024}), "512 is above 256"),
    ("workers-exceed-cores", on(config={"num_workers": 17}), "17 on 16 usable cores"),
    ("workers-zero", on(config={"num_workers": 0}), "no cache"),
    (
        "workers-options",
        on(config={"num_workers": 0, "cache_dir": "c", "persistent_workers": True}),
        "persistent_workers: True is a ValueError",
    ),
    (
        "workers-restart",
        on(config={"num_workers": 4, "persistent_workers": False}),
        "restart each epoch",
    ),
    ("pin-memory-off", on(config={"pin_memory": False}), "pin_memory: False"),
    (
        "batch-far-from-guide",
        on(KAGGLE, {"image_size": 512, "batch_size": 64}),
        "the guide has 8 to 12 for 512 x 512",
    ),
    (
        "batch-far-from-guide",
        on(
            with_gpu(name="NVIDIA A100-SXM4-40GB", capability=(8, 0)),
            {"image_size": 512, "batch_size": 8},
        ),
        "the guide has 32 to 48",
    ),
]


@pytest.mark.parametrize(
    ("rule", "planted", "evidence"),
    PLANTED,
    ids=[f"{i}-{rule}" for i, (rule, _, _) in enumerate(PLANTED)],
)
def test_rule_alone_finds_what_is_planted(rule, planted, evidence):
    found = findings(RULES, planted)
    assert [finding.id for finding in found] == [rule]
    assert evidence in found[0].evidence
    assert found[0].cure and found[0].source


def test_data_larger_than_stated_is_found(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"x" * 3000)
    config = {"data": {"dataset": "text.txt", "max_chars": 1000}}
    found = findings(RULES, Case(HEALTHY, Settings(config, tmp_path)))
    assert [finding.id for finding in found] == ["data-larger-than-stated"]
    assert "text.txt has 3000 bytes, and data.max_chars: 1000" in found[0].evidence
    config["data"]["max_chars"] = 3000
    assert findings(RULES, Case(HEALTHY, Settings(config, tmp_path))) == []


def test_each_rule_is_planted():
    planted = {rule for rule, _, _ in PLANTED} | {"data-larger-than-stated"}
    names = [rule.id for rule in RULES]
    assert planted == set(names) and len(names) == len(set(names))


@pytest.mark.parametrize("config", [{}, GOOD], ids=["bare", "good"])
def test_healthy_machine_has_no_finding(config):
    assert findings(RULES, on(config=config)) == []


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_cards_of_the_guides_have_no_finding_by_themselves(card):
    assert findings(RULES, on(gpus=(card,))) == []


def test_machine_of_which_nothing_is_known_has_no_finding():
    machine = Machine(cores=4, affinity=4, gpus=(Gpu("unknown"),))
    assert findings(RULES, Case(machine, Settings(GOOD))) == []


@pytest.mark.parametrize(
    ("config", "case"),
    [
        ({"num_workers": 0, "cache_dir": "graphs"}, "a cache needs no workers"),
        ({"precision": "bf16"}, "Ampere and later have bfloat16"),
        ({"batch_size": 32, "image_size": 224}, "no row for this card"),
        ({"device": "cpu", "precision": 32}, "the CPU is meant"),
        ({"compile": False}, "off"),
        ({"num_workers": "auto", "batch_size": None}, "no numbers"),
    ],
)
def test_near_misses_are_no_findings(config, case):
    assert findings(RULES, on(config=config)) == [], case


def test_small_shm_does_not_matter_without_workers():
    config = {"num_workers": 0, "cache_dir": "graphs"}
    assert findings(RULES, on(config=config, shm=64)) == []


def test_memory_of_this_process_is_not_taken_by_another():
    machine = with_gpu(memory_used=9000)
    assert findings(RULES, on(machine, running=Running(cuda=True))) == []


# Configurations of the guide of docs/guides/reinforcement_learning.md, row 3.15.
PRODUCTION = {
    "device": "cuda",
    "vectorization": "multiprocessing",
    "trainer": {
        "batch_size": 1048576,
        "minibatch_size": 32768,
        "compile": True,
        "use_mixed_precision": True,
        "num_workers": 8,
    },
    "env_vars": {
        "OMP_NUM_THREADS": "8",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:256",
    },
}
DEBUG = {
    "device": "cuda",
    "trainer": {"batch_size": 8192, "compile": False, "use_mixed_precision": False},
    "env_vars": {"CUDA_LAUNCH_BLOCKING": "1"},
}


@pytest.mark.parametrize(
    ("config", "machine", "rules"),
    [
        (PRODUCTION, HEALTHY, []),
        (PRODUCTION, KAGGLE, ["too-many-threads", "workers-exceed-cores"]),
        (DEBUG, HEALTHY, ["launch-blocking", "mixed-precision-off"]),
    ],
    ids=["production", "production on Kaggle", "debug"],
)
def test_configurations_of_a_guide(config, machine, rules):
    assert [f.id for f in findings(RULES, on(machine, config))] == rules


def test_old_torch_reads_what_new_torch_does_not():
    old = {"torch": "1.13.1+cu117", "torch_cuda": "11.7"}
    variables = {"TORCH_CUDNN_V8_API_ENABLED": "1"}
    found = findings(RULES, on(variables=variables, **old))
    assert [finding.id for finding in found] == ["torch-too-old"]


def test_container_with_a_quota_counts_its_cores_once():
    found = findings(RULES, on(quota=2.0, config={"num_workers": 4}))
    assert [f.id for f in found] == [
        "below-minimum",
        "cores-limited",
        "workers-exceed-cores",
    ]
