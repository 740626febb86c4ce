"""Building the kernel library: its dependencies, its errors, and cleanup after failures."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest

from app.common.cache_directory import metadata_path, read_metadata
from app.engine.cpu.toolchain import library_cache
from app.engine.cpu.toolchain.builder import build, find, find_compiler, find_or_build
from app.engine.cpu.toolchain.cpu_target import X86_LEVELS, BuildError, this_level
from app.engine.cpu.toolchain.library_cache import MAX_OLD_LIBRARIES, BuildRecipe
from tests.support.fake_compiler import FakeCompiler, compile_library, fake_compiler
from tests.support.processes import has_exited

STUB = '#include "value.h"\nextern "C" int ink_sizes() { return VALUE; }'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "inkstream.cpp").write_text(STUB)
    (folder / "value.h").write_text("#define VALUE 8\n")
    return folder


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "inkstream"


@pytest.fixture
def compiler(tmp_path: Path, stub_library: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    fake = fake_compiler(tmp_path, stub_library)
    monkeypatch.setenv("CXX", str(fake.path))
    return fake


def _use(monkeypatch: pytest.MonkeyPatch, folder: Path, product: Path, before: str) -> FakeCompiler:
    fake = fake_compiler(folder, product, before=before)
    monkeypatch.setenv("CXX", str(fake.path))
    return fake


def _leftovers(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"} if folder.exists() else set()


def test_system_compiler_builds_a_library_that_loads(source: Path, cache_dir: Path) -> None:
    wanted = BuildRecipe(level=this_level(), source=source)
    library = build(wanted, cache_dir)
    assert ctypes.CDLL(str(library)).ink_sizes() == 8
    assert _leftovers(cache_dir) == {library.name, f"{library.name}.json"}
    note = read_metadata(library)
    assert note and note["bytes"] == library.stat().st_size
    assert note["flags"] == list(wanted.flags) and note["compiler"] == find_compiler().version


def test_packaged_library_is_found_after_the_cache(
    tmp_path: Path, cache_dir: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.engine.cpu.toolchain.builder.PACKAGED", tmp_path / "packaged")
    assert find(cache_dir) is None
    packaged = build(BuildRecipe(level=this_level()), tmp_path / "packaged")
    assert find(cache_dir) == find_or_build(cache_dir) == packaged
    assert len(compiler.pids) == 1
    assert build(BuildRecipe(level=this_level()), cache_dir) == find(cache_dir) == cache_dir / packaged.name


def test_library_name_depends_on_all_inputs(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = BuildRecipe(level=X86_LEVELS[0], source=source).name
    names = {first, BuildRecipe(level=X86_LEVELS[1], source=source).name}
    (source / "notes.txt").write_text("no part of it")
    assert BuildRecipe(level=X86_LEVELS[0], source=source).name == first
    for change in (
        lambda: (source / "inkstream.cpp").write_text(f"{STUB}\n"),
        lambda: (source / "value.h").write_text("#define VALUE 0\n"),
        lambda: (source / "more.h").write_text(""),
        lambda: (source / "more.h").rename(source / "most.h"),
        lambda: monkeypatch.setattr(library_cache, "FLAGS", (*library_cache.FLAGS, "-g")),
    ):
        change()
        names.add(BuildRecipe(level=X86_LEVELS[0], source=source).name)
    assert len(names) == 7


def _flip(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)


def _link(library: Path) -> None:
    library.symlink_to(library.rename(library.with_suffix(".elsewhere")))


DAMAGE = {
    "a bit": _flip,
    "its end": lambda library: os.truncate(library, 100),
    "all of it": lambda library: library.unlink(),
    "the note": lambda library: metadata_path(library).unlink(),
    "the note's text": lambda library: metadata_path(library).write_text('{"sha256": '),
    "others may write it": lambda library: library.chmod(0o664),
    "others may write the note": lambda library: metadata_path(library).chmod(0o646),
    "a link": _link,
}
if os.geteuid() == 0:  # only root can change the owner
    DAMAGE["another user's"] = lambda library: os.chown(library, 54321, -1)
    DAMAGE["another user's note"] = lambda library: os.chown(metadata_path(library), 54321, -1)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_or_untrusted_library_is_built_again(cache_dir: Path, compiler: FakeCompiler, damage: str) -> None:
    library = find_or_build(cache_dir)
    DAMAGE[damage](library)
    assert find(cache_dir) is None
    assert find_or_build(cache_dir) == find(cache_dir) == library
    assert len(compiler.pids) == 2


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("is_given_away", [False, *[True] * (os.geteuid() == 0)])
def test_directory_writable_by_others_is_neither_read_nor_written(cache_dir: Path, is_given_away: bool) -> None:
    find_or_build(cache_dir)
    if is_given_away:
        os.chown(cache_dir, 54321, -1)
    else:
        cache_dir.chmod(0o777)
    assert find(cache_dir) is None
    with pytest.raises(BuildError, match="belongs to another user or is writable by others"):
        find_or_build(cache_dir)


@pytest.mark.parametrize(
    ("before", "code", "words"),
    [
        ('echo "In file included" >&2; echo "y.h:7:3: error: no\tsuch" >&2; exit 1', "", "y.h:7:3: error: no such"),
        ('echo "ld: final link failed: No space left on device" >&2; exit 1', "", "No space left on device"),
        ("exit 3", "", "exit code 3"),
        ("kill -9 $$", "", "killed by signal 9"),
        ("exit 0", "", "wrote no library"),
        ("", "int other() { return 1; }", "does not load.*ink_sizes"),
        ("", "int raise(int); int now = raise(4); int ink_sizes() { return now; }", "by signal 4"),
    ],
)
def test_failed_build_reports_its_first_error_and_leaves_no_files(
    tmp_path: Path, cache_dir: Path, stub_library: Path, monkeypatch: pytest.MonkeyPatch, before: str, code: str,
    words: str,
) -> None:  # fmt: skip
    product = compile_library(tmp_path, f'extern "C" {{ {code} }}') if code else stub_library
    _use(monkeypatch, tmp_path, product, before)
    with pytest.raises(BuildError, match=words) as caught:
        find_or_build(cache_dir)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert _leftovers(cache_dir) == set()


def test_compiler_beyond_its_time_limit_is_killed_with_its_children(
    tmp_path: Path, cache_dir: Path, stub_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = _use(monkeypatch, tmp_path, stub_library, f'sleep 60 & echo $! >> "{tmp_path / "calls"}"; wait')
    for seconds in (2, 20):  # on a busy machine it may not start within the first
        fake.calls.unlink(missing_ok=True)
        with pytest.raises(BuildError, match=f"more than {seconds} seconds"):
            build(BuildRecipe(level=this_level()), cache_dir, seconds=float(seconds))
        if len(fake.pids) == 2:
            break
    assert len(fake.pids) == 2 and all(map(has_exited, fake.pids))
    assert _leftovers(cache_dir) == set()


def test_full_or_unwritable_disk_is_named(
    tmp_path: Path, cache_dir: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=rf"{tmp_path}/file/x \(Not a directory\): give another directory"):
        find_or_build(tmp_path / "file" / "x")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BuildError, match="No space left on device"):
        find_or_build(cache_dir)
    assert _leftovers(cache_dir) == set()
    assert len(compiler.pids) == 1


def test_broken_compiler_is_skipped(tmp_path: Path, stub_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = fake_compiler(tmp_path, stub_library)
    (tmp_path / "g++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "g++").chmod(0o755)
    good.path.rename(tmp_path / "clang++")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert find_compiler().command == (str(tmp_path / "clang++"),)
    assert find_compiler().version == "fake 1.0"


@pytest.mark.usefixtures("compiler")
def test_only_the_newest_libraries_of_other_versions_are_kept(source: Path, cache_dir: Path) -> None:
    cache_dir.mkdir(mode=0o755, parents=True)
    mine = [BuildRecipe(level=level, source=source).name for level in X86_LEVELS]
    old = [mine[2].replace(".so", f"{number}.so") for number in range(MAX_OLD_LIBRARIES + 3)]
    for time, name in enumerate([*mine[1:], *old]):
        for path in (cache_dir / name, metadata_path(cache_dir / name)):
            path.write_text("")
            os.utime(path, (time, time))
    build(BuildRecipe(level=X86_LEVELS[0], source=source), cache_dir)
    kept = {*mine, *old[-MAX_OLD_LIBRARIES:]}
    assert _leftovers(cache_dir) == kept | {f"{name}.json" for name in kept}
