"""The GPU's side of the benchmarks of attention and of products: all but the clock and
the device runs here, on the CPU, with the stub of cuBLAS. No time is asserted."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.cublas_stub import on_stub, shared_stub  # noqa: F401  (a fixture)

torch = pytest.importorskip("torch")

from benchmarks import (  # noqa: E402
    attention,
    attention_cuda,
    bench_attention,
    bench_gemm,
    device,
    gemm,
    harness,
    table,
)

ROOT = Path(__file__).resolve().parents[2]
PROBLEMS = {problem.name: problem for problem in attention_cuda.problems()}
ONCE = harness.Budget(0.0, 0, 1, 1)
# What torch says differs between the CPU and a GPU, and between versions.
NO_KERNEL = "No (available kernel|viable backend)"


def setup(name="bf16-causal-n512-d64", which="forward"):
    fill = device.make_fill("cpu", smoke=True)
    inputs = attention.make_inputs(PROBLEMS[name].shrunk())
    return attention.Setup(inputs, which, 1, "simt", fill)


def run_problem(names, name="bf16-causal-n512-d64", which="forward"):
    options = {"names": names, "budget": ONCE, "where": "cpu"}
    problem = PROBLEMS[name].shrunk()
    return attention_cuda.run_problem(
        problem, which, prepare=device.make_fill("cpu", smoke=True), **options
    )


# ---- Cases ---------------------------------------------------------------------------


def test_cases_are_those_of_the_papers():
    sizes = {(p.n, p.dim, p.is_causal) for p in PROBLEMS.values()}
    assert len(sizes) == 6 * 2 * 2
    for problem in PROBLEMS.values():
        assert problem.batch * problem.n == 16384
        assert problem.heads * problem.dim == 2048
        assert problem.flops("backward") == 2.5 * problem.flops("forward")
    assert {p.dtype for p in PROBLEMS.values()} == {torch.float16, torch.bfloat16}


def test_reference_in_parts_is_the_whole_one(monkeypatch):
    whole = setup().inputs.reference
    monkeypatch.setattr(attention, "REFERENCE_BYTES", 8 * 2 * 40 * 7)  # 7 queries
    out, grads = setup().inputs.reference
    assert torch.allclose(out, whole[0], rtol=1e-12, atol=0)
    for grad, right in zip(grads, whole[1], strict=True):
        assert torch.allclose(grad, right, rtol=1e-9, atol=1e-12)


# ---- Contenders ----------------------------------------------------------------------


@pytest.mark.usefixtures("on_stub")
@pytest.mark.parametrize("which", attention.PASSES)
@pytest.mark.parametrize("name", ["f16-n512-d64", "bf16-causal-n512-d128"])
def test_unfused_attention_is_right(name, which):
    made = attention_cuda.make_unfused(setup(name, which))
    assert (made.name, made.role) == ("torch unfused", "rival")
    first = made.run()
    again = made.run()  # its matrices may be used again
    pairs = [(first, again)] if which == "forward" else zip(first, again, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.usefixtures("on_stub")
def test_unfused_attention_that_does_not_fit_says_so(monkeypatch):
    monkeypatch.setattr(device, "free_bytes", lambda where: 2**30)
    large = PROBLEMS["bf16-n16384-d64"]
    assert gemm.unfused_bytes(large, "forward") == 2 * 32 * 16384**2 * 2
    assert gemm.unfused_bytes(large, "backward") == 4 * 32 * 16384**2 * 2
    made = setup()
    monkeypatch.setattr(gemm, "unfused_bytes", lambda *_: 3 * 2**30)
    message = "its matrices of N x N take 3.0 GiB, with 1.0 free"
    with pytest.raises(attention.Unavailable, match=message):
        attention_cuda.make_unfused(made)


@pytest.mark.parametrize("which", attention.PASSES)
def test_ours_is_timed_where_torch_has_flash_attention(monkeypatch, which):
    import trainfast.torch

    def refuse(*args, **options):  # as on a GPU of capability 9.0
        raise NotImplementedError("torch has flash attention")

    monkeypatch.setattr(trainfast.torch, "scaled_dot_product_attention", refuse)
    made, skipped = attention_cuda.make_contenders(["ours"], setup(which=which))
    assert [contender.name for contender in made] == ["trainfast"] and not skipped


def test_back_end_that_cannot_run_gives_torchs_reason():
    from torch.nn.attention import SDPBackend

    with pytest.raises(attention.Unavailable, match=NO_KERNEL):
        attention_cuda.make_backend(setup(), "torch cuDNN", SDPBackend.CUDNN_ATTENTION)
    made = attention_cuda.make_backend(setup(), "math", SDPBackend.MATH)
    assert made.role == "rival"


@pytest.mark.usefixtures("on_stub")
def test_roof_is_scaled_to_the_cases_operations():
    flops = PROBLEMS["bf16-n512-d64"].shrunk().flops("forward")
    roof = gemm.make_roof(flops, torch.bfloat16, None, "cpu", side=16)
    assert roof.calls == 2 * 16**3 / flops
    case = harness.Case("c", "", "", flops=flops)
    times = {"cuBLAS roof": [1000.0 / roof.calls]}
    (line,) = harness.make_lines(case, [roof], times, {})
    assert line["gf_per_s"] == pytest.approx(2 * 16**3 / 1000)


@pytest.mark.usefixtures("on_stub")
def test_product_that_is_wrong_is_no_roof(monkeypatch):
    monkeypatch.setattr(gemm, "gemm", lambda a, b, out, **_: out.fill_(1))
    with pytest.raises(RuntimeError, match="cuBLAS must multiply matrices, got"):
        gemm.square(torch.float32, "cpu", 9)


def test_roof_without_cublas_is_unavailable():
    with pytest.raises(attention.Unavailable, match="no product by cuBLAS: gemm needs"):
        gemm.square(torch.float32, "cpu", 10)


def test_contender_that_fails_does_not_stop_the_others(monkeypatch):
    def broken(setup):
        raise ValueError("odd\nand more")

    def full(setup):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(attention_cuda.CONTENDERS, "cudnn", broken)
    monkeypatch.setitem(attention_cuda.CONTENDERS, "unfused", full)
    names = ["unfused", "cudnn", "ours"]
    made, skipped = attention_cuda.make_contenders(names, setup())
    assert [contender.name for contender in made] == ["trainfast"]
    assert skipped == {"unfused": "out of memory", "cudnn": "ValueError: odd"}
    assert run_problem(["cudnn", "unfused"]) is None


# ---- The whole -----------------------------------------------------------------------


def report(*names):
    """Cases of a run, as JSON would have them."""
    cases = [run_problem(["ours", "flash", "efficient"], name) for name in names]
    return {"bench": "attention-cuda", "cases": cases}


def test_table_has_rates_and_dashes_where_there_is_no_number():
    made = report("f16-n512-d64", "bf16-n512-d128")
    del made["cases"][1]["lines"][0]
    made["cases"][0]["lines"][0]["gf_per_s"] = 345_678.0
    head, first, second = table.throughput(made)
    assert head[:3] == ["case", "trainfast", "% of roof"] and head[-1] == "roof"
    assert len(head) == len(first) == len(second)
    assert (first[1], first[2], first[-1]) == ("346", "-", "-")
    assert second[1] == "-" and "(" in first[3]
    (reason,) = [text for text in table.reasons(made) if text.startswith("- effi")]
    assert re.search(NO_KERNEL, reason) and reason.endswith("(2 cases)")


def test_table_shows_more_digits_of_small_rates():
    line = {"gf_per_s": 123_456.0, "times_ours": None, "role": "ours"}
    assert table._tflops(line) == "123"
    assert table._tflops({**line, "gf_per_s": 45_670.0}) == "45.7"
    rival = {**line, "role": "rival", "times_ours": {"median": 1.254}}
    assert table._tflops(rival) == "123 (1.25)"
    assert table._tflops(None) == "-"


def test_cases_that_would_start_late_are_named(monkeypatch):
    now = iter([0.0, 5.0, 10.0, 10.1])
    monkeypatch.setattr(attention_cuda.time, "monotonic", lambda: next(now))
    late = []
    cases = [(name, partial(dict, name=name)) for name in "abcd"]
    done = [call() for call in attention_cuda.until(10.0, cases, late)]
    assert done == [{"name": "a"}, {"name": "b"}, None, None]
    assert late == ["c", "d"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cuda", "--case", "f32-swin"], "--case must be one of cuda's"),
        (["--case", "f16-n512-d64"], "--case must be one of cpu's, got f16-n512-d64"),
        (["--contender", "cudnn"], "--contender must be one of cpu's, got cudnn"),
        (["--device", "cuda", "--memory"], "--memory must be without --device cuda"),
        (["--device", "cuda", "--ptx75"], "--ptx75 must have a library in"),
    ],
)
def test_bad_arguments_are_named(monkeypatch, capsys, words, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("TRAINFAST_CUDA_LIBRARY", raising=False)
    with pytest.raises(SystemExit):
        bench_attention.parse(words)
    assert message in capsys.readouterr().err


def test_ptx75_is_measured_in_float16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRAINFAST_CUDA_LIBRARY", "/somewhere/libtrainfast_cuda.so")
    args = bench_attention.parse(["--device", "cuda", "--ptx75"])
    chosen = attention_cuda.choose(args)
    assert {problem.dtype for problem, _ in chosen} == {torch.float16}
    assert len(chosen) == 3 * 2 * 2 * 2


@pytest.mark.usefixtures("on_stub")
def test_whole_run_makes_a_report_that_can_be_published(tmp_path, capsys):
    """As on a GPU, but for the device, the clock and the size of the roof."""
    names = ["bf16-n1024-d64", "f16-causal-n512-d128"]
    args = bench_attention.parse(["--smoke"])
    args.case, args.seconds = names, 0.0
    made = attention_cuda.run(args)
    assert [case["name"] for case in made["cases"]] == [
        *("bf16-n1024-d64-forward", "bf16-n1024-d64-backward"),
        *("f16-causal-n512-d128-forward", "f16-causal-n512-d128-backward"),
    ]
    for case in made["cases"]:
        ran = {line["contender"] for line in case["lines"]}
        assert {"trainfast", "cuBLAS roof", "torch unfused"} <= ran
        assert "cudnn" in case["skipped"]
        ours = next(line for line in case["lines"] if line["role"] == "ours")
        assert ours["percent_of_bound"]["median"] > 0
    harness.write_json(made, tmp_path / "a.json")
    text = table.table(json.loads((tmp_path / "a.json").read_text()))
    assert "| case | trainfast | % of roof |" in text
    assert re.search(f"- cudnn: {NO_KERNEL}", capsys.readouterr().out)
    assert attention_cuda.status(args, made) == 0
    made["cases"][0]["lines"] = [
        line for line in made["cases"][0]["lines"] if line["role"] != "ours"
    ]
    assert attention_cuda.status(args, made) == 1
    args.without_ours = True
    assert attention_cuda.status(args, made) == 0


def test_run_that_is_out_of_time_says_so(capsys):
    args = bench_attention.parse(["--smoke", "--within", "0"])
    args.case = ["bf16-n1024-d64"]
    made = attention_cuda.run(args)
    assert made["cases"] == []
    assert made["run"]["late"] == ["bf16-n1024-d64-forward", "bf16-n1024-d64-backward"]
    assert (
        "not run, as 0 s were over: bf16-n1024-d64-forward" in capsys.readouterr().out
    )
    assert attention_cuda.status(args, made) == 1


def test_gemm_benchmark_runs_on_the_stub(tmp_path):
    if "TRAINFAST_SIMT_LIBRARY" not in os.environ:
        pytest.skip("no SIMT library")
    path = tmp_path / "gemm.json"
    words = ["--device", "cpu", "--smoke", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_gemm", *words],
        cwd=ROOT,
        env={
            **os.environ,
            "TRAINFAST_BACKEND": "simt",
            "TRAINFAST_CUBLAS": str(shared_stub()),
        },
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(path.read_text())
    assert [case["name"] for case in made["cases"]] == ["f16", "bf16", "tf32", "f32"]
    for case in made["cases"]:
        roles = {line["contender"]: line["role"] for line in case["lines"]}
        assert roles == {"cuBLAS by trainfast": "ours", "torch": "rival"}
        assert all(line["gf_per_s"] > 0 for line in case["lines"])
    assert table.table(made).startswith("### Products of matrices\n")


def test_gemm_benchmark_without_cublas_fails(capsys):
    words = ["--device", "cpu", "--smoke", "--case", "f32"]
    assert bench_gemm.main(words) == 1
    assert "ours: not run, no product by cuBLAS" in capsys.readouterr().out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_queued_clock_times_the_gpu_alone():
    a = torch.zeros(2**28, device="cuda")
    device.make_fill("cuda")()
    elapsed, host = harness.queued_clock(a.zero_)
    assert elapsed > 0 and host > 0
