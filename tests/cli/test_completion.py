"""inkstream completion: the generated scripts in the real shells that are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from app.__main__ import _USAGE, main
from tests.support.pseudo_terminal import on_terminal

pytestmark = pytest.mark.slow

_TRY = """source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
"$(complete -p inkstream | sed 's/.* -F \\([^ ]*\\) .*/\\1/')"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script of each shell; capsys does not work in a module fixture."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        with (folder / shell).open("w") as file, pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdout", file)
            assert main(["completion", shell]) == 0
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a directory and a file that share a prefix."""
    (tmp_path / "weights-a").mkdir()
    (tmp_path / "weights.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


CASES = [
    (("inkstream", ""), set(re.findall(r"^  ([a-z]+)", _USAGE, re.MULTILINE))),
    (("inkstream", "co"), {"complete", "compile", "completion", "convert"}),
    (("inkstream", "serve", "--devi"), {"--device"}),
    (("inkstream", "serve", "--device", ""), {"auto", "cpu", "cuda"}),
    (("inkstream", "complete", "--temp"), {"--temperature"}),
    (("inkstream", "keys", ""), {"add", "list", "revoke"}),
    (("inkstream", "keys", "add", "--keys"), {"--keys-file"}),
    (("inkstream", "completion", ""), {"bash", "zsh", "fish"}),
    (("inkstream", "serve", "--weights", "wei"), {"weights-a"}),
    (("inkstream", "check", "wei"), {"weights-a"}),
]


@pytest.mark.parametrize(("words", "expected"), CASES)
def test_bash_completes_verbs_flags_choices_and_directories(
    scripts: Path, folder: Path, words: tuple[str, ...], expected: set[str]
) -> None:
    command = ["bash", "--norc", "-c", _TRY, "bash", str(scripts / "bash"), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    found = {word.strip().rstrip("/") for word in done.stdout.split("\n")} - {""}
    assert (found, done.stderr) == (expected, "")


def test_bash_completes_files_for_flags_that_take_files(scripts: Path, folder: Path) -> None:
    words = ("inkstream", "serve", "--keys-file", "wei")
    command = ["bash", "--norc", "-c", _TRY, "bash", str(scripts / "bash"), *words]
    assert "weights.txt" in subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed (Debian: apt install fish)")
@pytest.mark.parametrize(("words", "expected"), CASES)
def test_fish_completes_the_same(scripts: Path, folder: Path, words: tuple[str, ...], expected: set[str]) -> None:
    command = ["fish", "--no-config", "-c", f"source {scripts / 'fish'}; complete -C '{' '.join(words)}'"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    assert {line.partition("\t")[0].rstrip("/") for line in done.stdout.splitlines()} == expected


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed (Debian: apt install zsh)")
def test_zsh_completes_the_same(scripts: Path, folder: Path) -> None:
    with on_terminal(["zsh", "-f", "-i"], {"TERM": "dumb", "PS1": "ready> ", "HOME": str(folder)}) as terminal:
        terminal.expect("ready> ")
        (folder / "_inkstream").write_text((scripts / "zsh").read_text())
        terminal.send("fpath+=$PWD; autoload -Uz compinit && compinit -u -D; echo lo''aded\r")
        terminal.expect("loaded")
        for typed, completed in (
            ("inkstream do\t", "doctor"),
            ("inkstream serve --devi\t", "--device"),
            ("inkstream serve --device cu\t", "cuda"),
            ("inkstream keys rev\t", "revoke"),
            ("inkstream serve --weights wei\t", "weights-a"),
        ):
            terminal.expect("ready> ")
            terminal.send(typed)
            terminal.expect(completed)
            terminal.send("\x15\r")


def test_unknown_shell_is_refused_with_the_list_of_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["completion", "tcsh"])
    error = capsys.readouterr().err
    assert end.value.code == 2 and "'bash', 'zsh', 'fish'" in error and error.count("\n") == 1
