"""Scripts with one planted fault each, and their mended twins: truth for diagnose."""
