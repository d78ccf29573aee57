"""Configurations to start from, chosen by the hardware."""
