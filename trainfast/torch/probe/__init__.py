"""The child's side of the probe: a script under hooks, with one thing switched.

`child` is the program, `hooks` sees the training loop, a `Switch` changes one thing in
it, `schedule` measures blocks of steps with and without it.
"""
