"""The machine code of CUDA's kernels, judged by counts of its instructions: see
cuda/sass.py. It is what the build has left; nothing is compiled here."""

import json
import os
import sys
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "cuda"))
try:
    import sass
finally:
    sys.path.remove(str(ROOT / "cuda"))

BOUNDS = json.loads((ROOT / sass.BOUNDS).read_text())

# A loop that begins behind its barrier, with code for a rare case in its middle and
# behind it; the loop around it; a shorter loop without products.
LISTING = """
	.section	.text.kernel,"ax",@progbits
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_outer:
        /*0010*/                   I2F.U32 R2, R1 ;
.L_loop:
        /*0020*/                   IADD3 R3, R3, 0x1, RZ ;
        /*0030*/               @P0 BRA `(.L_rare) ;
        /*0040*/                   LDG.E.128 R4, [R2.64] ;
        /*0050*/                   BRA `(.L_join) ;
.L_rare:
        /*0060*/                   LDG.E.U16 R4, [R2.64] ;
.L_join:
        /*0070*/                   HMMA.16816.F32 R4, R4, R8, R12 ;
        /*0080*/              @!P1 BRA `(.L_behind) ;
.L_back:
        /*0090*/                   F2I.TRUNC.NTZ R5, R6 ;
        /*00a0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00b0*/              @!P2 IADD3 R7, R7, 0x1, RZ ;
        /*00c0*/              @!P5 CALL.REL.NOINC `(.L_left) ;
        /*00d0*/                   BRA `(.L_loop) ;
.L_left:
        /*00d8*/                   BRA.U UP0, `(.L_outer) ;
.L_few:
        /*00e0*/                   HFMA2 R1, R1, R1, R1 ;
        /*00f0*/               @P4 BRA `(.L_few) ;
        /*0100*/                   STG.E.128 [R2.64], R4 ;
        /*0110*/                   EXIT ;
.L_behind:
        /*0120*/                   MUFU.RCP R5, R5 ;
        /*0130*/                   BRA `(.L_back) ;
	.section	.text.store,"ax",@progbits
        /*0000*/                   STG.E.128 [R2.64], R4 ;
        /*0010*/                   STG.E [R2.64], R4 ;
        /*0020*/                   EXIT ;
"""
REGISTERS = {"registers": 40, "spill_stores": 8, "spill_loads": 4}


@pytest.fixture
def nvdisasm(tmp_path):
    """A program that prints LISTING, whatever it is asked for."""
    (tmp_path / "listing").write_text(LISTING)
    program = tmp_path / "nvdisasm"
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/listing\n")
    program.chmod(0o755)
    return str(program)


def test_turn_of_the_main_loop_passes_all_products_and_no_rare_code(nvdisasm):
    codes = sass.disassemble(nvdisasm, "image")
    assert sass.counts_of(codes["kernel"], REGISTERS) == {
        "registers": 40,
        "spilled": 12,
        "issued": 11,
        "before": 7,  # three behind the barrier, then four
        "hmma": 1,
        "share": 0.091,
        "conversions": 1,
    }
    assert sass.counts_of(codes["store"], REGISTERS) == {
        "registers": 40,
        "spilled": 12,
        "wide": 1,
    }


def test_architecture_that_cannot_be_read_has_no_counts(tmp_path):
    image = {"file": "adamw", "is_ptx": False, "arch": 120, "path": str(tmp_path)}
    others = [image | {"is_ptx": True, "arch": 80}, image | {"file": "amp", "arch": 75}]
    assert sass.counts_of_images("false", [image, *others]) == {"120": None}


def test_worse_counts_are_named_and_better_ones_pass():
    bounds = {"issued": 500, "share": 0.2, "wide": 4, "registers": 60}
    assert sass.worse({"issued": 499, "share": 0.3, "wide": 8}, bounds) == []
    said = sass.worse({"issued": 501, "share": 0.1}, bounds)
    assert said == ["issued 501, was 500", "share 0.1, was 0.2", "wide None, was 4"]


# Of attention without options, for two numbers of dims: instructions
# before the first product and in all, and the share of products.
FORWARD = [
    ("75", "f16", 64, 45, 700, 0.27),
    ("75", "f16", 128, 60, 700, 0.37),
    *[
        (arch, dtype, dims, before, 540, share)
        for arch, dtype in product(("80", "90"), ("f16", "bf16"))
        for dims, before, share in ((64, 45, 0.17), (128, 60, 0.24))
    ],
]


@pytest.mark.parametrize(
    ("arch", "dtype", "dims", "before", "issued", "share"), FORWARD
)
def test_bounds_of_attention_are_within_its_limits(
    arch, dtype, dims, before, issued, share
):
    path = 75 if arch == "75" else 80
    kernel = BOUNDS[arch][f"forward_{path}_mma_{dtype}_{dims}_0"]
    assert kernel["before"] <= before
    assert kernel["issued"] <= issued
    assert kernel["share"] >= share
    assert (kernel["conversions"], kernel["spilled"]) == (0, 0)


@pytest.mark.parametrize("arch", ["75", "80", "90"])
@pytest.mark.parametrize("mix", ["ALL_F32", "ALL_BF16"])
def test_bounds_of_adamw_are_wide_stores_and_64_registers(arch, mix):
    """Of param, exp_avg, exp_avg_sq, max_exp_avg_sq and grad, by 16 bytes each."""
    kernel = BOUNDS[arch][f"adamw_{mix}"]
    assert (kernel["wide"], kernel["spilled"]) == (5, 0)
    assert kernel["registers"] <= 64


@pytest.fixture(scope="module")
def counts():
    """What sass.counts_of_images() says of the last build."""
    images, nvdisasm = ROOT / sass.IMAGES, sass.find_nvdisasm()
    if not images.exists() or not nvdisasm:
        lacking = f"needs a build with CUDA, and {sass.NAME}"
        assert os.environ.get("TRAINFAST_CUDA") != "1", lacking
        pytest.skip(lacking)
    listed = json.loads(images.read_text())
    for image in listed:
        image["path"] = str(ROOT / image["path"])
    return sass.counts_of_images(nvdisasm, listed)


@pytest.mark.slow
@pytest.mark.parametrize("arch", list(BOUNDS))
def test_machine_code_is_no_worse_than_its_bounds(counts, arch):
    if counts.get(arch) is None:
        read = "cannot be read by this nvdisasm" if arch in counts else "was not built"
        pytest.skip(f"sm_{arch} {read}")
    found = {
        id: said
        for id, bounds in BOUNDS[arch].items()
        if (said := sass.worse(counts[arch][id], bounds))
    }
    assert not found, f"sm_{arch}; where it has to be: python cuda/sass.py --write"
