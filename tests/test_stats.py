"""trainfast.stats(): counts, snapshots, and what a report looks like."""

import json
import sys
import threading

import numpy as np
import pytest

import trainfast
from trainfast.report import Report, Table
from trainfast.stats import count_call, count_fallback


@pytest.fixture(autouse=True)
def no_counts():
    trainfast.reset_stats()
    yield
    trainfast.reset_stats()


def test_nothing_done_counts_nothing():
    report = trainfast.stats()
    assert report.to_dict() == {"calls": {}, "fallbacks": {}}
    calls, _, rest = str(report).partition("\n\n")
    assert (calls, rest.splitlines()[0]) == ("calls: none", "fallbacks: none")
    assert "made before trainfast.patch() stay torch's" in rest
    assert "before trainfast.patch() stay torch&#x27;s" in report._repr_html_()


def test_an_interactive_session_shows_what_print_shows():
    for report in (trainfast.stats(), trainfast.selftest(["scalar"])):
        assert repr(report) == str(report)
        assert repr(report).splitlines()[-1] not in str(report.tables()[-1])


def test_calls_are_counted_by_capability_and_backend():
    for backend in ("avx2", "avx2", "cuda"):
        count_call("adamw", backend)
    assert "patch()" not in str(trainfast.stats())
    count_call("attention", "cuda")
    calls = trainfast.stats().calls
    assert calls == {"adamw": {"avx2": 2, "cuda": 1}, "attention": {"cuda": 1}}


def test_fallbacks_are_counted_by_reason():
    for reason in ("sparse", "sparse", "complex"):
        count_fallback("adamw", reason)
    report = trainfast.stats()
    assert report.fallbacks == {"adamw": {"complex": 1, "sparse": 2}}
    assert report.calls == {}


def test_report_is_a_snapshot():
    count_call("adamw", "avx2")
    before = trainfast.stats()
    count_call("adamw", "avx2")
    assert before.calls == {"adamw": {"avx2": 1}}
    assert trainfast.stats().calls == {"adamw": {"avx2": 2}}


def test_reset_forgets_everything():
    count_call("adamw", "avx2")
    count_fallback("adamw", "sparse")
    trainfast.reset_stats()
    assert trainfast.stats().to_dict() == {"calls": {}, "fallbacks": {}}


def test_a_real_step_is_counted_once():
    optimizer = trainfast.numpy.AdamW([np.ones(3, np.float32)])
    trainfast.reset_stats()  # a new optimizer may have tried its hyperparameters
    optimizer.step([np.ones(3, np.float32)])
    counts = [n for row in trainfast.stats().calls.values() for n in row.values()]
    assert counts == [1]
    assert trainfast.stats().fallbacks == {}


def test_a_compiled_call_is_a_call_and_no_export():
    torch = pytest.importorskip("torch")
    from trainfast.torch import attention, scaled_dot_product_attention

    q = torch.randn(1, 2, 5, 8)
    for function in (attention, scaled_dot_product_attention):
        torch._dynamo.reset()
        trainfast.reset_stats()
        torch.compile(function, backend="aot_eager", fullgraph=True)(q, q, q)
        assert sum(trainfast.stats().calls["attention"].values()) == 1
        assert trainfast.stats().fallbacks == {}


def test_an_exported_call_is_a_fallback():
    torch = pytest.importorskip("torch")
    from trainfast.torch import scaled_dot_product_attention

    class Model(torch.nn.Module):
        def forward(self, q):
            return scaled_dot_product_attention(q, q, q)

    torch.export.export(Model(), (torch.randn(1, 2, 5, 8),), strict=True)
    [reason] = trainfast.stats().fallbacks["attention"]
    assert reason.startswith("torch.export")


def test_threads_lose_no_count():
    each, n_threads = 20_000, 4

    def work():
        for _ in range(each):
            count_call("adamw", "avx2")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(n_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert trainfast.stats().calls == {"adamw": {"avx2": each * n_threads}}


def test_report_prints_an_aligned_table():
    count_call("adamw", "avx512")
    for _ in range(12):
        count_call("attention", "cuda")
    assert str(trainfast.stats()).splitlines() == [
        "calls",
        "capability  backend  calls",
        "----------  -------  -----",
        "adamw       avx512       1",
        "attention   cuda        12",
        "",
        "fallbacks: none",
    ]


def test_report_is_json_and_escaped_html():
    count_fallback("adamw", "<b>&")
    report = trainfast.stats()
    assert json.loads(report.to_json()) == report.to_dict()
    html = report._repr_html_()
    assert "&lt;b&gt;&amp;" in html and "<b>&" not in html
    assert html.count("<table") == html.count("</table>") == 1


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (None, ""),
        (True, "yes"),
        (7, "7"),
        (0.000123456, "0.0001235"),
        (9999.6, "10000"),
        (-22374.9, "-22370"),
        (1.5e12, "1.5e+12"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_table_writes_a_cell_readably(cell, text):
    last = str(Table("title", ("name", "value"), [("x", cell)])).splitlines()[-1]
    assert last.split() == ["x", *text.split()]


WIDE = Table(
    "Causes", ("cause", "cure"), [("data", "make batches cheaper, " * 3 + "x")]
)


def test_last_column_is_wrapped_only_where_the_terminal_ends():
    assert WIDE.text(50).splitlines() == [
        "Causes",
        "cause  cure",
        "-----  -------------------------------------------",
        "data   make batches cheaper, make batches cheaper,",
        "       make batches cheaper, x",
    ]
    assert max(map(len, WIDE.text(10).splitlines())) == 31  # a column of 24 at least
    assert WIDE.text() == WIDE.text(1000) == str(WIDE)


def test_table_without_names_has_only_its_rows():
    notes = Table("Notes", ("",), [("one",), ("two",)])
    assert str(notes) == "Notes\none\ntwo"
    assert "<th" not in notes.html() and notes.html().count("<tr>") == 2


def test_verb_prints_json_or_what_fits_the_terminal(monkeypatch):
    class Causes(Report):
        def tables(self):
            return [WIDE]

        def to_dict(self):
            return {"data": 1}

    monkeypatch.setenv("COLUMNS", "50")
    assert json.loads(Causes().for_terminal(True)) == {"data": 1}
    assert Causes().for_terminal(False) == str(WIDE)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert Causes().for_terminal(False) == WIDE.text(50)


def test_report_without_its_own_tables_says_so():
    with pytest.raises(NotImplementedError):
        str(Report())
