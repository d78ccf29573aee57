"""Runs a training script unchanged, many times with one thing changed, and compares.

`diagnosis.diagnose` is the entry. The script runs in child processes
(`trainfast.torch.probe`) inside a sandbox, so that nothing outside of them changes;
`gains` turns the times that they report into gains with intervals, and `findings` into
a verdict.
"""
