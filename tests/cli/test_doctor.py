"""inkstream doctor on odd machines: fakes of nvidia-smi, /proc, the compiler, the cache, the port and the packages."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from app.cli import doctor
from app.cli.doctor import Finding, Machine, examine, main
from tests.support import ROOT


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The findings of a machine that differs from this one in some points, by topic."""

    def findings(topic: str, *, root: Path = Path("/"), **variables: str) -> list[Finding]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        chosen = Machine(root=root, environment=os.environ, weights=ROOT / "weights", port=0)
        return [finding for finding in examine(chosen) if finding.topic == topic]

    monkeypatch.setenv("PATH", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("INKSTREAM_")]:
        monkeypatch.delenv(name)
    return findings


def _program(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def test_a_gpu_is_listed_and_a_torch_that_does_not_use_it_is_slow(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _program(tmp_path, "nvidia-smi", "echo 'NVIDIA H100, 81559 MiB, 4 MiB, 570.1'")
    monkeypatch.setattr(doctor, "_cuda_of_torch", lambda: None)
    gpu, torch = machine("gpu")
    assert gpu == Finding("gpu", "NVIDIA H100, 4 MiB of 81559 MiB used, driver 570.1")
    assert (torch.level, "CPUs" in torch.text, "make install" in torch.remedy) == ("slow", True, True)
    monkeypatch.setattr(doctor, "_cuda_of_torch", lambda: "12.8")
    assert machine("gpu") == [gpu]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("echo 'has failed because it could not communicate'; exit 9", "fails (has failed because it could not"),
        ("exit 1", "fails (exit code 1)"),
        ("echo; echo garbage", "fails ("),
        ("while :; do :; done", "does not answer within 0.2 s"),
    ],
)
def test_a_broken_nvidia_smi_is_a_finding(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, text: str
) -> None:
    _program(tmp_path, "nvidia-smi", body)
    if "while" in body:
        monkeypatch.setattr(doctor, "_SMI_SECONDS", 0.2)
    [gpu] = machine("gpu")
    assert gpu.level == "slow" and gpu.remedy and text in gpu.text


def test_a_program_that_cannot_be_run_is_a_finding(machine: Any, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("not a program")
    (tmp_path / "nvidia-smi").chmod(0o755)
    [gpu] = machine("gpu")
    assert gpu.level == "slow" and "cannot be run" in gpu.text


def test_without_a_gpu_nothing_is_to_be_done(machine: Any) -> None:
    assert machine("gpu") == [Finding("gpu", "none (no NVIDIA driver)")]


def test_a_machine_without_proc_gets_a_report(machine: Any, tmp_path: Path) -> None:
    assert machine("memory", root=tmp_path)[0].level == "unknown"
    assert "does not list the features" in machine("cpu", root=tmp_path)[0].text
    assert not machine("load", root=tmp_path)


def test_packed_weights_are_named_with_the_command_that_clears_them(machine: Any, tmp_path: Path) -> None:
    assert not machine("packed", INKSTREAM_CACHE_DIR=str(tmp_path))
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed/weights-0.bin").write_bytes(bytes(3 << 20))
    [packed] = machine("packed", INKSTREAM_CACHE_DIR=str(tmp_path))
    assert packed.level == "ok" and packed.text == f"weights of 1 models, 3 MiB; rm -r {tmp_path}/packed clears them"


def test_what_slows_a_machine_is_named_with_a_remedy(machine: Any, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/loadavg").write_text("99.5 9 9 1/2 3")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4096 kB\nMemAvailable: 2048 kB\n")
    [load] = machine("load", root=tmp_path)
    assert load.level == "slow" and "load 99.5" in load.text
    [memory] = machine("memory", root=tmp_path)
    assert memory.level == "broken" and memory.text.startswith("2 MiB free of 4 MiB, and the weights have 17 MiB")
    if (os.cpu_count() or 1) > 1:
        assert machine("threads", OMP_NUM_THREADS="1")[0].remedy == "unset OMP_NUM_THREADS"


def test_without_a_compiler_and_without_kernels_the_remedy_is_to_install_one(machine: Any, tmp_path: Path) -> None:
    [compiler] = machine("compiler", INKSTREAM_CACHE_DIR=str(tmp_path / "cache"))
    assert (compiler.level, "g++" in compiler.remedy) == ("slow", True)
    assert machine("kernels") == []
    _program(tmp_path, "g++", "echo g++ 12")
    assert machine("compiler") == [Finding("compiler", "g++ 12")]
    [kernels] = machine("kernels")
    assert kernels.level == "slow" and kernels.remedy.startswith("inkstream compile")


def test_a_cache_that_cannot_be_written_is_slow(machine: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    [cache] = machine("cache", INKSTREAM_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert cache.level == "slow" and "INKSTREAM_CACHE_DIR" in cache.remedy
    assert machine("cache", INKSTREAM_CACHE_DIR=str(tmp_path / "new")) == []


def test_a_missing_package_is_named_with_the_command_that_installs(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("msgspec", "uvloop") else installed(name))
    missing, others = machine("packages")
    assert missing == Finding("packages", "missing: msgspec", "broken", doctor._INSTALL)
    assert "numpy" in others.text and "uvloop" not in others.text


@pytest.mark.parametrize(
    ("library", "compiler", "level"),
    [(Path("kernels.so"), ("", "none"), "ok"), (None, ("g++ 12", ""), "ok"), (None, ("", "none"), "broken")],
)
def test_without_torch_the_service_needs_its_native_kernels_or_a_compiler(
    library: Path | None, compiler: tuple[str, str], level: str, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "torch" else installed(name))
    monkeypatch.setattr(doctor, "find", lambda _: library)
    monkeypatch.setattr(doctor, "_compiler", lambda: compiler)
    (torch,) = machine("torch")
    assert torch.level == level and "only the native kernels" in torch.text
    assert ("inkstream[torch]" in torch.remedy) == (level == "broken")
    found = [finding for topic in ("compiler", "kernels") for finding in machine(topic)]
    assert not any("torch" in finding.text for finding in found), "it cannot compute instead"
    assert any(finding.level == "broken" for finding in found) == (level == "broken")


def test_a_misspelled_variable_is_broken_and_secrets_are_hidden(machine: Any) -> None:
    listed, wrong = machine("variables", INKSTREAM_PROT="1", INKSTREAM_API_KEY="ink-secret")
    assert "INKSTREAM_API_KEY=(hidden)" in listed.text and "secret" not in listed.text
    assert (
        wrong.level == "broken" and "did you mean INKSTREAM_PORT?" in wrong.text and "docs/settings.md" in wrong.remedy
    )


def test_a_check_that_fails_is_a_finding_and_the_others_go_on(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Machine) -> Any:
        raise RuntimeError("odd\nmachine")

    monkeypatch.setitem(doctor._CHECKS, "weights", fail)
    assert machine("weights") == [Finding("weights", "could not be checked (RuntimeError: odd machine)", "unknown")]
    assert machine("variables")


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = b'{"status": "ready", "phase": "ready"}' if self.server.is_inkstream else b"<html>"  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("is_inkstream", [True, False])
def test_a_taken_port_is_broken_unless_a_service_of_ours_has_it(
    is_inkstream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with HTTPServer(("127.0.0.1", 0), _Health) as server:
        server.is_inkstream = is_inkstream  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        port = server.server_port
        code = main(["--port", str(port), "--weights", str(ROOT / "weights"), "--json"])
        server.shutdown()
        thread.join()
    report = json.loads(capsys.readouterr().out)
    [found] = [finding for finding in report["findings"] if finding["topic"] == "port"]
    assert (code, report["can_run"]) == ((0, True) if is_inkstream else (1, False))
    assert found["level"] == ("ok" if is_inkstream else "broken")
    assert is_inkstream or f"make serve PORT={port + 1}" in found["remedy"]


def test_a_model_of_the_hub_is_no_missing_directory() -> None:
    machine = Machine(environment={}, weights=Path("org/name"), port=0)
    (finding,) = (finding for finding in examine(machine) if finding.topic == "weights")
    assert (finding.level, "inkstream check org/name" in finding.text) == ("ok", True)


def test_variables_of_clients_are_no_unknown_settings(machine: Any) -> None:
    (listed,) = machine("variables", INKSTREAM_URL="http://127.0.0.1:1", INKSTREAM_API_KEY="ink-secret")
    assert "INKSTREAM_URL=http://127.0.0.1:1" in listed.text


def test_without_a_folder_weights_the_included_model_is_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INKSTREAM_WEIGHTS", raising=False)
    main(["--port", "0", "--json"])
    (found,) = (f for f in json.loads(capsys.readouterr().out)["findings"] if f["topic"] == "weights")
    assert found["level"] == "ok"
    assert found["text"].startswith(f"{ROOT / 'weights'}, the model that comes with inkstream: ")


def test_weights_that_cannot_be_served_are_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in {
        "config.json": "{}",
        "tokenizer.json": "{}",
        "model.safetensors": "version https://git-lfs",
    }.items():
        (tmp_path / name).write_text(content)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for directory, text in ((tmp_path, "git lfs pull"), (tmp_path / "none", "no such directory")):
        assert main(["--weights", str(directory), "--port", str(port)]) == 1
        report = capsys.readouterr().out
        assert text in report and "make serve WEIGHTS=DIR" in report and "The service cannot run" in report


@pytest.mark.parametrize("arguments", [["--port", "x"], ["--port", "70000"], ["--x"]])
def test_wrong_arguments_end_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_it_imports_no_torch_and_survives_a_python_without_packages() -> None:
    program = (
        "import sys; from app.cli.doctor import main; main(['--json', '--port', '0']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("}\nFalse\n")
    bare = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {program}"]
    done = subprocess.run(bare, cwd=ROOT, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout.removesuffix("False\n"))
    assert not report["can_run"]
    assert any(finding["remedy"] == doctor._INSTALL for finding in report["findings"])
