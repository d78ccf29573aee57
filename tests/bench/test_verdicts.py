"""Verdicts on planted times: what is slower, what is the same, what cannot be known."""

import json
import math

import pytest

from tests.bench.planted import processes, results, seeded, timing
from trainfast.bench.data_sheets import peaks
from trainfast.bench.intervals import changed, faster, verdict
from trainfast.bench.report import BenchReport
from trainfast.probe.gains import Gain


def verdicts(factor, seeds, **noise):
    """How often which verdict falls on a change by this factor in time."""
    found = {"FASTER": 0, "SLOWER": 0, "SAME": 0, "UNDECIDED": 0}
    for seed in range(seeds):
        rng = seeded(seed)
        base, now = (processes(t, rng=rng, **noise) for t in (1.0, factor))
        found[verdict(changed(base, now))] += 1
    return found


def test_planted_change_is_found():
    assert verdicts(1.3, 20) == {"FASTER": 0, "SLOWER": 20, "SAME": 0, "UNDECIDED": 0}
    assert verdicts(0.7, 20)["FASTER"] == 20


def test_equal_times_are_the_same():
    found = verdicts(1.0, 40)
    assert found["FASTER"] == found["SLOWER"] == 0
    assert found["SAME"] >= 36


def test_noisy_processes_are_undecided():
    found = verdicts(1.0, 20, between=0.2)
    assert found["UNDECIDED"] >= 19


def test_few_processes_claim_little():
    found = verdicts(1.0, 40, n=2, between=0.03)
    assert found["FASTER"] == found["SLOWER"] == 0


def test_interval_holds_the_truth_as_often_as_it_says():
    held = 0
    for seed in range(60):
        rng = seeded(seed)
        base, now = (processes(1.0, between=0.05, rng=rng) for _ in range(2))
        gain = changed(base, now)
        held += gain.low <= 1 <= gain.high
    assert held >= 53


def test_drift_of_the_machine_does_not_touch_a_ratio_of_neighbours():
    drift = [[1.0, 2.0, 4.0, 8.0], [3.0, 1.0, 5.0, 2.0]]
    gain = faster([[3 * t for t in p] for p in drift], drift)
    assert (gain.low, gain.gain, gain.high) == pytest.approx((3, 3, 3))


def test_one_process_has_no_interval():
    one = processes(1.0, n=1, rng=seeded())
    gain = changed(one, processes(9.0, rng=seeded()))
    assert (gain.low, gain.high) == (0, math.inf) and gain.gain < 0.2
    assert verdict(gain) == "UNDECIDED"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.051, 9.0, "FASTER"),
        (1.049, 9.0, "UNDECIDED"),
        (0.96, 1.04, "SAME"),
        (0.94, 1.04, "UNDECIDED"),
        (0.1, 0.952, "SLOWER"),
        (0.1, 0.96, "UNDECIDED"),
        (0.5, 2.0, "UNDECIDED"),
    ],
)
def test_verdict_is_of_the_whole_interval(low, high, expected):
    assert verdict(Gain(1.0, low, high)) == expected


# ---- The report ----------------------------------------------------------------------


def test_report_says_where_a_rival_is_faster():
    rng = seeded()
    report = BenchReport(results(timing(rng=rng), timing("amp-step", 3e-3, rng=rng)))
    assert [row.verdict for row in report.rows] == ["FASTER", "SLOWER"]
    assert report.notes() == ["amp-step on cpu: torch fused is faster"]
    assert "amp-step on cpu: torch fused is faster" in str(report)
    assert report.ok  # it is a fact, not a fault


def test_share_is_of_the_higher_memory_rate_or_of_the_products():
    rng = seeded()
    memory = timing(ours=1e-3, within=0, between=0, rng=rng)
    step = timing(
        "train-gpt", 1e-3, nbytes=0, flops=10**8, within=0, between=0, rng=rng
    )
    shares = [row.of_roof for row in BenchReport(results(memory, step)).rows]
    assert shares == pytest.approx([0.4, 0.5])  # 8 of 20 GB/s; 0.1 of 0.2 TFLOP/s


def test_data_sheet_of_a_known_gpu_is_beside_the_measured_rate():
    machine = {"cpu": "Fast CPU", "cores": 2, "backend": "avx2"}
    roofs = {"cuda": {"float32": 40.0, "copy": 900.0, "update": 900.0}}
    step = timing("train-gpt", device="cuda", flops=4 * 10**10, between=0, within=0,
                  rng=seeded())  # fmt: skip
    for gpu, share in (("NVIDIA GeForce RTX 4090", 40 / 82.6), ("RTX 9999", None)):
        made = results(step, roofs=roofs, machine=machine | {"gpu": gpu})
        (row,) = BenchReport(made).rows
        assert row.of_roof == pytest.approx(1.0)
        assert row.of_data_sheet == (share and pytest.approx(share))
        assert ("MFU by data sheet" in str(BenchReport(made))) == (share is not None)


@pytest.mark.parametrize(
    ("gpu", "float16"),
    [
        ("Tesla T4", 65.0),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L40", None),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 3050", 18.2),
        ("NVIDIA GeForce RTX 3050 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4070", 58.3),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", None),
        ("NVIDIA GeForce RTX 4080 SUPER", 104.4),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        (None, None),
    ],
)
def test_data_sheet_is_found_by_the_whole_name(gpu, float16):
    assert peaks(gpu).get("float16") == float16


def test_comparison_fails_where_something_is_slower():
    rng = seeded()
    base = results(timing(rng=rng), timing("amp-step", rng=rng))
    now = results(timing(rng=rng), timing("amp-step", 1.5e-3, rng=rng))
    report = BenchReport(now, base)
    assert [c.verdict for c in report.changes] == ["SAME", "SLOWER"]
    assert report.changes[1].rivals == pytest.approx(1, rel=0.05)
    assert not report.ok and "Changes since the base" in str(report)
    assert BenchReport(base, base).ok


def test_what_the_rivals_changed_by_too_is_undecided():
    """The whole machine is slower, or in the other direction faster."""
    rng = seeded()
    quick, slow = (results(timing(rng=rng)) for _ in range(2))
    for one in slow.timings:
        for processes_of_one in one.times.values():
            for rounds in processes_of_one:
                rounds[:] = [1.3 * t for t in rounds]
    for now, base, gain in ((slow, quick, 1 / 1.3), (quick, slow, 1.3)):
        (change,) = BenchReport(now, base).changes
        assert change.verdict == "UNDECIDED"
        assert change.gain.gain == pytest.approx(gain, rel=0.05)
        assert change.rivals == pytest.approx(gain, rel=0.05)
        assert BenchReport(now, base).ok


def test_base_of_another_machine_is_told():
    rng = seeded()
    base = results(timing(rng=rng))
    other = results(
        timing(rng=rng),
        versions={"trainfast": "0.2", "torch": "2.14.0"},
        threads=4,
        roofs={"cpu": {"float32": 0.2, "copy": 10.0, "update": 20.0}},
    )
    setup, busy = BenchReport(other, base).notes()
    assert "torch 2.13.0 there, 2.14.0 here; threads 2 there, 4 here" in setup
    assert "trainfast" not in setup  # that it changed is why one compares
    assert "cpu copied 16 GB/s then and 10 now" in busy
    assert BenchReport(base, base).notes() == []


def test_what_did_not_run_and_what_disturbed_is_told():
    made = results(
        timing(n=1, rng=seeded()),
        processes=1,
        others_share=0.3,
        left_out=1,
        missing={"amp-step on cpu": "needs torch"},
        failed={"loader on cpu": "OSError: full"},
    )
    text = str(BenchReport(made))
    for part in ("amp-step on cpu did not run: needs torch", "FAILED: OSError: full",
                 "one process has no interval", "1 of 1 measurements are",
                 "other programs used 30%"):  # fmt: skip
        assert part in text
    assert not BenchReport(made).ok


def test_report_is_json_and_html():
    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    rng = seeded()
    base = results(timing(rng=rng))
    report = BenchReport(results(timing(n=1, rng=rng)), base)
    found = json.loads(report.to_json(), parse_constant=no_constant)
    assert found["rows"][0]["gain"]["low"] is None
    assert found["changes"][0]["verdict"] == "UNDECIDED"
    html = report._repr_html_()
    assert html.count("<table") == html.count("</table>") == 3
