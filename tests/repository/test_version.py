"""Versions: every commit has a greater one, whatever git knows, and a process finds its own without git."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from app.common import version
from app.common.version import RELEASE, checkout_version
from inkstream import build_version as builds
from inkstream.build_version import build_version
from tests.support import ROOT

_NEXT = Version(RELEASE).major, Version(RELEASE).minor, Version(RELEASE).micro + 1


@pytest.fixture(autouse=True)
def no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variables of the environment in which the tests run."""
    monkeypatch.delenv(builds.ENVIRONMENT_VARIABLE, raising=False)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one file of the product and one commit."""
    folder = tmp_path / "repository"
    (folder / "app").mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    commit(folder, "one")
    return folder


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def commit(folder: Path, text: str) -> str:
    """Commits a change of the product; returns the commit."""
    (folder / "app/code.py").write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", text)
    return git(folder, "rev-parse", "HEAD")


def test_release_is_the_newest_one_in_every_file() -> None:
    (newest, *_) = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest == RELEASE
    assert f"\nversion: {RELEASE}\n" in (ROOT / "CITATION.cff").read_text()
    chart = (ROOT / "deploy/kubernetes/Chart.yaml").read_text()
    assert f"\nversion: {RELEASE}\n" in chart and f'\nappVersion: "{RELEASE}"\n' in chart


def test_every_commit_has_a_greater_version(repository: Path) -> None:
    versions = [Version("0.1.0"), Version(RELEASE)]
    for text in ("two", "three", "four"):
        commit(repository, text)
        versions.append(Version(build_version(repository)))
    git(repository, "checkout", "-q", "-b", "side", "HEAD~1")
    commit(repository, "five")
    git(repository, "merge", "-q", "-s", "ours", "-m", "merge", "main")
    versions.append(Version(build_version(repository)))
    assert versions == sorted(set(versions))
    assert versions[-1].release == _NEXT and versions[-1].local is None


def test_tag_of_the_release_is_the_version(repository: Path) -> None:
    before = Version(build_version(repository))
    git(repository, "tag", "v99.0.0")
    assert Version(build_version(repository)) == before, "a tag of another release"
    git(repository, "tag", "-a", "-m", "release", f"v{RELEASE}")
    assert build_version(repository) == RELEASE
    commit(repository, "later")
    assert Version(build_version(repository)) > Version(RELEASE)


def test_changed_files_have_another_version_than_their_commit(repository: Path) -> None:
    git(repository, "tag", f"v{RELEASE}")
    clean = build_version(repository)
    (repository / "notes.txt").write_text("not in the wheel")
    assert build_version(repository) == clean
    found = [clean]
    for text in ("changed", "changed again"):
        (repository / "app/code.py").write_text(text)
        found.append(build_version(repository))
    (repository / "app/new.py").write_text("")
    found.append(build_version(repository))
    assert len(set(found)) == len(found)
    assert all("+tree." in each and Version(each) > Version(clean) for each in found[1:])


def test_shallow_clone_has_a_version_for_each_commit(repository: Path, tmp_path: Path) -> None:
    found = []
    for number in range(2):
        commit(repository, f"commit {number}")
        git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", f"shallow-{number}")
        found.append(build_version(tmp_path / f"shallow-{number}"))
    assert len(set(found)) == 2
    assert all(re.fullmatch(r"[\d.]+\.dev0\+\d{14}\.g[0-9a-f]+", each) for each in found), found
    assert Version(RELEASE) < min(map(Version, found))
    assert max(map(Version, found)) < Version(build_version(repository))


def test_sources_without_git_have_a_version_for_their_files(repository: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(repository, tmp_path / "bare", ignore=shutil.ignore_patterns(".git")))
    first = build_version(bare)
    assert build_version(bare) == first and Version(first) > Version(RELEASE)
    (bare / "app/code.py").write_text("changed")
    assert build_version(bare) != first
    (bare / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: inkstream\nVersion: 9.8.7\n")  # an sdist
    assert build_version(bare) == "9.8.7"
    outer = repository / "vendored"  # below a repository that is not ours
    shutil.copytree(bare, outer)
    assert build_version(outer) == "9.8.7"


def test_build_argument_overrides(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(builds.ENVIRONMENT_VARIABLE, "1.2.3")
    assert build_version(repository) == "1.2.3"
    monkeypatch.setenv(builds.ENVIRONMENT_VARIABLE, " ")
    assert build_version(repository) != "1.2.3"


def test_repository_without_a_git_program_still_names_its_commit(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha = git(repository, "rev-parse", "HEAD")
    monkeypatch.setenv("PATH", "")
    assert build_version(repository).endswith(f".dev0+g{sha[:9]}")


def test_process_names_its_commit_without_running_git(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(repository, "worktree", "add", "-q", "../other", "-b", "other")
    shas = {repository: git(repository, "rev-parse", "HEAD"), repository.parent / "other": ""}
    shas[repository.parent / "other"] = commit(repository.parent / "other", "elsewhere")
    monkeypatch.setattr(builds.subprocess, "run", lambda *_, **__: pytest.fail("a process waited for git"))
    for folder, sha in shas.items():
        assert checkout_version(folder).endswith(f".dev0+g{sha[:9]}")
    monkeypatch.undo()
    git(repository, "pack-refs", "--all")
    assert checkout_version(repository).endswith(shas[repository][:9])
    git(repository, "checkout", "-q", "--detach")
    assert checkout_version(repository).endswith(shas[repository][:9])
    for damage in ("", "ref: refs/heads/none", "\xff", "ref: ../../x"):
        (repository / ".git/HEAD").write_bytes(damage.encode("latin-1"))
        assert checkout_version(repository) == f"{version.NEXT}.dev0"


def test_program_prints_the_version_of_a_build() -> None:
    command = [sys.executable, "-SEm", "inkstream.build_version"]  # as in a build without packages
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == build_version()
