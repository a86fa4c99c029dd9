"""Files are loaded only if nobody else could have written them: folders, links, files, groups."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cutesuper.errors import CacheError
from cutesuper.runtime import private
from cutesuper.runtime.private import (
    checked_temporary,
    exposure,
    make_private,
    read_private,
    replace_file,
    temporary_folder,
    write_new,
)

STRANGER = 12345

Chown = Callable[[Path, int], None]


@pytest.fixture
def chown(monkeypatch: pytest.MonkeyPatch) -> Chown:
    """Gives a file to another user; only pretends to where these tests do not run as root."""
    real, owners = os.lstat, dict[str, int]()

    def lstat(path: Any, **rest: Any) -> Any:
        found = real(path, **rest)
        uid = owners.get(os.fspath(path), found.st_uid)
        return SimpleNamespace(st_uid=uid, st_gid=found.st_gid, st_mode=found.st_mode)

    def give(path: Path, uid: int) -> None:
        owners[str(path)] = uid

    monkeypatch.setattr(private.os, "lstat", lstat)
    return give


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """``<tmp>/a/b``, for the user alone."""
    made = tmp_path / "a" / "b"
    make_private(made)
    return made


def why(path: Path, **options: Any) -> str:
    return str(exposure(path, **options) or "")


def test_a_folder_of_one_s_own(folder: Path) -> None:
    assert why(folder) == ""
    for mode in (0o755, 0o500, 0o711):  # others may read, as in caches of earlier versions
        folder.chmod(mode)
        assert why(folder) == ""


@pytest.mark.parametrize(("mode", "text"), [(0o777, "0777"), (0o702, "0702"), (0o1777, "1777")])
def test_a_folder_that_others_can_write(folder: Path, mode: int, text: str) -> None:
    folder.chmod(mode)
    found = exposure(folder)
    assert str(found) == f"{folder} can be written by others (mode {text})"
    assert found is not None
    assert found.mend == f"chmod -R go-w {folder}"


def test_a_parent_that_others_can_write(folder: Path) -> None:
    folder.parent.chmod(0o777)
    assert why(folder).startswith(f"{folder.parent} can be written by others")
    folder.parent.chmod(0o1777)  # like /tmp: nobody exchanges what is another's
    assert why(folder) == ""


def test_another_owner(folder: Path, chown: Chown) -> None:
    chown(folder, STRANGER)
    assert why(folder).startswith(f"{folder} belongs to user {STRANGER}")
    chown(folder, 0)
    assert why(folder) == ""
    chown(folder.parent, STRANGER)
    assert why(folder).startswith(f"{folder.parent} belongs to user {STRANGER}")


def test_owners_that_do_not_matter(folder: Path, chown: Chown) -> None:
    """The owner of a file that the user names is trusted, others who can put one there are not."""
    chown(folder, STRANGER)
    assert why(folder, any_owner=True) == ""
    folder.parent.chmod(0o1777)
    assert why(folder, any_owner=True).startswith(f"{folder} belongs to")


def test_owners_from_outside_of_a_container(
    folder: Path, chown: Chown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They look like nobody, which no user of inside can be; the folder itself has to be ours."""
    monkeypatch.setattr(private, "_nobody", lambda: STRANGER)
    chown(folder.parent, STRANGER)
    assert why(folder) == ""
    chown(folder, STRANGER)
    assert why(folder).startswith(f"{folder} belongs to")


def test_links_are_followed(folder: Path, tmp_path: Path, chown: Chown) -> None:
    link, shared = tmp_path / "link", tmp_path / "shared"
    shared.mkdir()
    (shared / "inner").symlink_to("../a/b")
    link.symlink_to(shared / "inner")
    assert why(link) == ""
    shared.chmod(0o777)  # not where the link leads to, but where it leads through
    assert why(link).startswith(f"{shared} can be written")
    shared.chmod(0o1777)
    assert why(link) == ""
    chown(shared / "inner", STRANGER)
    assert why(link).startswith(f"{shared / 'inner'} belongs to")
    chown(shared / "inner", os.geteuid())
    folder.chmod(0o777)
    assert why(link).startswith(f"{folder} can be written")


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "ring").symlink_to("ring")
    with pytest.raises(OSError, match="ring"):
        exposure(tmp_path / "ring")
    with pytest.raises(FileNotFoundError):
        exposure(tmp_path / "nothing")


def test_names_from_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    folder.parent.chmod(0o777)
    for name in (".", "../b", "../../a/b"):
        assert why(Path(name)).startswith(f"{folder.parent} can be written")
    assert os.fspath(folder.parent) in why(folder / "..")


def test_a_current_folder_that_is_gone_matters_to_relative_paths_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process whose folder was removed goes on compiling."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert exposure(tmp_path) is None
    with temporary_folder() as folder:
        assert folder.is_dir()
    with pytest.raises(FileNotFoundError):
        exposure("entry")


@pytest.mark.parametrize(
    ("name", "members", "lists", "safe"),
    [
        ("me", [], [], True),  # made by the system for each user
        ("me", ["me"], [], True),
        ("me", ["me", "eve"], [], False),
        ("users", [], [], False),
        ("me", [], ["system.posix_acl_access"], False),  # the mode of the group is a mask then
    ],
)
def test_groups(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, members: list[str],
    lists: list[str], safe: bool,
) -> None:  # fmt: skip
    gid = folder.stat().st_gid
    user = SimpleNamespace(pw_name="me", pw_gid=gid)
    group = SimpleNamespace(gr_name=name, gr_gid=gid, gr_mem=members)
    monkeypatch.setattr(private, "pwd", SimpleNamespace(getpwuid=lambda uid: user))
    monkeypatch.setattr(private, "grp", SimpleNamespace(getgrgid=lambda gid: group))
    monkeypatch.setattr(private.os, "listxattr", lambda *_, **__: lists, raising=False)
    folder.chmod(0o775)
    assert why(folder) == ("" if safe else f"{folder} can be written by group {gid} (mode 0775)")


def test_a_user_without_a_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that are started with a number."""

    def unknown(_: int) -> Any:
        raise KeyError

    monkeypatch.setattr(private, "pwd", SimpleNamespace(getpwuid=unknown))
    assert why(folder) == ""
    folder.chmod(0o770)
    assert "can be written by group" in why(folder)


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_what_is_made_is_safe_whatever_the_umask(umask: int, tmp_path: Path) -> None:
    made = tmp_path / "x" / "y" / "z"
    make_private(made)
    make_private(made)
    assert {stat.S_IMODE(p.stat().st_mode) for p in (made, made.parent)} == {0o700}
    write_new(made / "file", b"1")
    assert stat.S_IMODE((made / "file").stat().st_mode) == 0o644 & ~umask
    assert read_private(made / "file") == b"1"


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "link").symlink_to("elsewhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError):
            write_new(tmp_path / name, b"2")
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(NotADirectoryError):
        make_private(tmp_path / "file")


def test_a_file_is_replaced_and_links_stay_alone(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"other")
    (tmp_path / "file").symlink_to("other")
    replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert (tmp_path / "other").read_bytes() == b"other"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        replace_file(tmp_path / "folder", b"new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder", "other"]


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    write_new(file, b"1")
    file.chmod(0o666)
    with pytest.raises(CacheError, match=r"can be written by others.*chmod go-w"):
        read_private(file)
    file.chmod(0o644)
    (tmp_path / "link").symlink_to(file)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "nothing", "."):
        with pytest.raises(OSError, match=r"symbolic|no ordinary file|No such|directory"):
            read_private(tmp_path / name)
    monkeypatch.setattr(private.os, "geteuid", lambda: STRANGER)
    if file.stat().st_uid != 0:
        with pytest.raises(CacheError, match="belongs to user"):
            read_private(file)


def test_temporary_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private.tempfile, "tempdir", str(tmp_path))
    with temporary_folder() as made:
        assert made.parent == tmp_path
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    tmp_path.chmod(0o777)
    with pytest.raises(CacheError, match=r"could exchange what is compiled there; set TMPDIR"):
        temporary_folder().__enter__()
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o1777)
    with temporary_folder() as made:
        assert checked_temporary(made) == made


def test_workers_take_nothing_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('planted')")
    script = (
        "import os, sys; from cutesuper.runtime.workers import _Worker; "
        f"os.chdir({str(tmp_path)!r}); w = _Worker(); w.close(); "
        "print(w._process.returncode)"
    )
    code = tmp_path / "main" / "main.py"
    code.parent.mkdir()
    code.write_text(script)
    root = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, str(code)], env={**os.environ, "PYTHONPATH": root},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "0", done.stderr
