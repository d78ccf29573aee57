"""The line of a traceback that names the exception."""


def headline(error: str) -> str:
    """The line of a traceback that names the exception, whose message may have more."""
    last_frame = error.rpartition('\n  File "')[2].splitlines()
    named = (line for line in last_frame[1:] if not line.startswith("    "))
    return next(named, error.strip().splitlines()[0])
