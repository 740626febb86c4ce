"""The wheel, built from the source distribution, next to two other packages named `app` and `model`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from benchmarks.service_process import launch
from tests.support import ROOT
from tests.support.servers import kernels

pytestmark = pytest.mark.slow

INPUTS = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "app", "benchmarks", "inkstream", "model", "weights")
BENCH = {f"benchmarks/{name}.py" for name in ("__init__", "client", "common", "completions", "load", "prompts")}
MOST_BYTES = 100e6
"""The package index accepts no larger file."""
OTHER = "raise SystemExit(f'{__name__} of another package was imported')\n"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def _run(*command: str | Path, folder: Path, **environment: str) -> str:
    """Output of a command that must succeed. The command inherits none of the service's variables."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("INKSTREAM_")}
    result = subprocess.run(
        command, cwd=folder, env={**variables, **environment}, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution. It is built from a copy, because a build leaves files next to its input."""
    folder = tmp_path_factory.mktemp("source")
    unwanted = shutil.ignore_patterns("__pycache__", "built", ".training")
    for name in INPUTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, folder)
    build = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    name = _run(sys.executable, "-c", build, folder=folder).split()[-1]
    (folder / "unpacked").mkdir()
    _run("tar", "-xzf", str(folder / "dist" / name), folder=folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the source distribution."""
    folder = tmp_path_factory.mktemp("wheel")
    _run(*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", folder, source, folder=folder)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's packages and others named `app` and `model`, which fail when imported."""
    folder = tmp_path_factory.mktemp("site") / "site"
    _run(*PIP, "install", "--no-deps", "--no-index", "--no-compile", "--target", folder, wheel, folder=folder.parent)
    _write_other_packages(folder)
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A working directory with folders named `app` and `model`."""
    _write_other_packages(tmp_path)
    return tmp_path


def _write_other_packages(folder: Path) -> None:
    for name in ("app", "model"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(OTHER)


def test_wheel_contains_exactly_one_package_with_all_product_files(wheel: Path) -> None:
    names = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    product = [path for top in ("app", "model", "inkstream") for path in (ROOT / top).rglob("*.py")]
    assets = [path for path in (ROOT / "app/web").rglob("*") if path.is_file()]
    sources = [path for path in (ROOT / "app/engine/cpu/source").rglob("*") if path.is_file()]
    weights = [path for path in (ROOT / "weights").iterdir() if path.suffix in (".json", ".safetensors")]
    expected = {str(path.relative_to(ROOT)) for path in [*product, *assets, *sources, *weights]}
    expected |= {*BENCH, "weights/README.md"}
    assert names == {name if name.startswith("inkstream/") else f"inkstream/{name}" for name in expected}
    (metadata,) = (name for name in ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    needed = message_from_bytes(ZipFile(wheel).read(metadata)).get_all("Requires-Dist", [])
    linux = {"sys_platform": "linux", "extra": ""}
    names = {one.name for one in map(Requirement, needed) if one.marker is None or one.marker.evaluate(linux)}
    assert "numpy" in names and "torch" not in names, "torch would add gigabytes of CUDA to every installation"
    assert wheel.stat().st_size < MOST_BYTES, "the package index takes no such file; leave the weights to an extra"


def test_upgrade_brings_the_new_code(source: Path, tmp_path: Path) -> None:
    """One commit after another, each as a wheel in the same folder, and a pip that takes the newest."""
    repository, python = tmp_path / "repository", tmp_path / "environment/bin/python"
    shutil.copytree(source, repository, ignore=shutil.ignore_patterns("PKG-INFO", "*.egg-info", "*.safetensors"))
    (repository / ".gitignore").write_text("build/\n*.egg-info/\n")
    flags = ("--system-site-packages", "--without-pip")
    _run(sys.executable, "-m", "venv", *flags, tmp_path / "environment", folder=tmp_path)
    _run("git", "init", "-q", folder=repository)
    versions = []
    for number in range(2):
        (repository / "model/marker.py").write_text(f"NUMBER = {number}\n")
        os.utime(repository / "model/marker.py", (1, 1))  # older than the copy of an earlier build
        (repository / f"model/only_{number}.py").write_text("")
        (repository / f"model/only_{number - 1}.py").unlink(missing_ok=True)
        _run("git", "add", ".", folder=repository)
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
        _run("git", *identity, "commit", "-q", "-m", str(number), folder=repository)
        build = (*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", tmp_path / "wheels")
        _run(*build, repository, folder=tmp_path)
        install = ("install", "--no-deps", "--no-index", "--no-compile", "--find-links", tmp_path / "wheels")
        _run(*PIP, "--python", python, *install, "--upgrade", "inkstream", folder=tmp_path)
        program = (
            "from importlib.metadata import version; import inkstream.model.marker as m, os;"
            "names = os.listdir(os.path.dirname(m.__file__));"
            "print(version('inkstream'), m.NUMBER, [name for name in names if name[:5] == 'only_'])"
        )
        installed, marker, *only = _run(python, "-Ic", program, folder=tmp_path).split()
        assert (marker, only) == (str(number), [f"['only_{number}.py']"])
        script = tmp_path / "environment/bin/inkstream"
        assert _run(script, "--version", folder=tmp_path, PYTHONPATH="") == f"inkstream {installed}\n"
        versions.append(Version(installed))
    assert versions == sorted(set(versions)) and versions[0] > Version("0.1.0")


def test_checkout_runs_its_own_packages(elsewhere: Path) -> None:
    program = "import sys; from inkstream.__main__ import main; main(); print(sys.modules['app'].__spec__.origin)"
    printed = _run(sys.executable, "-c", program, "--version", folder=elsewhere, PYTHONPATH=str(ROOT))
    assert printed.splitlines()[-1] == str(ROOT / "app/__init__.py")


def test_installed_service_serves_the_default_model_from_any_folder(site: Path, elsewhere: Path) -> None:
    """The engine, a sandboxed process, the client and the load generator, which would fail with the other packages."""
    script, environment = str(site / "bin/inkstream"), {"PYTHONPATH": str(site), **kernels()}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("INKSTREAM_")}
    assert _run(sys.executable, script, "--version", folder=elsewhere, **environment).startswith("inkstream ")
    assert _run(sys.executable, "-m", "inkstream", "-V", folder=elsewhere, **environment).startswith("inkstream ")
    command = [sys.executable, script, "serve", "--port", "0"]
    service = launch(command, elsewhere / "log", environment={**inherited, **environment}, directory=elsewhere)
    try:
        service.wait_for_route("/health/ready")
        body = {"prompt": "Once", "max_tokens": 8, "stream": False, "regex": "[a-z ]+"}
        answer = httpx.post(f"{service.url}/complete", json=body)
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"], answer.text
        address = ("--url", service.url)
        assert _run(sys.executable, script, "complete", *address, "Once upon", folder=elsewhere, PYTHONPATH=str(site))
        load = ("--streams", "1", "--requests", "2", "--max-tokens", "4", "--json-only")
        (level,) = json.loads(_run(sys.executable, script, "bench", *address, *load, folder=elsewhere, **environment))[
            "levels"
        ]
        assert (level["completed"], level["errors"]) == (2, 0)
        assert httpx.get(f"{service.url}/").status_code == 200
        assert service.stop() == 0, service.log.read_text()
    finally:
        service.kill()


def test_installed_package_checks_and_trains(site: Path, elsewhere: Path) -> None:
    script, environment = str(site / "bin/inkstream"), {"PYTHONPATH": str(site)}
    (elsewhere / "text.txt").write_text("The quick brown fox jumps over the lazy dog, and goes home. " * 400)
    flags = ("--preset", "nano", "--context", "16", "--steps", "2", "--device", "cpu")
    printed = _run(
        sys.executable, script, "train", "--data", "text.txt", "--out", "mine", *flags, folder=elsewhere, **environment
    )
    assert f"serve it: {script} serve --weights mine" in printed
    assert "Command:\n\n```\ninkstream train --data" in (elsewhere / "mine/README.md").read_text()
    assert "parameters" in _run(sys.executable, script, "check", "mine", folder=elsewhere, **environment)
