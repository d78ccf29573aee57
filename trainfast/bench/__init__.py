"""Measures trainfast against its rivals and roofs: `trainfast bench`.

`turns` and `load` are the measuring core, which the repository's `benchmarks/` uses as
well. `cases` holds what is measured, `child` measures it in one process, `run` starts
the processes, `results` stores their times, and `report` and `compare` judge them.
"""
