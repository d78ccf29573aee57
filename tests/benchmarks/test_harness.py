"""The benchmarks' own logic: turns, statistics, JSON, tables. No time is asserted."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks import (  # noqa: E402
    bench_adamw,
    bench_amp,
    floor,
    harness,
    machine,
    optimizers,
    table,
)
from benchmarks.harness import Budget, Case, Contender  # noqa: E402
from trainfast.bench import load, turns  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CASE = Case("tiny", "2 x 50", "float32", tensors=2, params=100, nbytes=2800)


def contenders() -> list[Contender]:
    return [
        Contender("mine", int, role="ours"),
        Contender("slow", int),
        Contender("fast", int, nbytes=1400, note="does half"),
        Contender("floor", int, role="bound"),
    ]


TIMES = {
    "mine": [1000.0, 2000.0, 1000.0],
    "slow": [4000.0, 8000.0, 4000.0],
    "fast": [3000.0, 3000.0, 1500.0],
    "floor": [500.0, 1000.0, 500.0],
}


def report() -> dict:
    case = harness.run_case(CASE, contenders(), Budget(0.0, 0, 2, 2))
    case["lines"] = harness.make_lines(CASE, contenders(), TIMES, {})
    case["best_rival"] = harness.best_rival(contenders(), TIMES)
    how = machine.describe_run(2, "scalar") | {"conditions": "static gradients"}
    return harness.make_report("adamw", machine.describe(), how, [case])


# ---- Measuring -----------------------------------------------------------------------


def test_contenders_take_turns_with_prepare_outside_the_clock():
    calls = []

    def clock(run):
        calls.append("start")
        run()
        calls.append("stop")
        return float(len(calls)), None

    both = [
        Contender("a", lambda: calls.append("a"), prepare=lambda: calls.append("pa")),
        Contender("b", lambda: calls.append("b")),
    ]
    times, hosts = harness.measure(both, Budget(0.0, 1, 2, 5), clock)
    one_round = ["pa", "start", "a", "stop", "start", "b", "stop"]
    assert calls == 3 * one_round  # one to warm up and two that count
    assert times == {"a": [11.0, 18.0], "b": [14.0, 21.0]}
    assert hosts == {"a": [], "b": []}


def test_rounds_stay_between_their_limits():
    one = [Contender("a", int)]
    assert len(harness.measure(one, Budget(0.0, 0, 4, 9))[0]["a"]) == 4
    assert len(harness.measure(one, Budget(60.0, 0, 1, 7))[0]["a"]) == 7


def test_garbage_collection_is_off_inside_and_restored_after_an_error():
    import gc

    seen = []

    def fail():
        seen.append(gc.isenabled())
        raise ValueError("stop")

    assert gc.isenabled()
    with pytest.raises(ValueError, match="stop"):
        harness.measure([Contender("a", fail)], Budget(0.0))
    assert seen == [False]
    assert gc.isenabled()


def test_same_name_twice_is_an_error():
    with pytest.raises(ValueError, match="contenders must have different names, got"):
        harness.measure([Contender("a", int), Contender("a", int)], Budget(0.0))


def test_unknown_role_is_an_error():
    with pytest.raises(ValueError, match=r"role must be one of .*, got 'judge'"):
        Contender("a", int, role="judge")


# ---- Statistics ----------------------------------------------------------------------


def test_summarize_interpolates():
    assert harness.summarize(list(range(11)), scale=2) == {
        "median": 2.5,
        "p10": 0.5,
        "p90": 4.5,
    }
    with pytest.raises(ValueError, match="samples must not be empty, got 0"):
        harness.summarize([])


def test_ratio_is_formed_round_by_round():
    # Medians alone would say 2; within every round it is 4, 4 and 1.
    assert harness.ratio([4.0, 8.0, 2.0], [1.0, 2.0, 2.0])["median"] == 4.0
    with pytest.raises(ValueError, match="one time per round of under, got 1 and 2"):
        harness.ratio([1.0], [1.0, 2.0])


def test_lines_compare_with_bound_best_rival_and_ours():
    lines = harness.make_lines(CASE, contenders(), TIMES, {"mine": [500.0] * 3})
    mine, slow, fast, bound = lines
    assert [line["contender"] for line in lines] == ["mine", "slow", "fast", "floor"]
    assert harness.best_rival(contenders(), TIMES) == "fast"
    assert mine["us"] == {"median": 1.0, "p10": 1.0, "p90": pytest.approx(1.8)}
    assert mine["host_us"]["median"] == 0.5
    assert slow["host_us"] is None
    assert mine["ns_per_param"] == 10.0
    assert (mine["bytes"], fast["bytes"]) == (2800, 1400)
    assert mine["gb_per_s"] == 2.8
    assert mine["percent_of_bound"]["median"] == 50.0
    assert bound["percent_of_bound"] == {"median": 100.0, "p10": 100.0, "p90": 100.0}
    assert mine["ahead_of_best_rival"]["median"] == 1.5  # of 3, 1.5 and 1.5
    assert fast["ahead_of_best_rival"]["median"] == 1.0
    assert slow["times_ours"]["median"] == 4.0
    assert bound["ahead_of_best_rival"] is None
    assert bound["times_ours"] is None


def test_lines_without_ours_and_bound_have_no_such_ratio():
    rivals = [c for c in contenders() if c.role == "rival"]
    line = harness.make_lines(CASE, rivals, TIMES, {})[0]
    assert line["times_ours"] is None
    assert line["percent_of_bound"] is None
    assert line["ahead_of_best_rival"]["median"] == 0.375  # of 0.75, 0.375 and 0.375


# ---- Reports -------------------------------------------------------------------------


def test_case_text_aligns_and_says_when_it_was_noisy():
    case = report()["cases"][0]
    case["others_cpu_share"] = 0.4
    case["skipped"] = {"deepspeed": "deepspeed is not installed"}
    title, *body = harness.case_text(case).splitlines()
    assert title.endswith("CPU used by others 40 % (NOISY)")
    assert len({line.index("10.0") for line in body if line.startswith("mine")}) == 1
    assert "  fast: does half" in body
    assert "  deepspeed: not run, deepspeed is not installed" in body
    case["others_cpu_share"] = 0.01
    assert "NOISY" not in harness.case_text(case)


def test_align_pads_the_first_column_right_and_the_others_left():
    assert harness.align([["a", "bb"], ["ccc", "d"]]) == "a    bb\nccc   d"


def test_heading_says_when_the_machine_was_busy():
    about, how = machine.describe(), machine.describe_run(2, "avx2")
    how["load_average_at_start"] = 1.5
    text = harness.heading("AdamW", about, how)
    assert "load average at start 1.5: the machine was BUSY" in text
    how["load_average_at_start"] = 0.1
    assert "BUSY" not in harness.heading("AdamW", about, how)
    assert about["torch"] in text and "backend avx2" in text


def test_json_comes_back_and_refuses_nan(tmp_path):
    path = tmp_path / "new folder" / "x.json"
    full = report()
    harness.write_json(full, path)
    assert json.loads(path.read_text()) == full
    full["cases"][0]["lines"][0]["gb_per_s"] = float("nan")
    with pytest.raises(ValueError, match="not JSON compliant"):
        harness.write_json(full, tmp_path / "nan.json")
    assert not (tmp_path / "nan.json").exists()


def test_machine_is_described():
    about = machine.describe()
    assert about["cpu"] and about["cores"] >= 1 and about["torch"] == torch.__version__
    how = machine.describe_run(3, "avx512")
    assert (how["threads"], how["backend"]) == (3, "avx512")
    assert how["date"].endswith("+00:00")


def test_command_names_the_variables_that_choose_instructions(monkeypatch):
    for name in machine.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    plain = machine.describe_run(1, "avx2")["command"]
    monkeypatch.setenv("TRAINFAST_BACKEND", "avx2")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    command = machine.describe_run(1, "avx2")["command"]
    assert command == f"TRAINFAST_BACKEND=avx2 ONEDNN_MAX_CPU_ISA=AVX2 {plain}"


@pytest.mark.parametrize(
    ("cpu", "flags", "gpu", "expected"),
    [
        ("AMD EPYC", ["avx2", "avx512f"], "", "amd-epyc-avx512-2c"),
        (
            "Intel(R) Xeon(R) CPU @ 2.20GHz",
            ["avx2"],
            "",
            "intel-xeon-avx2-2c",
        ),
        ("aarch64", [], "", "aarch64-baseline-2c"),
        ("AMD EPYC", ["avx2"], "NVIDIA H200", "nvidia-h200"),
    ],
)
def test_slug_names_the_machine(cpu, flags, gpu, expected):
    about = {"cpu": cpu, "flags": flags, "cores": 2, "gpu": gpu}
    assert machine.slug(about) == expected


def test_other_load_is_what_this_process_did_not_use(monkeypatch):
    busy = iter([10.0, 11.5])
    times = iter([os.times_result((0, 0, 0, 0, 50)), os.times_result((1, 0, 0, 0, 51))])
    monkeypatch.setattr(load, "_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(machine.os, "times", lambda: next(times))
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _pid: {0, 1})
    with load.OtherLoad() as others:
        pass
    assert others.share == 0.25  # half a second of two on two cores


# ---- Tables --------------------------------------------------------------------------


def test_table_has_a_row_per_case():
    text = table.table(report())
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 3
    assert {row.count("|") for row in rows} == {rows[0].count("|")}
    assert rows[2] == (
        "| 2 x 50 | 1 us | 10.00 | 3 | 50 (50-50) | fast 3 us | 1.50 (1.50-2.70) "
        "| slow 4.0 |"
    )


@pytest.mark.parametrize("uses", ["AVX2", "AVX512"])
def test_table_says_that_torch_was_held_to_avx2(uses):
    full = report()
    full["machine"] |= {"flags": ["avx2", "avx512f"], "torch_cpu": uses}
    assert ("held to AVX2" in table.table(full)) == (uses == "AVX2")


def test_table_without_ours_has_dashes():
    full = report()
    lines = full["cases"][0]["lines"]
    full["cases"][0]["lines"] = [line for line in lines if line["role"] == "rival"]
    row = table.table(full).splitlines()[-1]
    assert row.startswith("| 2 x 50 | - | - | - | - | fast 3 us | - |")


def test_table_on_a_gpu_has_host_time():
    full = report()
    for line in full["cases"][0]["lines"]:
        line["host_us"] = {"median": 55.0, "p10": 50.0, "p90": 60.0}
    full["machine"]["gpu"] = "NVIDIA T4"
    text = table.table(full)
    assert "| host time |" in text
    assert "| 2 x 50 | 1 us | 55 us |" in text
    assert "NVIDIA T4 (driver" in text


def test_page_is_replaced_between_the_marks(tmp_path, capsys):
    results, page = tmp_path / "m_adamw.json", tmp_path / "page.md"
    harness.write_json(report(), results)
    page.write_text(f"above\n{table.BEGIN}\nold\n{table.END}\nbelow\n")
    command = [str(results), "--page", str(page)]
    assert table.main([*command, "--check"]) == 1
    assert "is not what benchmarks.table makes" in capsys.readouterr().err
    assert "old" in page.read_text()
    assert table.main(command) == 0
    text = page.read_text()
    assert text.startswith(f"above\n{table.BEGIN}\n### AdamW")
    assert text.endswith(f"\n{table.END}\nbelow\n")
    assert "old" not in text
    assert table.main([*command, "--check"]) == 0
    page.write_text("no marks")
    with pytest.raises(ValueError, match="the page must contain <!-- benchmarks -->"):
        table.main(command)


def test_committed_page_is_what_the_results_make():
    assert table.main(["--page", str(ROOT / "docs" / "benchmarks.md"), "--check"]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 0}, "schema must be 1, got 0"),
        ({"run": {"smoke": True}}, "must not be a smoke test"),
    ],
)
def test_table_refuses_what_must_not_be_published(tmp_path, change, message):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(report() | change))
    with pytest.raises(ValueError, match=message):
        table.load(path)


@pytest.mark.parametrize(
    "path", sorted(table.RESULTS.glob("*.json")), ids=lambda path: path.name
)
def test_published_results_make_tables(path):
    assert table.table(table.load(path)).count("\n| ") >= 3


# ---- The AdamW benchmark -------------------------------------------------------------


def test_gpt2_has_its_148_tensors():
    shapes = optimizers.gpt2_shapes()
    assert len(shapes) == 148
    assert sum(torch.Size(shape).numel() for shape in shapes) == 124_439_808


def test_bytes_count_four_reads_and_three_writes():
    per_param = {p.name: p.nbytes() / p.params for p in bench_adamw.problems()}
    assert per_param["50m-f32"] == 28
    assert per_param["50m-bf16"] == 14
    assert per_param["50m-bf16-f32state"] == 22


def test_a_contender_that_does_nothing_is_refused():
    old, grad = torch.full((64,), 0.02), torch.full((64,), 0.01)
    with pytest.raises(RuntimeError, match="idle must do AdamW's first step, got"):
        optimizers.check_first_step("idle", old, old, grad)
    with pytest.raises(RuntimeError, match="nan off on average"):
        optimizers.check_first_step("broken", old * float("nan"), old, grad)


@pytest.mark.parametrize("name", [p.name for p in bench_adamw.problems()])
def test_torch_contenders_do_the_first_step(name):
    problem = next(p for p in bench_adamw.problems() if p.name == name).shrunk()
    setup = optimizers.Setup(problem, "cpu", 1, fresh_grads=False)
    assert bench_adamw.make_fused(setup).prepare is None
    assert bench_adamw.make_foreach(setup).role == "rival"


def test_fresh_gradients_are_new_tensors_with_the_same_values():
    problem = bench_adamw.problems()[0].shrunk()
    setup = optimizers.Setup(problem, "cpu", 1, fresh_grads=True)
    params = setup.parameters()
    grad = params[0].grad
    prepare = setup.renew(params)
    prepare()
    assert params[0].grad is not grad
    assert torch.equal(params[0].grad, grad)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("numels", [(1, 63, 0, 64, 65, 1000), (63, 40)])
def test_floor_touches_every_element_and_nothing_else(numels, threads):
    dtypes = torch.float32, torch.float32, torch.uint8, torch.bfloat16, torch.int32
    hows = floor.UPDATE, floor.READ, floor.UPDATE, floor.WRITE, floor.UPDATE
    buffers = [[torch.full((n + 2 * 16,), 7, dtype=d) for n in numels] for d in dtypes]
    inner = [[b[16 : b.numel() - 16] for b in row] for row in buffers]
    inner[4] = [row[: -(-row.numel() // 128)] for row in inner[4]]  # as scales
    columns = list(zip(inner, hows, strict=True))
    for zero in (0, 3):  # with 3 the writes show
        floor.make_floor(columns, threads, zero)()
        for whole, parts, how in zip(buffers, inner, hows, strict=True):
            for buffer, part in zip(whole, parts, strict=True):
                changed = how == floor.WRITE or (zero and how == floor.UPDATE)
                assert bool((part != 7).all() if changed else (part == 7).all())
                rest = torch.cat([buffer[:16], buffer[16 + part.numel() :]])
                assert bool((rest == 7).all())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--seconds", "nan"], "--seconds must be at least 0, got nan"),
        (["--smoke", "--json", "auto"], "--json must be a path unless everything runs"),
        (["--case", "nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_bad_arguments_are_named(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        bench_adamw.parse(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_memory_that_is_not_there_skips_the_case(monkeypatch, capsys):
    monkeypatch.setattr(machine, "available_bytes", lambda: 2**30)
    args = bench_adamw.parse(["--without-ours", "--contender", "fused"])
    assert bench_adamw.run_problem(args, bench_adamw.problems()[0]) is None
    expected = "1 x 50,000,000 f32: not run, needs 1.5 GiB and 1.0 GiB are available"
    assert expected in capsys.readouterr().out


def test_without_a_compiler_the_floor_says_so(monkeypatch):
    monkeypatch.setenv("CC", "false")
    floor.library.cache_clear()
    with pytest.raises(RuntimeError, match=r"false .*floor\.c .* failed"):
        floor.library()


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], ["--without-ours", "--fresh-grads"]])
def test_smoke_run_writes_valid_json(tmp_path, extra):
    path = tmp_path / "smoke.json"
    words = ["--smoke", "--json", str(path), *extra]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_adamw", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    full = json.loads(path.read_text())
    assert full["schema"] == harness.SCHEMA
    assert full["run"]["smoke"] is True
    assert "python -m benchmarks.bench_adamw --smoke" in full["run"]["command"]
    assert len(full["cases"]) == len(bench_adamw.problems())
    roles = {"rival", "bound"} if extra else set(turns.ROLES)
    for case in full["cases"]:
        assert {line["role"] for line in case["lines"]} == roles, case["skipped"]
        assert case["rounds"] >= 3
        assert case["title"] in done.stdout
        for line in case["lines"]:
            assert 0 < line["us"]["p10"] <= line["us"]["median"] <= line["us"]["p90"]
    assert full["run"]["backend"] == ("none" if extra else used_backend())
    assert len(full["run"]["openmp"]) <= 1, "two OpenMP runtimes contend"


def used_backend() -> str:
    trainfast = importlib.import_module("trainfast")
    return next(row["name"] for row in trainfast.backends() if row["in_use"])


@pytest.mark.slow
def test_amp_smoke_run_writes_valid_json(tmp_path):
    path = tmp_path / "amp.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_amp", "--smoke", "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    full = json.loads(path.read_text())
    assert full["bench"] == "amp"
    assert len(full["cases"]) == len(bench_amp.problems())
    for case in full["cases"]:
        assert {line["role"] for line in case["lines"]} == set(turns.ROLES)
        assert case["best_rival"].startswith("torch"), "ours is no rival of ours"
    assert "AMP, loss scaling" in table.table(full)


def test_amp_contender_that_does_not_clip_is_refused():
    problem = bench_amp.problems()[0].shrunk()
    setup = optimizers.Setup(problem, "cpu", 1, fresh_grads=False)
    with pytest.raises(RuntimeError, match="idle must clip to norm"):
        bench_amp.make_clip(setup, "idle", lambda params, limit: None, "rival")
