"""Runs a training script with trainfast's kernels and torch's switches turned on."""
