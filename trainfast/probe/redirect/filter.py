"""Starts a command whose system calls on files are reported to another process.

    python filter.py SOCKET CALLS REFUSED COMMAND...

SOCKET is the descriptor of the socket that the listener is sent through. CALLS and
REFUSED are JSON lists of numbers of system calls; an item of CALLS may be
[number, argument, mask, value]: not reported where the argument's masked bits have that
value. The filter stays with the command and all that it starts (seccomp(2)).
"""

import array
import ctypes
import json
import os
import socket
import struct
import sys

_NO_NEW_PRIVILEGES, _KILL_WITH_PARENT = 38, 1
_SECCOMP, _SET_FILTER = 317, 1
_NEW_LISTENER, _WAIT_KILLABLE = 8, 32  # the second from Linux 5.19
_X86_64, _X32 = 0xC000003E, 0x40000000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_REPORT, _ALLOW, _REFUSE = 0x7FC00000, 0x7FFF0000, 0x00050000 | 38  # ENOSYS


def program(calls: list[int | list[int]], refused: list[int]) -> bytes:
    """The filter as BPF instructions: what a call's number decides."""

    def step(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_so, if_not, value)

    steps = [step(_LOAD, 4), step(_IF_EQUAL, _X86_64, 1, 0), step(_RETURN, _REFUSE)]
    steps += [step(_LOAD, 0), step(_IF_AT_LEAST, _X32, 0, 1), step(_RETURN, _REFUSE)]
    for number in refused:
        steps += [step(_IF_EQUAL, number, 0, 1), step(_RETURN, _REFUSE)]
    for call in calls:
        if isinstance(call, int):
            steps += [step(_IF_EQUAL, call, 0, 1), step(_RETURN, _REPORT)]
            continue
        number, argument, mask, value = call
        steps += [step(_IF_EQUAL, number, 0, 5), step(_LOAD, 16 + 8 * argument)]
        steps += [step(_AND, mask), step(_IF_EQUAL, value, 0, 1)]
        steps += [step(_RETURN, _ALLOW), step(_RETURN, _REPORT)]
    return b"".join([*steps, step(_RETURN, _ALLOW)])


def install(code: bytes) -> int:
    """Puts this process under the filter and returns the listener's descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_KILL_WITH_PARENT, 9, 0, 0, 0)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    buffer = ctypes.create_string_buffer(code)
    argument = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    for flags in (_NEW_LISTENER | _WAIT_KILLABLE, _NEW_LISTENER):
        listener: int = libc.syscall(_SECCOMP, _SET_FILTER, flags, argument)
        if listener >= 0:
            return listener
    raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def main(arguments: list[str]) -> None:
    channel, calls, refused, *command = arguments
    with socket.socket(fileno=int(channel)) as sender:
        # All that follows the filter are calls that it does not report.
        listener = array.array(
            "i", [install(program(*map(json.loads, (calls, refused))))]
        )
        sender.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, listener)])
    os.close(listener[0])
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
