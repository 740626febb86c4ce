"""tests/container/run runs every command of docs/deploy.md; this file lists the exceptions with reasons."""

from __future__ import annotations

import ast
import re

from tests.container.engine import commands
from tests.support import ROOT

PAGE = (ROOT / "docs/deploy.md").read_text()
NOT_RUN = {
    "docker build --tag inkstream .": "buildah builds the same Dockerfile",
    "docker compose --file docker-compose.yml --file compose.gpu.yaml up --build --wait": "no GPU",
    "kubectl create secret generic inkstream-keys --from-file=keys.json=keys/keys.json": "no cluster",
    "kubectl apply -k deploy/kubernetes/cpu": "no cluster",
    "kubectl rollout status deployment/inkstream": "no cluster",
    "kubectl apply -k deploy/kubernetes/gpu": "no cluster",
}


def _run() -> set[str]:
    """What checks.py gives to run()."""
    tree = ast.parse((ROOT / "tests/container/checks.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "run"]
    words = {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}
    (start,) = (line for line in commands(PAGE) if line.startswith("docker run "))
    assert any(isinstance(call.args[0], ast.Name) and call.args[0].id == "start" for call in calls)
    return {*map(str, words), start}


def test_every_command_is_run_or_has_a_reason_not_to_be() -> None:
    assert _run() | NOT_RUN.keys() == set(commands(PAGE))
    assert not _run() & NOT_RUN.keys()


def test_every_file_that_the_page_names_exists() -> None:
    for name in re.findall(r"\b((?:deploy|tests)/[\w./]*\w)", PAGE):
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\(([\w./]+\.md)\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
