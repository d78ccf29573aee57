"""Runs a command that may write anywhere and changes nothing.

    python sandbox.py STAGE COMMAND...

The command gets namespaces of its own (Linux, without privileges): every directory is
an overlay whose changes lie in memory, no network but loopback, and processes that end
with the command. STAGE is an empty directory to mount that memory on. Without user
namespaces, as in most containers, the exit status is CANNOT before the command starts.

This file is run by its path and imports nothing of trainfast: a process that has
threads, as NumPy starts them, cannot enter a user namespace.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys

CANNOT = 97  # exit status: no sandbox here, and nothing was run

_NEW_MOUNTS, _NEW_IPC, _NEW_USER = 0x20000, 0x8000000, 0x10000000
_NEW_PROCESSES, _NEW_NETWORK = 0x20000000, 0x40000000
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 32, 4096, 16384, 1 << 18
_KILL_WITH_PARENT, _SET_FLAGS, _UP = 1, 0x8914, 1
# Held by the kernel, or devices: shared with the command as they are.
_OF_THE_KERNEL = {
    *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs"),
    *("devpts", "devtmpfs", "efivarfs", "fusectl", "hugetlbfs", "mqueue", "nsfs"),
    *("proc", "pstore", "ramfs", "securityfs", "sysfs", "tracefs"),
}
# Flags of a mount that a user namespace must keep; statvfs and mount number them alike.
_KEPT_FLAGS = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME
_MOST = "50%"  # of the machine's memory, for all that the command writes

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    words = (source.encode(), target.encode(), kind.encode())
    _check(_libc.mount(*words, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def _mounts() -> dict[str, str]:
    """The kind of the file system at each mount point."""
    found = {}
    with open("/proc/self/mountinfo") as lines:
        for line in lines:
            left, _, right = line.partition(" - ")
            point = left.split()[4].encode().decode("unicode_escape")
            found[point] = right.split()[0]
    return found


def _split(path: str, mounts: dict[str, str]) -> tuple[list[str], list[str]]:
    """Directories to cover with overlays, and to make read-only, outer ones first.

    The kernel refuses an overlay over a directory with mounts below. Such a directory
    becomes read-only, and the directories in it are covered instead.
    """
    if mounts.get(path) in _OF_THE_KERNEL or path == "/dev/shm":
        return [], []
    inside = path.rstrip("/") + "/"
    if not any(point.startswith(inside) and point != path for point in mounts):
        return [path], []
    covered, read_only = [], [path]
    for entry in sorted(os.scandir(path), key=lambda entry: entry.path):
        if entry.is_dir(follow_symlinks=False):
            more = _split(entry.path, mounts)
            covered += more[0]
            read_only += more[1]
    return covered, read_only


def _enter_user_namespace() -> None:
    user, group = os.getuid(), os.getgid()
    kinds = _NEW_USER | _NEW_MOUNTS | _NEW_NETWORK | _NEW_IPC | _NEW_PROCESSES
    _check(_libc.unshare(kinds), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _overlay(stage: str) -> None:
    """Covers every directory with an overlay whose changes lie in memory."""
    _mount("none", "/", "", _RECURSIVE | _PRIVATE)
    shared_memory = os.statvfs("/dev/shm")
    paths, read_only = _split("/", _mounts())
    lower = {path: os.open(path, os.O_PATH) for path in paths}
    _mount("tmpfs", stage, "tmpfs", 0, f"size={_MOST}")
    memory = os.open(stage, os.O_PATH)  # its path disappears under an overlay
    for path in read_only:
        if path != "/":  # the process' root stays the mount that it is
            _mount(path, path, "", _BIND | _RECURSIVE)
        flags = os.statvfs(path).f_flag & _KEPT_FLAGS
        _mount("none", path, "", _REMOUNT | _BIND | _READ_ONLY | flags)
    for number, path in enumerate(paths):
        upper, work = (f"/proc/self/fd/{memory}/{number}{part}" for part in "uw")
        os.mkdir(work)
        os.mkdir(upper)
        os.chmod(upper, os.stat(path).st_mode & 0o7777)
        layers = f"lowerdir=/proc/self/fd/{lower[path]},upperdir={upper},workdir={work}"
        _mount("overlay", path, "overlay", 0, f"{layers},userxattr")
    for descriptor in (*lower.values(), memory):
        os.close(descriptor)
    size = shared_memory.f_blocks * shared_memory.f_frsize
    _mount("tmpfs", "/dev/shm", "tmpfs", 0, f"size={size},mode=1777")


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", _UP)
        fcntl.ioctl(any_socket, _SET_FLAGS, request)


def end_with_parent() -> None:
    """Lets the kernel kill this process when the one that started it ends."""
    _libc.prctl(_KILL_WITH_PARENT, 9)


def run(stage: str, command: list[str]) -> int:
    """Runs the command in the sandbox and returns its exit status, or CANNOT."""
    folder = os.getcwd()
    try:
        _enter_user_namespace()
        end_with_parent()  # entering the namespace would undo it
        _overlay(stage)
        _loopback_up()
        child = os.fork()
    except OSError as error:
        print(error, file=sys.stderr)
        return CANNOT
    if child == 0:  # process 1 of its namespace: when it ends, all others are killed
        end_with_parent()
        try:
            _mount("proc", "/proc", "proc")
            os.chdir(folder)  # the same path, now in the overlay
        except OSError as error:
            print(error, file=sys.stderr)
            os._exit(CANNOT)
        return _run_as_first_process(command)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _run_as_first_process(command: list[str]) -> int:
    """Starts the command and collects orphans until it ends."""
    child = os.posix_spawn(command[0], command, os.environ)
    while True:
        ended, status = os.wait()
        if ended == child:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
