"""The benchmark of Muon: its cases, and contenders that must do the work."""

import pytest
import torch

from benchmarks import bench_muon
from benchmarks.optimizers import Problem, Setup

HAS_TORCHS = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has none"
)


def setup():
    return Setup(Problem("small", "small", ((3, 5), (5, 3))), "cpu", 1, False)


def test_cases_are_matrices_and_their_products_are_counted():
    last = bench_muon.problems()[-1]
    assert last.shapes == ((768, 2304), (768, 768), (768, 3072), (3072, 768))
    # of 3 x 5: X X^T and P X take 2 * 3 * 3 * 5 each, G G 2 * 3 * 3 * 3, five times
    assert bench_muon.flops(setup().problem) == 2 * 5 * (90 + 90 + 54)


@HAS_TORCHS
@pytest.mark.parametrize("name", bench_muon.CONTENDERS)
def test_contenders_are_timed_with_their_error(name):
    note = bench_muon.CONTENDERS[name](setup()).note
    assert float(note.split()[2]) < (1e-5 if name == "float32" else 0.03)


def test_a_contender_that_does_nothing_is_refused():
    with pytest.raises(RuntimeError, match="idle must orthogonalise, got an error of"):
        bench_muon.contender(
            setup(), "idle", lambda params, **_: torch.optim.SGD(params, lr=0.0)
        )
