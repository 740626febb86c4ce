"""inkstream doctor on odd machines: a fake nvidia-smi, no compiler, no packages, a taken port, wrong settings."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli import doctor
from app.cli.doctor import Finding, Given, examine, main
from tests.support import ROOT


@pytest.fixture(autouse=True)
def bare_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides programs outside a folder of the test, builds no kernels, and clears all settings."""
    for name in [name for name in os.environ if name.startswith("INKSTREAM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("INKSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)


def _found(topic: str, **given: object) -> list[Finding]:
    return _of(topic, {"weights": ROOT / "weights", "port": 0, **given})


def _of(topic: str, given: Given) -> list[Finding]:
    return [finding for finding in examine(given) if finding.topic == topic]


def _program(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("is_native", "words"), [(True, "in bfloat16"), (False, "in float32, because it multiplies no bfloat16")]
)
def test_dtype_that_auto_chooses_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, is_native: bool, words: str
) -> None:
    monkeypatch.setattr(doctor, "has_native_bfloat16", lambda: is_native)
    assert _found("dtype") == [Finding("dtype", f"--dtype auto computes on this CPU {words}")]


def test_gpu_is_listed_and_a_torch_without_cuda_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _found("gpu") == [Finding("gpu", "none (no NVIDIA driver)")]
    _program(tmp_path, "nvidia-smi", "echo 'NVIDIA H100, 81559 MiB, 4 MiB, 570.1'")
    monkeypatch.setattr(doctor, "why_no_cuda", lambda: "it computes on CPUs only")
    gpu, torch = _found("gpu")
    assert gpu == Finding("gpu", "NVIDIA H100, 81559 MiB, 4 MiB, 570.1")
    assert (torch.level, torch.text) == ("slow", "it computes on CPUs only")
    monkeypatch.setattr(doctor, "why_no_cuda", lambda: "")
    assert _found("gpu") == [gpu]


@pytest.mark.parametrize("body", ["exit 9", "while :; do :; done", None])
def test_broken_nvidia_smi_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str | None) -> None:
    _program(tmp_path, "nvidia-smi", body or "")
    if body is None:
        (tmp_path / "nvidia-smi").write_text("not a program")
    monkeypatch.setattr(doctor, "_SMI_SECONDS", 0.2)
    (gpu,) = _found("gpu")
    assert gpu.level == "slow" and gpu.remedy and gpu.text.startswith("nvidia-smi fails (")


def test_without_kernels_or_a_compiler_the_remedy_is_to_install_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kernels,) = _found("kernels")
    assert (kernels.level, "g++" in kernels.remedy, "torch computes" in kernels.text) == ("slow", True, True)
    installed = doctor._version
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "_version", lambda name: None if name == "torch" else installed(name))
        (kernels,) = _found("kernels")
        assert (kernels.level, "nothing can compute" in kernels.text) == ("broken", True)
    _program(tmp_path, "g++", "echo g++ 12")
    assert _found("kernels") == [Finding("kernels", "not built; g++ 12", "slow", "inkstream compile (a minute or so)")]


def test_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("msgspec", "uvloop") else installed(name))
    others, missing = _found("packages")
    assert missing == Finding("packages", "missing: msgspec", "broken", doctor._INSTALL)
    assert "numpy" in others.text and "uvloop" not in others.text


def test_variables_are_listed_secrets_hidden_and_misspelled_ones_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INKSTREAM_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("INKSTREAM_API_KEY", "ink-secret")
    (listed,) = _found("variables")
    assert "INKSTREAM_URL=http://127.0.0.1:1" in listed.text
    assert "INKSTREAM_API_KEY=(hidden)" in listed.text and "secret" not in listed.text
    assert not _found("settings"), "variables of clients are known"
    monkeypatch.setenv("INKSTREAM_PROT", "1")
    (wrong,) = _found("settings")
    assert wrong.level == "broken" and "did you mean INKSTREAM_PORT?" in wrong.text


def test_failing_check_is_a_finding_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Given) -> Iterator[Finding]:
        raise RuntimeError("odd\nmachine")

    monkeypatch.setitem(doctor._CHECKS, "gpu", fail)
    assert _found("gpu") == [Finding("gpu", "could not be checked (RuntimeError: odd machine)", "unknown")]
    assert _found("variables")


def test_used_port_and_unservable_weights_are_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["--port", str(port), "--weights", str(tmp_path / "none"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    broken = {finding["topic"]: finding["text"] for finding in report["findings"] if finding["level"] == "broken"}
    assert [finding["topic"] for finding in report["findings"]].count("weights") == 1, "the error alone"
    assert not report["can_run"] and broken.keys() == {"weights", "port"}
    assert "no such directory" in broken["weights"] and f"such as --port {port + 1}" in broken["port"]
    assert main(["--port", "70000"]) == 1
    assert "port (INKSTREAM_PORT)" in capsys.readouterr().out


def test_port_used_by_an_inkstream_service_is_broken_only_if_the_flag_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import socket as s; x = s.create_server(('127.0.0.1', 0)); print(x.getsockname()[1], flush=True); input()"
    )
    command = [sys.executable, "-c", program, "inkstream", "serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout
        number = int(service.stdout.readline())
        monkeypatch.setenv("INKSTREAM_PORT", str(number))
        (usual,), (named,) = _of("port", {"weights": ROOT / "weights"}), _found("port", port=number)
        service.communicate("\n")
    assert (usual.level, named.level) == ("ok", "broken")
    assert "another inkstream" in usual.text and usual.text == named.text


def test_hub_model_is_not_a_missing_directory() -> None:
    (weights,) = _found("weights", weights="org/name")
    assert weights.level == "ok" and "inkstream check org/name" in weights.text


def test_cost_of_a_token_is_named() -> None:
    (cost,) = _found("one token")
    assert cost.level == "ok" and "MFLOP" in cost.text and "in bfloat16" in cost.text


def test_config_that_asks_for_far_more_than_the_files_have_is_broken_at_once(tmp_path: Path) -> None:
    """Its list of operations would fill the memory."""
    shutil.copytree(ROOT / "weights", tmp_path / "huge")
    config = json.loads((tmp_path / "huge/config.json").read_text())
    (tmp_path / "huge/config.json").write_text(json.dumps(config | {"num_hidden_layers": 2**31 - 1}))
    findings = examine({"weights": tmp_path / "huge", "port": 0})
    (broken,) = (finding for finding in findings if finding.level == "broken" and finding.topic == "weights")
    assert "asks for 2147483647 layers" in broken.text and not [f for f in findings if f.topic == "one token"]


def test_bundled_model_is_checked_without_a_weights_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--port", "0"]) == 0
    assert f" {ROOT / 'weights'}, " in capsys.readouterr().out


@pytest.mark.slow
def test_doctor_imports_no_torch_and_runs_without_packages() -> None:
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
