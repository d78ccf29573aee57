"""What a system call on a path does where changes go to a scratch folder (x86-64)."""

import ctypes
import errno
import ipaddress
import os
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainfast.probe.redirect.files import Files

_HERE = -100  # AT_FDCWD
_NO_FOLLOW, _REMOVE_FOLDER, _FOLLOW, _EMPTY_PATH = 0x100, 0x200, 0x400, 0x1000
_NO_REPLACE, _EXCHANGE = 1, 2  # of renameat2
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_NATIVE = ("/dev/", "/proc/", "/sys/")
_READ_ONLY = ("/proc/sys/", "/sys/")
_MEMORY = "/memfd:"  # how /proc names a file that memfd_create has made
# Names in /dev that lead to an open file of the process.
_OPEN_FILES = {
    "/dev/fd/": "/proc/self/fd/",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
}
_TEXT = 4096  # bytes of the longest path

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Descriptor:
    """A result: this process' descriptor, which the caller gets a copy of."""

    number: int
    close_on_exec: bool


# None: the kernel is to do the call as it stands.
Result = int | Descriptor | None


@dataclass
class Caller:
    """A thread that waits in a system call, and the call's arguments."""

    thread: int
    arguments: tuple[int, ...]

    def read(self, address: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        done = self._copy(_libc.process_vm_readv, buffer, address, size)
        return buffer.raw[:done]

    def write(self, address: int, data: bytes) -> None:
        buffer = ctypes.create_string_buffer(data, len(data))
        self._copy(_libc.process_vm_writev, buffer, address, len(data))

    def text(self, address: int) -> str:
        """A path, as far as its pages are readable."""
        found = self.read(address, min(_TEXT, _TEXT - address % _TEXT))
        if b"\0" not in found:
            found += self.read(address + len(found), _TEXT)
        return os.fsdecode(found.partition(b"\0")[0])

    def _copy(self, copy: Any, buffer: Any, address: int, size: int) -> int:
        own = struct.pack("@PN", ctypes.addressof(buffer), size)
        other = struct.pack("@PN", address, size)
        done: int = copy(self.thread, own, 1, other, 1, 0)
        if done < 0:
            raise OSError(errno.EFAULT, "memory of the caller")
        return done

    def process(self) -> tuple[int, int]:
        """The process of the thread, and the parent's."""
        found = {}
        with open(f"/proc/{self.thread}/status") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                found[name] = value.strip()
        return int(found["Tgid"]), int(found["PPid"])


@dataclass
class Shape:
    """The positions of a call's arguments."""

    path: int
    folder: int | None = None  # descriptor that a relative path begins at
    flags: int | None = None
    follows: bool = True  # a link at the path's end, unless the flags say otherwise
    out: int | None = None
    size: int = 0  # of what `out` or `given` points to; negative: in that argument
    given: int | None = None


# Calls that only look.
_LOOKS = {
    4: Shape(0, out=1, size=144),  # stat
    6: Shape(0, follows=False, out=1, size=144),  # lstat
    21: Shape(0),  # access
    89: Shape(0, follows=False, out=1, size=-2),  # readlink
    137: Shape(0, out=1, size=120),  # statfs
    262: Shape(1, 0, 3, out=2, size=144),  # newfstatat
    267: Shape(1, 0, follows=False, out=2, size=-3),  # readlinkat
    269: Shape(1, 0),  # faccessat
    332: Shape(1, 0, 2, out=4, size=256),  # statx
    439: Shape(1, 0, 3),  # faccessat2
}
# Calls that change a file's mode, owner, times or length.
_CHANGES = {
    76: Shape(0),  # truncate
    90: Shape(0),  # chmod
    92: Shape(0),  # chown
    94: Shape(0, follows=False),  # lchown
    132: Shape(0, given=1, size=16),  # utime
    235: Shape(0, given=1, size=32),  # utimes
    260: Shape(1, 0, 4),  # fchownat
    268: Shape(1, 0),  # fchmodat
    280: Shape(1, 0, 3, given=2, size=32),  # utimensat
    452: Shape(1, 0, 3),  # fchmodat2
}
# getxattr and listxattr, and those that do not follow links.
_ATTRIBUTES = {191: True, 194: True, 192: False, 195: False}
_SET_ATTRIBUTES = (188, 189, 197, 198)  # setxattr and removexattr
_OF_DESCRIPTORS = (91, 93)  # fchmod, fchown
# io_uring_setup, openat2, futimesat, mknod, mknodat: callers have another way.
REFUSED = (425, 437, 261, 133, 259)


class Calls:
    """Answers system calls by a view of the files.

    Attributes:
        files: what lies where.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        # Current folders that only the scratch folder has, by process; None: the
        # kernel's.
        self._folders: dict[int, str | None] = {}
        self._answers: dict[int, Callable[[Caller], Result]] = {
            2: lambda caller: self._open(caller, Shape(0), 1),
            85: lambda caller: self._open(caller, Shape(0), None),  # creat
            257: lambda caller: self._open(caller, Shape(1, 0), 2),
            79: self._getcwd,
            80: self._chdir,
            81: self._fchdir,
            82: lambda caller: self._rename(caller, Shape(0), Shape(1), 0),
            264: lambda caller: self._rename(caller, Shape(1, 0), Shape(3, 2), 0),
            316: lambda caller: self._rename(
                caller, Shape(1, 0), Shape(3, 2), caller.arguments[4]
            ),
            83: lambda caller: self._mkdir(caller, Shape(0), 1),
            258: lambda caller: self._mkdir(caller, Shape(1, 0), 2),
            84: lambda caller: self._remove(caller, Shape(0), folder=True),
            87: lambda caller: self._remove(caller, Shape(0), folder=False),
            263: lambda caller: self._remove(
                caller, Shape(1, 0), folder=bool(caller.arguments[2] & _REMOVE_FOLDER)
            ),
            86: lambda caller: self._link(caller, Shape(0, follows=False), Shape(1)),
            265: lambda caller: self._link(
                caller, Shape(1, 0, follows=False), Shape(3, 2)
            ),
            88: lambda caller: self._symlink(caller, Shape(1)),
            266: lambda caller: self._symlink(caller, Shape(2, 1)),
            42: lambda caller: self._connect(caller, *caller.arguments[1:3]),
            44: lambda caller: self._connect(caller, *caller.arguments[4:6]),
            49: self._bind,
        }
        for number, shape in _LOOKS.items():
            self._answers[number] = self._bound(self._look, number, shape)
        for number, shape in _CHANGES.items():
            self._answers[number] = self._bound(self._change, number, shape)
        for number, follows in _ATTRIBUTES.items():
            shape = Shape(0, follows=follows)
            self._answers[number] = self._bound(self._attributes, number, shape)
        for number in _SET_ATTRIBUTES:
            self._answers[number] = self._set_attributes
        for number in _OF_DESCRIPTORS:
            self._answers[number] = self._change_open_file

    def numbers(self) -> list[int | list[int]]:
        """The calls to report, as `filter.program` takes them."""
        plain: dict[int, int | list[int]] = {number: number for number in self._answers}
        for number, flags in ((262, 3), (332, 2)):  # of an open file, not of a path
            plain[number] = [number, flags, _EMPTY_PATH, _EMPTY_PATH]
        plain[44] = [44, 4, 0xFFFFFFFF, 0]  # without an address
        return list(plain.values())

    def answer(self, number: int, caller: Caller) -> Result:
        """The result of a call. Raises OSError: the call's error."""
        return self._answers[number](caller)

    @staticmethod
    def _bound(
        answer: Callable[[int, Shape, Caller], Result], number: int, shape: Shape
    ) -> Callable[[Caller], Result]:
        return lambda caller: answer(number, shape, caller)

    # Where a path leads.

    def _absolute(self, caller: Caller, shape: Shape) -> tuple[str, bool]:
        """A call's path as an absolute one, and whether the kernel resolves it so."""
        text = caller.text(caller.arguments[shape.path])
        if not text:
            raise OSError(errno.ENOENT, "empty path")
        native = True
        if not text.startswith("/"):
            folder = _HERE
            if shape.folder is not None:
                folder = ctypes.c_int(caller.arguments[shape.folder]).value
            base, native = self._folder(caller, folder)
            text = f"{base}/{text}"
        inner = self._in_scratch(text)
        return (text, native) if inner is None else (inner, False)

    def _in_scratch(self, path: str) -> str | None:
        """The path that one in the scratch folder stands for."""
        scratch = self.files.scratch
        if path != scratch and not path.startswith(scratch + "/"):
            return None
        return path.removeprefix(scratch) or "/"

    def _folder(self, caller: Caller, descriptor: int) -> tuple[str, bool]:
        if descriptor == _HERE:
            own = self._current(caller)
            if own is not None:
                return own, False
            found = os.readlink(f"/proc/{caller.thread}/cwd")
        else:
            found = os.readlink(f"/proc/{caller.thread}/fd/{descriptor}")
        inner = self._in_scratch(found)
        return (found, True) if inner is None else (inner, False)

    def _current(self, caller: Caller) -> str | None:
        """The process' current folder, if it is one of the scratch folder."""
        if not self._folders:
            return None
        process, parent = caller.process()
        if process not in self._folders:
            self._folders[process] = self._folders.get(parent)
        return self._folders[process]

    def _locate(self, caller: Caller, shape: Shape) -> tuple[str, bool]:
        """The canonical path, and whether it is what the kernel would find.

        Raises:
            _Native: a path of a device, or of the kernel.
        """
        absolute, native = self._absolute(caller, shape)
        if absolute.startswith(_NATIVE):
            raise _Native(_destination(absolute, caller))
        follow = shape.follows
        if shape.flags is not None:
            flags = caller.arguments[shape.flags]
            follow = bool(flags & _FOLLOW) or (follow and not flags & _NO_FOLLOW)
        path = self.files.canonical(absolute, follow=follow)
        if path.startswith(_NATIVE):
            raise _Native(path)
        return path, native and path == absolute

    def _locate_both(
        self, caller: Caller, old: Shape, new: Shape
    ) -> tuple[str, str] | None:
        """Two canonical paths; None: both are the kernel's, and so is the call."""
        found = []
        for shape in (old, new):
            with suppress(_Native):
                found.append(self._locate(caller, shape)[0])
        if len(found) == 1:
            raise OSError(errno.EXDEV, found[0])
        return (found[0], found[1]) if found else None

    def _leave(self, found: "_Native") -> Result:
        """Leaves a change to the kernel, where it harms no file."""
        allowed = found.path.startswith((*_NATIVE, _MEMORY))
        if not (allowed or self.files.is_private(found.path)):
            raise OSError(errno.EROFS, found.path)
        if found.path.startswith(_READ_ONLY):
            raise OSError(errno.EROFS, found.path)
        return None

    def _changed(self, caller: Caller, shape: Shape) -> str | None:
        """The path, if the kernel would find something else there."""
        if not self.files.covered:
            return None
        try:
            path, native = self._locate(caller, shape)
        except _Native:
            return None
        return None if native and self.files.now(path) == path else path

    # Calls that look.

    def _look(self, number: int, shape: Shape, caller: Caller) -> Result:
        path = self._changed(caller, shape)
        if path is None:
            return None
        return self._do(number, shape, caller, self.files.now(path))

    def _do(self, number: int, shape: Shape, caller: Caller, path: str) -> int:
        """Does a caller's call here with another path."""
        arguments: list[Any] = [ctypes.c_ulong(value) for value in caller.arguments]
        arguments[shape.path] = os.fsencode(path)
        if shape.folder is not None:
            arguments[shape.folder] = ctypes.c_long(_HERE)
        size = shape.size if shape.size >= 0 else caller.arguments[-shape.size]
        buffer = ctypes.create_string_buffer(min(size, 1 << 16))
        if shape.out is not None:
            arguments[shape.out] = buffer
        if shape.given is not None and caller.arguments[shape.given]:
            arguments[shape.given] = caller.read(caller.arguments[shape.given], size)
        result: int = _libc.syscall(ctypes.c_long(number), *arguments)
        if result < 0:
            raise OSError(ctypes.get_errno(), path)
        if shape.out is not None:
            # readlink returns how much it wrote, the others nothing.
            data = buffer.raw[:result] if shape.size < 0 else buffer.raw
            caller.write(caller.arguments[shape.out], data)
        return result

    def _attributes(self, number: int, shape: Shape, caller: Caller) -> Result:
        if self._changed(caller, shape) is None:
            return None
        raise OSError(errno.EOPNOTSUPP, "extended attributes")

    def _getcwd(self, caller: Caller) -> Result:
        folder = self._current(caller)
        if folder is None:
            return None
        data = os.fsencode(folder) + b"\0"
        address, size = caller.arguments[:2]
        if len(data) > size:
            raise OSError(errno.ERANGE, folder)
        caller.write(address, data)
        return len(data)

    def _chdir(self, caller: Caller) -> Result:
        try:
            path, native = self._locate(caller, Shape(0))
        except _Native:
            return self._enter(caller, None)
        now = self.files.now(path)
        if not stat.S_ISDIR(os.stat(now).st_mode):
            raise OSError(errno.ENOTDIR, path)
        if native and os.path.isdir(path):
            return self._enter(caller, None)
        return self._enter(caller, path)

    def _fchdir(self, caller: Caller) -> Result:
        path, native = self._folder(caller, caller.arguments[0])
        return self._enter(caller, None if native or os.path.isdir(path) else path)

    def _enter(self, caller: Caller, folder: str | None) -> Result:
        """Sets the process' folder; None: the kernel does."""
        if folder is not None or self._folders:
            self._folders[caller.process()[0]] = folder
        return None if folder is None else 0

    # Calls that change something.

    def _open(self, caller: Caller, shape: Shape, flags_at: int | None) -> Result:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        if flags_at is not None:
            flags = caller.arguments[flags_at]
        mode = caller.arguments[1 if flags_at is None else flags_at + 1] & 0o7777
        writes = flags & _WRITES and not flags & os.O_PATH
        if not writes and not self.files.covered:
            return None
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        shape = Shape(shape.path, shape.folder, follows=not exclusive)
        if flags & os.O_NOFOLLOW:
            shape.follows = False
        try:
            path, native = self._locate(caller, shape)
        except _Native as found:
            return self._leave(found) if writes else None
        now = self.files.now(path)
        special = os.path.lexists(now) and not os.path.isfile(now)
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            native = False
        if native and now == path and (not writes or special):
            return None
        if writes:
            now = self._to_write(path, flags)
        return Descriptor(os.open(now, flags, mode), bool(flags & os.O_CLOEXEC))

    def _to_write(self, path: str, flags: int) -> str:
        """Where a path that is opened with these flags lies, as the command's own."""
        now = self.files.now(path)
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            return self.files.cover(path)
        if not os.path.lexists(now):
            if not flags & os.O_CREAT:
                os.stat(now)  # raises
            return self.files.entry(path)
        if flags & os.O_CREAT and flags & os.O_EXCL:
            raise OSError(errno.EEXIST, path)
        if not flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC):
            return now
        if os.path.isdir(now):
            raise OSError(errno.EISDIR, path)
        if not os.access(now, os.W_OK):
            raise OSError(errno.EACCES, path)
        return self.files.own(path, keep=not flags & os.O_TRUNC)

    def _change(self, number: int, shape: Shape, caller: Caller) -> Result:
        if caller.arguments[shape.path] == 0:  # utimensat of a descriptor
            return self._change_open_file(caller)
        try:
            path, _ = self._locate(caller, shape)
        except _Native as found:
            return self._leave(found)
        return self._do(number, shape, caller, self.files.own(path))

    def _change_open_file(self, caller: Caller) -> Result:
        path, native = self._folder(caller, caller.arguments[0])
        if not native or not os.path.exists(path):
            return None  # its own file, or a socket, a pipe, memory
        return self._leave(_Native(path))

    def _set_attributes(self, caller: Caller) -> Result:
        raise OSError(errno.EOPNOTSUPP, "extended attributes")

    def _mkdir(self, caller: Caller, shape: Shape, mode_at: int) -> Result:
        path = self._new_name(caller, shape)
        if path is None:
            return None
        os.mkdir(self.files.entry(path), caller.arguments[mode_at] & 0o7777)
        self.files.forget(path)
        return 0

    def _symlink(self, caller: Caller, shape: Shape) -> Result:
        path = self._new_name(caller, shape)
        if path is None:
            return None
        os.symlink(caller.text(caller.arguments[0]), self.files.entry(path))
        self.files.forget(path)
        return 0

    def _new_name(self, caller: Caller, shape: Shape) -> str | None:
        """A path that must not be there; None: the kernel does the call."""
        try:
            path, _ = self._locate(
                caller, Shape(shape.path, shape.folder, follows=False)
            )
        except _Native as found:
            self._leave(found)
            return None
        if os.path.lexists(self.files.now(path)):
            raise OSError(errno.EEXIST, path)
        return path

    def _remove(self, caller: Caller, shape: Shape, *, folder: bool) -> Result:
        try:
            path, _ = self._locate(
                caller, Shape(shape.path, shape.folder, follows=False)
            )
        except _Native as found:
            return self._leave(found)
        now = self.files.now(path)
        os.lstat(now)  # raises
        if folder != _is_folder(now):
            raise OSError(errno.ENOTDIR if folder else errno.EISDIR, path)
        if folder and os.listdir(now):
            raise OSError(errno.ENOTEMPTY, path)
        entry = self.files.entry(path)
        os.rmdir(entry) if folder else os.unlink(entry)
        self.files.forget(path)
        return 0

    def _rename(self, caller: Caller, old: Shape, new: Shape, flags: int) -> Result:
        ends = self._locate_both(
            caller,
            Shape(old.path, old.folder, follows=False),
            Shape(new.path, new.folder, follows=False),
        )
        if ends is None:
            return None
        source, target = ends
        now, replaced = self.files.now(source), self.files.now(target)
        if flags & _EXCHANGE:
            raise OSError(errno.EINVAL, target)
        if flags & _NO_REPLACE and os.path.lexists(replaced):
            raise OSError(errno.EEXIST, target)
        os.lstat(now)  # raises
        if _is_folder(now):
            if target == source:
                return 0
            if target.startswith(source + "/"):
                raise OSError(errno.EINVAL, target)
            if os.path.lexists(replaced) and not _is_folder(replaced):
                raise OSError(errno.ENOTDIR, target)
            if self.files.is_machines(source) or source in self.files.covered:
                raise OSError(errno.EXDEV, source)  # callers then copy and remove
            if _is_folder(replaced) and os.listdir(replaced):
                raise OSError(errno.ENOTEMPTY, target)
        os.rename(self.files.own(source), self.files.entry(target))
        self.files.forget(source)
        self.files.forget(target)
        return 0

    def _link(self, caller: Caller, old: Shape, new: Shape) -> Result:
        with suppress(_Native):  # a missing source comes before a missing folder
            os.lstat(self.files.now(self._locate(caller, old)[0]))
        ends = self._locate_both(
            caller, old, Shape(new.path, new.folder, follows=False)
        )
        if ends is None:
            return None
        source, target = ends
        if os.path.lexists(self.files.now(target)):
            raise OSError(errno.EEXIST, target)
        os.link(self.files.own(source), self.files.entry(target))
        self.files.forget(target)
        return 0

    # The network: this machine alone.

    def _connect(self, caller: Caller, address: int, size: int) -> Result:
        data = caller.read(address, min(size, 128))
        family = int.from_bytes(data[:2], "little")
        if family == 2:
            host: Any = ipaddress.IPv4Address(data[4:8])
        elif family == 10:
            host = ipaddress.IPv6Address(data[8:24])
            host = host.ipv4_mapped or host
        else:
            return None
        if host.is_loopback or host.is_unspecified:
            return None
        raise OSError(errno.ENETUNREACH, str(host))

    def _bind(self, caller: Caller) -> Result:
        """A socket's file is made where the path says, so only in the stage."""
        data = caller.read(caller.arguments[1], min(caller.arguments[2], 128))
        name = data[2:].partition(b"\0")[0]
        is_file = int.from_bytes(data[:2], "little") == 1 and name
        if is_file and not self.files.is_private(os.fsdecode(name)):
            raise OSError(errno.EACCES, os.fsdecode(name))
        return None


def _destination(path: str, caller: Caller) -> str:
    """Where a path in /dev or /proc leads to for its caller."""
    for name, meant in _OPEN_FILES.items():
        if path.startswith(name):
            path = meant + path.removeprefix(name)
    for name in ("/proc/self/", "/proc/thread-self/"):
        if path.startswith(name):
            path = f"/proc/{caller.thread}/{path.removeprefix(name)}"
    return os.path.realpath(path)


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


class _Native(Exception):
    """A path that the kernel is to use as it is."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path
