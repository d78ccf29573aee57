"""Throughputs that a guide calls good or bad, by GPU, for the guide's own model."""

from collections.abc import Sequence

Bands = Sequence[tuple[float, str]]

# Samples a second from which on the word holds, in rising order. The guide has no word
# for the RTX 4080 Super's 500 to 1000.
_GUIDES: dict[str, Bands] = {
    "RTX 4080 SUPER": (
        (0, "problem, check GPU usage"),
        (500, "below acceptable"),
        (1000, "acceptable"),
        (1500, "good"),
        (2000, "excellent"),
    ),
}


def bands_of(given: str | Bands) -> Bands:
    """Of a GPU's name, as torch and nvidia-smi give it, or the given ones.

    Raises:
        ValueError: the GPU is not in the table, or the bands do not rise.
    """
    if isinstance(given, str):
        for name, bands in _GUIDES.items():
            if name in given.upper():
                return bands
        known = ", ".join(_GUIDES)
        raise ValueError(
            f"`bands` must be pairs of samples a second and a word, or one of the GPUs "
            f"that a guide has bands for ({known}), got {given!r}"
        )
    if list(given) != sorted(given) or not given:
        raise ValueError(f"`bands` must rise in samples a second, got {given!r}")
    return given


def verdict(bands: Bands, throughput: float) -> str | None:
    words = [word for least, word in bands if throughput >= least]
    return words[-1] if words else None
