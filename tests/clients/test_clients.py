"""The openai package of the dev extra against the service; `make clients` runs all other clients."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from tests.clients.run import Client, read_clients, run, services
from tests.support import ROOT

WEIGHTS = ROOT / "weights"
SCRIPTS = ROOT / "tests/clients"


def test_openai_package_passes_all_checks() -> None:
    ours = replace(read_clients()["openai-3"], packages=())  # the environment of these tests has the package
    with services(WEIGHTS) as url:
        outcome = run(ours, url, WEIGHTS)
    assert outcome.passed and outcome.checks > 20


def test_failing_check_fails_its_client(tmp_path: Path) -> None:
    outcomes = []
    for assertion in ("1 == 1", "1 == 2"):
        script = tmp_path / "script.py"
        shutil.copy(SCRIPTS / "checks.py", tmp_path)
        script.write_text(
            f"from checks import run_checks\ndef check_one():\n    assert {assertion}\nrun_checks(dict(vars()))\n"
        )
        client = Client(name="fake", script=str(script), services=())
        outcomes.append(run(client, str, WEIGHTS))
    assert [(outcome.passed, outcome.checks) for outcome in outcomes] == [(True, 1), (False, 1)]


def test_every_client_has_a_script_and_pinned_versions() -> None:
    clients = read_clients().values()
    scripts = {client.script for client in clients}
    assert scripts == {path.name for path in SCRIPTS.glob("use_*")}
    for client in clients:
        assert all("==" in package for package in client.first + client.packages), client.name
        assert all("@" in package for package in client.npm), client.name


def test_client_table_lists_the_pinned_versions() -> None:
    table = (ROOT / "docs/clients.md").read_text()
    for client in read_clients().values():
        name, version = client.npm[0].split("@") if client.npm else client.packages[0].split("==")
        name = name.partition("[")[0]
        assert any(name in line and f"| {version} |" in line for line in table.splitlines()), client.name
