"""Access checks for files that are run, or believed: others must not be able to write them.

Kernels are native code. A user who can write their folder, or put another folder in its place, runs
code with the rights of the user who loads them. As with the keys of ssh, a loaded file has to
belong to the user or to root, and only they may write it and every folder on the way to it; others
may put files beside it if the sticky bit keeps them from exchanging it (``/tmp``). Reading is free.

A group counts as the user alone if it is the one that systems make for each user, of the same name
and without other members: with a umask of 002 the group may write everything.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cutesuper.errors import CacheError

try:
    import grp
    import pwd
except ImportError:  # no such users on this system; nothing is checked
    grp = pwd = None

_MOST_LINKS = 40
_ROOT = 0


@dataclass(frozen=True)
class Exposure:
    """The reason why others could have written a file or folder.

    Attributes:
        path: the file or folder that they can write, or own.
        why: "belongs to user 1001 (eve)", "can be written by others (mode 0777)".
        mend: the command to run.
    """

    path: str
    why: str
    mend: str

    def __str__(self) -> str:
        return f"{self.path} {self.why}"


def exposure(path: str | os.PathLike[str], *, any_owner: bool = False) -> Exposure | None:
    """The reason why others could have written a file or folder; None if there is none.
    Or put another one in its place.

    Args:
        path: links are followed, and the folders that contain them are checked too.
        any_owner: trust the owners of all folders on the way to it, and its own; but not other
            users who may put files into a folder that all may write.

    Raises:
        OSError: it does not exist, or cannot be inspected.
    """
    if pwd is None:
        return None
    shared = False
    steps = list(_steps(path))
    for n, (place, found) in enumerate(steps):
        last = n + 1 == len(steps)
        check_owner = shared or not any_owner
        problem = _problem(place, found, last=last, owner=check_owner)
        if problem is not None:
            return problem
        if not stat.S_ISLNK(found.st_mode):
            shared = bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return None


def file_exposure(path: str, found: os.stat_result) -> Exposure | None:
    """`exposure` of an open file, in a folder that was checked."""
    return None if pwd is None else _problem(path, found, last=True, owner=True)


def read_private(path: Path) -> bytes:
    """The bytes of a file that only the user can have written, in a folder that was checked.

    Raises:
        OSError: it is not there, or no ordinary file.
        CacheError: others can have written it.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with os.fdopen(os.open(path, flags), "rb") as stream:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "no ordinary file", str(path))
        if problem := file_exposure(str(path), found):
            raise CacheError(f"kernel cache: {problem}; it may hold anything; {problem.mend}")
        return stream.read()


def make_private(folder: Path) -> None:
    """Make a folder, and its missing parents, for the user alone (0700).

    Raises:
        OSError: it cannot be made.
    """
    for place in reversed((folder, *folder.parents)):
        if not place.is_dir():
            with contextlib.suppress(FileExistsError):
                place.mkdir(0o700)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def write_new(path: Path, content: bytes) -> None:
    """Write a new file that other users may not write, whatever the umask.

    Raises:
        OSError: something of this name is there, or it cannot be written.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as stream:
        stream.write(content)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in place of an earlier one; a reader sees one or the other.

    Raises:
        OSError: it cannot be written.
    """
    # an unpredictable name, so that no link can be put there in advance
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        write_new(scratch, content)
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for the user alone that is removed afterwards.

    Raises:
        CacheError: others could put another one in its place.
        OSError: it cannot be made.
    """
    with tempfile.TemporaryDirectory(prefix="cutesuper-") as folder:
        yield checked_temporary(Path(folder))


def checked_temporary(folder: Path) -> Path:
    """Return a new temporary folder if others cannot exchange it. Raises CacheError."""
    if problem := exposure(folder):
        raise CacheError(
            f"temporary folder {folder}: {problem}, so others could exchange what is compiled "
            f"there; set TMPDIR to another folder, or {problem.mend}"
        )
    return folder


# ------------------------------------------------------------------------------------ the verdict


def _steps(path: str | os.PathLike[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Every folder on the way to a path, then the path itself.
    Also links, and the folders they lead through."""
    path = os.fspath(path)
    # the current folder may be gone, and only a relative path needs it
    rest = (path if os.path.isabs(path) else os.path.join(os.getcwd(), path)).split(os.sep)[::-1]
    place, links = os.sep, 0
    yield place, os.lstat(place)
    while rest:
        name = rest.pop()
        if name in ("", "."):
            continue
        if name == "..":
            place = os.path.dirname(place)
            yield place, os.lstat(place)
            continue
        found = os.lstat(step := os.path.join(place, name))
        yield step, found
        if not stat.S_ISLNK(found.st_mode):
            place = step
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
        target = os.readlink(step)
        place = os.sep if target.startswith(os.sep) else place
        rest += target.split(os.sep)[::-1]


def _problem(place: str, found: os.stat_result, *, last: bool, owner: bool) -> Exposure | None:
    uid, mode = found.st_uid, found.st_mode
    deep = "-R " if last and stat.S_ISDIR(mode) else ""
    if owner and uid not in (_ROOT, os.geteuid()) and (last or uid != _nobody()):
        root = os.geteuid() == _ROOT
        mend = f"chown {deep}{_ROOT} {place}" if root else "use a folder of your own"
        return Exposure(place, f"belongs to user {uid}{_named(uid)}", mend)
    if stat.S_ISLNK(mode) or (mode & stat.S_ISVTX and not last):
        return None
    if mode & stat.S_IWOTH:
        who = "others"
    elif mode & stat.S_IWGRP and not _is_private_group(found, place):
        who = f"group {found.st_gid}"
    else:
        return None
    why = f"can be written by {who} (mode {stat.S_IMODE(mode):04o})"
    return Exposure(place, why, f"chmod {deep}go-w {place}")


def _named(uid: int) -> str:
    try:
        return f" ({pwd.getpwuid(uid).pw_name})" if pwd else ""
    except KeyError:
        return ""


def _is_private_group(found: os.stat_result, place: str) -> bool:
    """True if a group stands for the user alone."""
    if pwd is None or grp is None or _has_acl(place):
        return False
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    own = group.gr_gid == user.pw_gid and group.gr_name == user.pw_name
    return own and set(group.gr_mem) <= {user.pw_name}


def _has_acl(place: str) -> bool:
    """True if there is an access control list.
    The group's rights are then the maximum for its users."""
    try:
        return "system.posix_acl_access" in os.listxattr(place, follow_symlinks=False)
    except (OSError, AttributeError):  # a file system without lists
        return False


@functools.cache
def _nobody() -> int | None:
    """The apparent owner (a user id) of files of users outside this container.
    No user inside has it. None if all users are inside."""
    try:
        lines = Path("/proc/self/uid_map").read_text().split("\n")
        whole = any(int(line.split()[2]) >= 2**32 - 1 for line in lines if line)
        return None if whole else int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError, IndexError):
        return None
