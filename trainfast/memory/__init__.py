"""How much memory a training step needs; what needs no torch."""
