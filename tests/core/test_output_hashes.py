"""Every backend of the CPU computes the bits that output_hashes.txt records."""

import numpy as np
import pytest

import trainfast
from tests.core import output_hashes


@pytest.fixture(scope="module")
def recorded():
    return output_hashes.read()


@pytest.mark.parametrize("name", ["scalar", "avx2", "avx512", "wide"])
def test_outputs_have_the_recorded_bits(name, recorded):
    reasons = {b["name"]: b["reason"] for b in trainfast.backends()}
    if reasons[name]:
        pytest.skip(reasons[name])
    table, libm = recorded
    same_libm = output_hashes.libm_digest() == libm
    try:
        found = output_hashes.hashes(name, same_libm)
    finally:
        trainfast.use_backend(None)
    assert len(found) > 200
    assert [key for key, value in found.items() if table[key] != value] == []


def test_a_changed_bit_changes_the_hash():
    out = np.arange(8, dtype=np.float32)
    before = output_hashes.digest([out])
    out.view(np.uint8)[5] ^= 1
    assert output_hashes.digest([out]) != before
    assert output_hashes.digest([out, out]) != output_hashes.digest([out])
