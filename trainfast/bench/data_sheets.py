"""Peak rates of GPUs as their makers publish them, without sparsity.

TFLOP/s of float32 outside the tensor cores, and of the tensor cores with TF32, float16
and bfloat16 inputs and float32 sums, as training needs them. GeForce cards reach twice
the float16 rate with float16 sums, which is the number that is often quoted for them.

Sources: NVIDIA's data sheets of P100, T4, V100, A100, A10, L4, L40S, H100 and H200,
Amazon's of the A10G; for GeForce the GA102 and Ada white papers. GeForce cards that
have no table there are scaled from one that has by the number of cores and the boost
clock.
"""

import re

_DTYPES = ("float32", "tf32", "float16", "bfloat16")
# By a part of the name that torch and nvidia-smi give; the first that fits counts.
# None: the card has no such tensor cores. The P100 has none at all.
_GPUS: dict[str, tuple[float, float | None, float, float | None]] = {
    "P100-PCIE": (9.3, None, 18.7, None),
    "T4": (8.1, None, 65.0, None),
    "V100S-PCIE": (16.4, None, 130.0, None),
    "V100-PCIE": (14.0, None, 112.0, None),
    "V100-SXM2": (15.7, None, 125.0, None),
    "A100": (19.5, 156.0, 312.0, 312.0),
    "A10G": (35.0, 35.0, 70.0, 70.0),
    "A10": (31.2, 62.5, 125.0, 125.0),
    "L4": (30.3, 60.0, 121.0, 121.0),
    "L40S": (91.6, 183.0, 362.0, 362.0),
    "H100 PCIe": (51.0, 378.0, 756.0, 756.0),
    "H100 80GB HBM3": (67.0, 494.5, 989.5, 989.5),
    "H200": (67.0, 494.5, 989.5, 989.5),
    "RTX 3050": (9.1, 9.1, 18.2, 18.2),
    "RTX 3060": (12.7, 12.7, 25.5, 25.5),
    "RTX 3090": (35.6, 35.6, 71.0, 71.0),
    "RTX 4070": (29.1, 29.1, 58.3, 58.3),
    "RTX 4080 SUPER": (52.2, 52.2, 104.4, 104.4),
    "RTX 4080": (48.7, 48.7, 97.5, 97.5),
    "RTX 4090": (82.6, 82.6, 165.2, 165.2),
}
# Marks of other chips whose names hold one of those above.
_OTHERS = r"\b(Ti|D|Laptop|Max-Q|MIG|NVL|4070 SUPER|3050 6GB)\b"


def peaks(gpu: str | None) -> dict[str, float]:
    """TFLOP/s by dtype; nothing for a GPU that is not in the table."""
    if gpu is None or re.search(_OTHERS, gpu):
        return {}
    for name, rates in _GPUS.items():
        if re.search(rf"\b{name}\b", gpu):
            return {d: r for d, r in zip(_DTYPES, rates, strict=True) if r is not None}
    return {}
