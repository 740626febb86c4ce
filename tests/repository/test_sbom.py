"""The image's list of packages: a CycloneDX reader accepts it, and no entry is missing or invented."""

from __future__ import annotations

import json
from importlib.metadata import distributions
from pathlib import Path

import pytest
from cyclonedx.model.bom import Bom

from deploy.image.sbom import main

STATUS = """Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u10
Description: GNU C Library: Shared libraries
 Contains the standard libraries.

Package: gone
Status: deinstall ok config-files
Architecture: all
Version: 1.0
"""


def test_every_installed_package_is_listed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "status").write_text(STATUS)
    for name, version in (("Typing_Extensions", "4.16.0"), ("torch", "2.13.0+cpu"), ("inkstream", "0.2.1.dev7")):
        (folder := tmp_path / "site" / f"{name}-{version}.dist-info").mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    assert len(list(distributions(path=[str(tmp_path / "site")]))) == 3, "positive control: all three packages"
    assert main(str(tmp_path / "status"), str(tmp_path / "site")) == 0
    printed = capsys.readouterr().out
    bom = Bom.from_json(json.loads(printed))  # type: ignore[attr-defined]
    assert json.loads(printed)["metadata"]["component"]["version"] == "0.2.1.dev7"
    assert {str(component.purl) for component in bom.components} == {
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64",
        "pkg:pypi/inkstream@0.2.1.dev7",
        "pkg:pypi/torch@2.13.0%2Bcpu",
        "pkg:pypi/typing-extensions@4.16.0",
    }
