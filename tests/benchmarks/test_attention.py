"""Attention's benchmark: cases, checks, bounds and tables. No time is asserted."""

import ctypes
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import trainfast  # noqa: E402
from benchmarks import (  # noqa: E402
    attention,
    attention_memory,
    bench_attention,
    harness,
    peak,
    table,
)

ROOT = Path(__file__).resolve().parents[2]
PROBLEMS = {problem.name: problem for problem in attention.problems()}


def setup(name: str, which: str = "forward") -> bench_attention.Setup:
    inputs = attention.make_inputs(PROBLEMS[name].shrunk())
    return bench_attention.Setup(inputs, which, 1, "scalar")


def run(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- Cases ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_work_is_counted_by_pairs_that_are_allowed(name):
    problem = PROBLEMS[name].shrunk()
    allowed = problem.allowed()
    shape = (problem.batch, problem.heads, problem.queries, problem.n)
    pairs = torch.ones(shape) if allowed is None else allowed.expand(shape)
    exact = 4 * int(pairs.sum()) * problem.dim
    # Half of N x N leaves half the diagonal out.
    diagonal = 2 * problem.batch * problem.heads * problem.queries * problem.dim
    missing = diagonal if problem.is_causal and not problem.window else 0
    assert problem.flops("forward") == exact - missing
    assert problem.flops("backward") == 2.5 * problem.flops("forward")


def test_decoding_is_bound_by_its_bytes_and_has_no_backward():
    decode = PROBLEMS["f32-decode"]
    assert decode.nbytes() == (2 * 8192 + 2) * 32 * 128 * 4
    assert decode.passes == ("forward",)
    assert not attention.make_inputs(decode.shrunk()).q.requires_grad
    others = [p.nbytes() for p in PROBLEMS.values() if p is not decode]
    assert set(others) == {0}


def test_padding_forbids_from_none_to_three_quarters_of_the_keys():
    assert PROBLEMS["f32-padded"].lengths()[0] == 512
    assert PROBLEMS["f32-padded"].lengths()[-1] == 128
    assert PROBLEMS["f32-swin"].lengths() == [49] * 256


# ---- Contenders ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "which"),
    [(p.name, which) for p in PROBLEMS.values() for which in p.passes],
)
def test_torch_contenders_are_right(name, which):
    made = setup(name, which)
    assert bench_attention.make_torch(made).role == "rival"
    math = bench_attention.make_math(made)
    assert (math is None) == made.problem.only_math


@pytest.mark.parametrize("name", ["f32-n2048-d64", "f32-causal-n128", "f32-window"])
def test_contender_that_is_wrong_is_refused(name):
    made = setup(name)
    out = bench_attention.make_torch(made).run()
    for wrong in (out * 1.01, torch.zeros_like(out), out * float("nan")):
        with pytest.raises(RuntimeError, match="wrong must compute attention, got"):
            made.contender("wrong", lambda out=wrong: out)
    with pytest.raises(RuntimeError, match=r"must return shape .* for one head, got"):
        made.contender("wrong", lambda: out[:, :, 1:])


def test_gradients_that_are_wrong_are_refused():
    made = setup("f32-bias", "backward")
    *grads, bias = bench_attention.make_torch(made).run()
    with pytest.raises(RuntimeError, match="got result 3 of the backward"):
        made.contender("wrong", lambda: [*grads, 2 * bias])
    with pytest.raises(ValueError, match="zip"):
        made.contender("lazy", lambda: grads)


def test_dropout_that_drops_nothing_or_does_not_scale_is_refused():
    torch.manual_seed(0)
    made = setup("f32-dropout")
    whole = replace(made.problem, dropout_p=0.0)
    without = bench_attention.Setup(attention.make_inputs(whole), "forward", 1, "")
    out = bench_attention.make_torch(without).run()
    with pytest.raises(RuntimeError, match="idle must drop elements, got an error"):
        made.contender("idle", lambda: out)
    half = bench_attention.make_torch(made).run() / 2
    with pytest.raises(RuntimeError, match="half must compute attention, got"):
        made.contender("half", lambda: half)


def test_what_is_not_in_the_build_is_unavailable():
    with pytest.raises(attention.Unavailable, match="no_such is not in this build"):
        attention.ours("trainfast.no_such")
    assert attention.ours("trainfast.stats") is trainfast.stats


def test_fallback_of_ours_is_not_timed():
    from trainfast.stats import count_fallback

    assert attention.without_fallback(lambda: 3) == 3
    with pytest.raises(attention.Unavailable, match="torch's path: too odd"):
        attention.without_fallback(lambda: count_fallback("attention", "too odd"))


# ---- Bounds --------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("threads", [1, 2])
def test_multiply_adds_are_done_by_every_lane(lanes, threads):
    if lanes > peak.widest():
        with pytest.raises(RuntimeError, match=f"with {lanes} lanes, got -1"):
            peak.make_multiply_adds(100, lanes, threads)()
        return
    rounds, sink = 7, ctypes.c_float()
    count = rounds * 12 * lanes * threads
    peak.library().peak_multiply_adds(count, lanes, threads, ctypes.byref(sink))
    # Each chain starts at its number + 0.999 and comes nearer to 1 by 0.999 each time.
    chains = sum((i - 0.001) * 0.999**rounds + 1 for i in range(12))
    assert sink.value == pytest.approx(threads * chains, rel=1e-5)
    peak.make_multiply_adds(2 * count, lanes, threads)()


@pytest.mark.parametrize("threads", [1, 2])
def test_multiply_adds_of_pairs_are_done_by_every_lane(threads):
    if not peak.has(peak.PAIRS):
        pytest.skip("no AVX512_BF16")
    rounds, sink = 7, ctypes.c_float()
    count = rounds * 12 * peak.PAIRS * threads
    peak.library().peak_multiply_adds(count, peak.PAIRS, threads, ctypes.byref(sink))
    factors = torch.tensor([0.999, 0.001]).view(torch.bfloat16).double().view(2, 2)
    step = (factors[0] * factors[1]).sum().item()
    chains = sum(i + 0.999 + rounds * step for i in range(12))
    assert sink.value == pytest.approx(threads * chains, rel=1e-5)


def test_bound_of_bfloat16_is_of_pairs_where_there_are_some():
    assert peak.products("avx2", "bfloat16") == peak.products("avx2", "float32") == 8
    assert peak.products("avx512", "float32") == 16
    pairs = peak.products("avx512", "bfloat16") == peak.PAIRS
    assert pairs == peak.has(peak.PAIRS)


@pytest.mark.parametrize("words", [0, 1, 31, 32, 33, 1000])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_read_sees_every_word(words, threads):
    sink = ctypes.c_uint64()
    array = torch.zeros(words + 2, dtype=torch.int64)
    data = (ctypes.c_void_p * 1)(array[1:].data_ptr())
    arguments = (data, (ctypes.c_int64 * 1)(words), 1, threads, ctypes.byref(sink))
    array[0] = array[-1] = 64  # not to be read
    for i in range(1, words + 1):
        array[i] = i
        peak.library().peak_read(*arguments)
        assert sink.value == i
        array[i] = 0
    assert peak.library().peak_read(*arguments) == threads
    assert sink.value == 0


def test_every_backend_of_the_cpu_has_a_peak():
    names = {row["name"] for row in trainfast.backends()} - {"cuda", "simt"}
    assert names <= set(peak.LANES)


# ---- The whole -----------------------------------------------------------------------


def test_bad_arguments_are_named(capsys):
    for words, message in (
        (["--pass", "forward", "--json", "auto"], "--json must be a path unless"),
        (["--memory", "--heads", "1", "--json", "auto"], "--json must be a path"),
        (["--pass", "sideways"], "invalid choice: 'sideways'"),
        (["--memory", "--heads", "0"], "--heads must be at least 1, got 0"),
    ):
        with pytest.raises(SystemExit):
            bench_attention.parse(words)
        assert message in capsys.readouterr().err


def test_results_without_ours_are_not_published(monkeypatch):
    def missing(setup):
        raise attention.Unavailable("not in this build")

    monkeypatch.setitem(bench_attention.CONTENDERS, "ours", missing)
    args = bench_attention.parse(["--json", "auto", "--threads", "1"])
    problem = PROBLEMS["f32-swin"].shrunk()
    with pytest.raises(SystemExit, match="results need trainfast: not in this build"):
        bench_attention.run_problem(args, "scalar", problem, "forward")
    without = {"bytes": 1}, {"skipped": "no backward"}
    child = iter(reversed(without))
    monkeypatch.setattr(attention_memory, "run_child", lambda *_: next(child))
    with pytest.raises(SystemExit, match="results need trainfast: no backward"):
        attention_memory.run(args, "scalar")


@pytest.mark.slow
def test_smoke_run_writes_valid_json_and_a_table(tmp_path):
    path = tmp_path / "attention.json"
    out = run("benchmarks.bench_attention", "--smoke", "--json", str(path))
    full = json.loads(path.read_text())
    assert full["bench"] == "attention"
    assert len(full["cases"]) == sum(len(p.passes) for p in PROBLEMS.values())
    for case in full["cases"]:
        assert {"rival", "bound"} <= {line["role"] for line in case["lines"]}
        assert case["best_rival"].startswith("torch")
        assert case["title"] in out
        for line in case["lines"]:
            assert line["gf_per_s"] > 0
            assert line["ns_per_param"] is None
            assert 0 < line["us"]["p10"] <= line["us"]["median"] <= line["us"]["p90"]
    assert len(full["run"]["openmp"]) <= 1, "two OpenMP runtimes contend"
    rows = [row for row in table.table(full).splitlines() if row.startswith("|")]
    assert rows[0].startswith("| case | trainfast | GF/s | bound | % of bound |")
    assert [row.count("|") for row in rows] == [9] * (len(full["cases"]) + 2)
    assert " GB/s |" in next(row for row in rows if "| f32 one query" in row)


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own(tmp_path):
    path = tmp_path / "memory.json"
    words = ["--memory", "--smoke", "--heads", "2", "--contender", "torch", "math"]
    run("benchmarks.bench_attention", *words, "--json", str(path))
    full = json.loads(path.read_text())
    names = [case["name"] for case in full["cases"]]
    assert names == [f"memory-h2-t{threads}" for threads in (1, 2, 8, 64)]
    case = full["cases"][0]
    fused, unfused = case["lines"]
    n, heads = attention_memory.SMOKE_LENGTH, 2
    assert case["results_bytes"] == 4 * heads * n * attention_memory.DIM * 4
    assert unfused["bytes"] >= heads * n * n * 4, "the scores are a matrix"
    assert fused["bytes"] < unfused["bytes"]
    rows = [row for row in table.table(full).splitlines() if row.startswith("|")]
    assert rows[0] == "| case | output and gradients | trainfast | rivals |"
    assert "torch math" in rows[2] and rows[2].count("|") == 5


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 64])
def test_memory_of_one_long_head_does_not_grow_with_threads(threads):
    """Of it 16 MiB are results."""
    words = ["benchmarks.attention_memory", "ours", "1", "--threads", str(threads)]
    assert json.loads(run(*words))["bytes"] <= 40 << 20


def test_memory_without_ours_says_why(monkeypatch):
    def missing(inputs):
        raise attention.Unavailable("not in this build")

    monkeypatch.setitem(attention_memory.FORWARDS, "ours", missing)
    with pytest.raises(attention.Unavailable):
        attention_memory.growth("ours", 1, 64)
    case = {"title": "t", "results_bytes": 0, "lines": [], "skipped": {"ours": "no"}}
    assert "  ours: not run, no" in attention_memory.case_text(case)


def test_harness_shows_the_rates_that_a_case_has():
    one = harness.Contender("a", int, role="ours")
    case = harness.run_case(
        harness.Case("c", "a case", "float32", flops=2_000_000_000),
        [one],
        harness.Budget(0.0, 0, 1, 1),
    )
    case["lines"] = harness.make_lines(
        harness.Case("c", "", "", flops=500), [one], {"a": [100.0]}, {}
    )
    assert case["lines"][0]["gf_per_s"] == 5.0
    assert case["lines"][0]["gb_per_s"] is None
    title, head, *_rows = harness.case_text(case).splitlines()
    assert title.startswith("a case: 2 GF, 1 rounds")
    assert "GF/s" in head and "GB/s" not in head and "ns/param" not in head
