"""The files as a command sees them whose changes go to a scratch folder.

Before a directory's first change, the scratch folder gets a directory with the same
names. From then on this directory says what exists: a name in it stands for the
command's own file or, while the path is in `lower`, for the machine's file. To remove a
file is to remove its name.
"""

import errno
import os
import shutil
import stat

_MOST_LINKS = 40  # as the kernel's


class Files:
    """What lies where, by canonical paths: absolute, no `..`, no links in the parents.

    Attributes:
        stage: a folder of the command alone, which is used as it is.
        scratch: the folder in it that holds changed directories under their absolute
            paths.
        covered: directories whose names are those in the scratch folder.
        lower: files and directories, in covered directories, that are the machine's.
    """

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.scratch = f"{stage}/files"
        self.covered: set[str] = set()
        self.lower: set[str] = set()
        self._parents: dict[str, str] = {}  # canonical paths of directories

    def canonical(self, path: str, *, follow: bool) -> str:
        """The canonical path of an absolute one; `follow` a link at its end.

        Raises OSError if what leads to the path is no directory.
        """
        parent, _, name = path.rstrip("/").rpartition("/")
        if name in ("", ".", ".."):
            return self._walk(path)
        found = self._parents.get(parent)
        if found is None:
            found = self._walk(parent)
            if not stat.S_ISDIR(os.stat(self.now(found)).st_mode):
                raise OSError(errno.ENOTDIR, parent)
            self._parents[parent] = found
        at = f"{found.rstrip('/')}/{name}"
        link = _link(self.now(at)) if follow else None
        return at if link is None else self._walk(os.path.join(found, link))

    def now(self, path: str) -> str:
        """Where a canonical path lies: itself, or a path in the scratch folder."""
        if self.is_private(path):
            return path
        if path in self.covered:
            return self.scratch + path
        inner = path
        while inner != "/":
            parent = os.path.dirname(inner)
            if parent in self.covered:
                return path if inner in self.lower else self.scratch + path
            inner = parent
        return path

    def is_private(self, path: str) -> bool:
        """Whether a path is in the stage."""
        return path == self.stage or path.startswith(self.stage + "/")

    def is_machines(self, path: str) -> bool:
        """Whether what lies at a path must not be changed."""
        return self.now(path) == path and not self.is_private(path)

    def own(self, path: str, *, keep: bool = True) -> str:
        """Copies what is at a canonical path, if it is the machine's; returns the copy.

        Args:
            keep: the contents too, of a file.
        """
        now = self.now(path)
        state = os.lstat(now)
        if not self.is_machines(path):
            return now
        if stat.S_ISDIR(state.st_mode):
            return self.cover(path)
        if not stat.S_ISREG(state.st_mode) and not stat.S_ISLNK(state.st_mode):
            raise OSError(errno.EACCES, "a device or socket")
        copy = self.entry(path)
        if os.path.lexists(copy):
            os.unlink(copy)
        if keep:
            shutil.copy2(path, copy, follow_symlinks=False)
        else:
            os.close(os.open(copy, os.O_CREAT | os.O_WRONLY, state.st_mode & 0o7777))
        self.forget(path)
        return copy

    def entry(self, path: str) -> str:
        """Where a name lies that may be made, removed or replaced."""
        if self.is_private(path):
            return path
        parent = os.path.dirname(path)
        now = self.now(parent)
        if not stat.S_ISDIR(os.stat(now).st_mode):
            raise OSError(errno.ENOTDIR, parent)
        if not os.access(now, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, "the directory is read-only")
        return f"{self.cover(parent)}/{os.path.basename(path)}"

    def cover(self, folder: str) -> str:
        """The scratch folder's directory for a canonical one, made at its first use."""
        view = self.scratch + folder.rstrip("/")
        if not self.is_machines(folder):
            return self.now(folder)
        with os.scandir(folder) as entries:
            names = [(entry.name, _kind(entry)) for entry in entries]
        os.makedirs(view, exist_ok=True)
        for name, kind in names:
            at = f"{folder.rstrip('/')}/{name}"
            if kind == stat.S_IFLNK:
                os.symlink(os.readlink(at), f"{view}/{name}")
                continue
            self.lower.add(at)
            if kind == stat.S_IFDIR:
                os.makedirs(f"{view}/{name}", exist_ok=True)
            else:
                os.close(os.open(f"{view}/{name}", os.O_CREAT | os.O_WRONLY, 0o600))
        shutil.copystat(folder, view)
        os.chmod(view, 0o700 | stat.S_IMODE(os.stat(folder).st_mode))
        self.covered.add(folder)
        return view

    def forget(self, path: str) -> None:
        """Marks a path as the command's own, which it is after each change."""
        self.lower.discard(path)
        self.covered.discard(path)
        self._parents.clear()

    def _walk(self, path: str) -> str:
        names, links, at = path.split("/")[::-1], 0, "/"
        while names:
            name = names.pop()
            if name == "..":
                at = os.path.dirname(at)
            elif name not in ("", "."):
                inner = f"{at.rstrip('/')}/{name}"
                link = _link(self.now(inner))
                if link is None:
                    at = inner
                    continue
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, "too many links")
                at = "/" if link.startswith("/") else at
                names += link.split("/")[::-1]
        return at


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _kind(entry: "os.DirEntry[str]") -> int:
    if entry.is_symlink():
        return stat.S_IFLNK
    return stat.S_IFDIR if entry.is_dir() else stat.S_IFREG
