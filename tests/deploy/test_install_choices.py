"""What an installation decides: torch's build, pip or uv, what it says of failures and of unknown variables."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from deploy.install import __main__ as program
from deploy.install import state
from deploy.install.__main__ import read_settings
from deploy.install.choices import (
    CPU_INDEX,
    InstallError,
    Machine,
    Settings,
    Torch,
    choose_torch,
    explain,
    look_at_machine,
    uv_options,
)
from deploy.install.state import is_complete, read_stamp, write_stamp
from deploy.install.steps import Progress, size_text
from deploy.install.variables import explain_variables, known_variables

PIN = "torch==2.13.0"
LINUX, GPU = Machine("Linux"), Machine("Linux", "NVIDIA H100", 580)
INDEX = ("--extra-index-url", CPU_INDEX)


def _settings(torch: str = "", pip_args: str = "", group: str = "runtime", venv: Path = Path("/x")) -> Settings:
    return Settings(group=group, venv=venv, torch=torch, pip_args=tuple(pip_args.split()))


@pytest.mark.parametrize(
    ("asked", "pip_args", "kept", "machine", "build", "first"),
    [
        ("", "", "", LINUX, "cpu", ("torch==2.13.0+cpu", INDEX)),
        ("", "", "", GPU, "cuda", ("torch==2.13.0,!=2.13.0+cpu", ())),
        ("", "", "", Machine("macOS"), "", (PIN, ())),
        ("", "", "cpu", GPU, "cpu", ("torch==2.13.0+cpu", INDEX)),  # what is there stays
        ("auto", "", "", GPU, "cuda", ("torch==2.13.0,!=2.13.0+cpu", ())),
        ("cpu", "", "cuda", GPU, "cpu", ("torch==2.13.0+cpu", INDEX)),
        ("cuda", "", "", LINUX, "cuda", ("torch==2.13.0,!=2.13.0+cpu", ())),
        ("torch==2.12.0", "", "cuda", LINUX, "cpu", ("torch==2.12.0+cpu", INDEX)),
        ("torch==2.12.0+cu126", "", "", LINUX, "", ("torch==2.12.0+cu126", ())),
        ("./torch.whl", "", "", GPU, "", ("./torch.whl", ())),
        ("", "--index-url URL", "", LINUX, "", (PIN, ())),
        ("", "--no-index --find-links=DIR", "", GPU, "", (PIN, ())),
        ("", "-f DIR", "", LINUX, "", (PIN, ())),
        ("", "--retries 2", "", LINUX, "cpu", ("torch==2.13.0+cpu", INDEX)),
        ("cpu", "--index-url URL", "", LINUX, "cpu", ("torch==2.13.0+cpu", ())),
    ],
)
def test_torch_comes_in_the_build_for_the_machine_unless_a_variable_says_otherwise(
    asked: str, pip_args: str, kept: str, machine: Machine, build: str, first: tuple[str, tuple[str, ...]]
) -> None:
    settings = _settings(asked, pip_args)
    torch = choose_torch(settings, PIN, kept, machine)
    assert torch.build == build and torch.reason
    assert torch.candidates(names_sources=settings.names_sources)[0] == first


def test_without_the_cpu_index_a_cpu_build_of_elsewhere_comes_then_any_and_none_if_one_was_demanded() -> None:
    chosen = choose_torch(_settings(), PIN, "", LINUX).candidates(names_sources=False)
    assert chosen == [("torch==2.13.0+cpu", INDEX), ("torch==2.13.0+cpu", ()), (PIN, ())]
    demanded = choose_torch(_settings("cpu"), PIN, "", LINUX).candidates(names_sources=False)
    assert demanded == chosen[:2]
    assert Torch(PIN, "", "macOS").candidates(names_sources=False) == [(PIN, ())]


def test_the_reason_names_the_gpu_an_old_driver_and_the_way_out() -> None:
    assert "TORCH=cuda" in choose_torch(_settings(), PIN, "", LINUX).reason
    assert "NVIDIA H100; TORCH=cpu" in choose_torch(_settings(), PIN, "", GPU).reason
    assert "driver 535 is too old" in choose_torch(_settings(), PIN, "", Machine("Linux", "NVIDIA A10", 535)).reason
    with pytest.raises(InstallError, match="macOS has one build"):
        choose_torch(_settings("cuda"), PIN, "", Machine("macOS"))


@pytest.mark.parametrize(
    ("script", "name", "driver"),
    [
        ("echo '580.65.06, NVIDIA H100 80GB HBM3'; echo '580.65.06, second'", "NVIDIA H100 80GB HBM3", 580),
        ("echo 'NVIDIA-SMI has failed because it could not communicate with the driver'; exit 9", "", 0),
        ("echo 'No devices were found'", "", 0),
    ],
)
def test_a_gpu_is_one_that_nvidias_driver_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, name: str, driver: int
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    machine = look_at_machine()
    assert (machine.gpu, machine.driver) == (name, driver)


def test_uv_is_given_pips_places_or_not_used_at_all() -> None:
    config = "global.extra-index-url='file:///a/simple https://b/simple'\n:env:.find-links='/wheels'\n"
    sources = ("--extra-index-url", "file:///a/simple", "--extra-index-url", "https://b/simple")
    assert uv_options(config + "global.cert='/x'\n:env:.timeout='9'\n") == (*sources, "--find-links", "/wheels")
    assert uv_options("global.no-index='true'\n") == ("--no-index",)
    assert uv_options("") == uv_options("global.no-index='false'\n") == ()
    assert uv_options(config + "global.proxy='http://p:3128'\n") is None


@pytest.mark.parametrize(
    ("output", "said", "is_consistent"),
    [
        ("ERROR: [Errno 28] No space left on device", "disk became full", False),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "LOCK=", True),
        ("Retrying ... Temporary failure in name resolution\nERROR: No matching distribution", "HTTPS_PROXY", True),
        ("cause: Failed to fetch: https://h/simple/x/\ncause: dns error", "HTTPS_PROXY", True),
        ("ERROR: No matching distribution found for torch==2.13.0", "PYTHON=python3.13", True),
        ("Segmentation fault", "uv says why above; UV= takes pip; make's PIP_ARGS", False),
    ],
)
def test_each_failure_says_what_to_do(output: str, said: str, is_consistent: bool) -> None:
    error = explain(output, "uv")
    assert said in str(error) and "\n" not in str(error)
    assert error.is_consistent is is_consistent


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("WEIGHT", "WEIGHTS=?"),
        ("weights", "WEIGHTS=?"),
        ("MODEL", "WEIGHTS=?"),
        ("PORTS", "PORT=?"),
        ("PIP_ARG", "PIP_ARGS=?"),
        ("XYZZY", "ARGS, DATA, EXTRAS, FRESH"),
    ],
)
def test_an_unknown_variable_is_refused_with_what_was_meant(name: str, said: str) -> None:
    assert said in explain_variables([name])


def test_variables_of_the_makefile_and_of_other_programs_are_let_through() -> None:
    others = ["INKSTREAM_PORT", "CUDA_VISIBLE_DEVICES", "CXX", "CXXFLAGS", "PIP_INDEX_URL", "https_proxy", "HF_HOME"]
    assert explain_variables([*known_variables(), *others]) == ""
    assert {"PORT", "WEIGHTS", "ARGS", "DATA", "OUT", "TORCH", "PIP_ARGS", "LOCK"} <= {*known_variables()}


def _stamp(**changes: str) -> dict[str, str]:
    stamp = dict.fromkeys(state._KEYS, "")
    return {**stamp, "root": str(state.ROOT), "group": "runtime", "inputs": state.inputs_digest(), **changes}


def test_an_environment_is_complete_if_it_has_what_is_asked_for(tmp_path: Path) -> None:
    settings = _settings(venv=tmp_path)
    assert not is_complete(settings, read_stamp(tmp_path))
    write_stamp(tmp_path, _stamp(group="dev", torch_asked="cpu"))
    assert is_complete(settings, read_stamp(tmp_path))
    assert is_complete(settings._replace(group="dev", torch="cpu"), read_stamp(tmp_path))
    assert not is_complete(settings._replace(torch="cuda"), read_stamp(tmp_path))
    assert not is_complete(settings._replace(python="python3.12"), read_stamp(tmp_path))
    for changes in ({"group": "runtime"}, {"root": "/elsewhere"}, {"inputs": "before an update"}):
        write_stamp(tmp_path, _stamp(**{"group": "dev", **changes}))
        assert not is_complete(settings._replace(group="dev"), read_stamp(tmp_path)), changes
    write_stamp(tmp_path, _stamp())
    (tmp_path / state.UNFINISHED).touch()
    assert not is_complete(settings, read_stamp(tmp_path))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"root": "x"}', b"\xff"])
def test_a_damaged_or_older_note_is_no_complete_environment(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "installed").write_bytes(content)
    assert read_stamp(tmp_path) == {}


def test_a_user_who_may_not_read_the_kernels_of_the_one_who_installed_builds_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "of another" / "kernels.so"
    library.parent.mkdir(mode=0o700)
    library.touch()
    built: list[Path] = []
    monkeypatch.setattr(program, "is_complete", lambda *_: True)
    monkeypatch.setattr(program, "read_stamp", lambda _: {"library": str(library), "kernels": state.kernels_key()})
    monkeypatch.setattr(program, "_build_kernels", lambda venv, _: built.append(venv))

    def built_by_this_user() -> int:
        program._install(_settings(), Progress(io.StringIO()), is_report=False)
        return len(built)

    assert built_by_this_user() == 0  # the control: the library can be read
    child = os.fork()
    if not child:
        library.parent.chmod(0)
        if not os.geteuid():
            os.setuid(65534)
        os._exit(10 + built_by_this_user())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11
    library.parent.chmod(0o700)


def test_settings_are_makes_variables() -> None:
    settings = read_settings("dev", {"PIP_ARGS": "--find-links 'a b'", "LOCK": "x.lock y.lock", "VENV": "", "UV": " "})
    assert settings.pip_args == ("--find-links", "a b") and settings.names_sources
    assert settings.locks == ("x.lock", "y.lock") and settings.venv == state.ROOT / ".venv" and settings.uv == ""
    with pytest.raises(InstallError, match="PIP_ARGS cannot be read"):
        read_settings("dev", {"PIP_ARGS": "'"})


def test_a_step_is_one_line_with_time_and_size_and_a_log_gets_no_others() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.running("torch", 1.0, 10**6)
    progress.step("torch", "2.13.0", 12.34, 730_000_000)
    assert stream.getvalue() == "  torch          12.3 s   730 MB  2.13.0\n"
    assert [size_text(n) for n in (0, 375_000, 1_550_000_000)] == ["0 kB", "375 kB", "1.6 GB"]


def test_a_terminal_sees_the_step_that_is_under_way() -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    progress = Progress(stream)
    progress.running("torch", 1.0, 10**6)
    assert "torch" in stream.getvalue() and "1 MB fetched" in stream.getvalue() and "\n" not in stream.getvalue()
