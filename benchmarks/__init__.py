"""Benchmarks: one module a capability, one harness; results/ holds what they wrote."""
