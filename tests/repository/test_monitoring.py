"""Prometheus evaluates deploy/'s queries: the alerts on made-up series, everything on a live service."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from tests.support import ROOT
from tests.support.servers import Server, free_ports
from tests.support.services import Services

ALERTS = ROOT / "deploy/prometheus/alerts.yml"
needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="needs prometheus and promtool (Debian: apt install prometheus)",
)


def _rules() -> list[Any]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    rules: list[Any] = group["rules"]
    return rules


def test_every_alert_has_a_severity_a_test_and_an_instruction() -> None:
    page = (ROOT / "docs/observability.md").read_text()
    tested = {
        case["alertname"]
        for test in yaml.safe_load((ROOT / "tests/repository/alerts_test.yml").read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert tested == {rule["alert"] for rule in _rules()}
    for rule in _rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert f"| `{rule['alert']}` | {rule['labels']['severity']} |" in page


@needs_prometheus
def test_alerts_fire_when_they_should() -> None:
    command = ["promtool", "test", "rules", str(ROOT / "tests/repository/alerts_test.yml")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def service(serve_module: Services) -> Server:
    return serve_module(fake_ms=1)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory, service: Server) -> Iterator[str]:
    """The URL of a Prometheus that scrapes `service` every second and has the alerts of deploy/."""
    folder = tmp_path_factory.mktemp("prometheus")
    target = service.url.removeprefix("http://")
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [{"job_name": "any name", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    arguments = (f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["prometheus", *arguments, f"--web.listen-address={address}"], stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def _get(url: str, path: str, **parameters: str) -> Any:
    response = httpx.get(f"{url}/api/v1/{path}", params=parameters, timeout=30)
    answer = response.json()
    assert answer["status"] == "success", (parameters, answer)
    return answer["data"]


def _without_data(url: str, queries: list[str]) -> list[str]:
    try:
        return [query for query in queries if not _get(url, "query", query=query)["result"]]
    except (httpx.TransportError, json.JSONDecodeError):
        return ["Prometheus starts"]


def _queries() -> list[str]:
    """The queries of the dashboard, with Grafana's variables filled in."""
    panels = json.loads((ROOT / "deploy/grafana/dashboards/inkstream.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    for variable, value in (("$__rate_interval", "1m"), ("$__range", "1m"), ("$job", ".*"), ("$instance", ".*")):
        queries = [query.replace(variable, value) for query in queries]
    return queries


def test_nothing_depends_on_the_name_of_the_job() -> None:
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/inkstream.json").read_text())
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "instance"]
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            named = re.findall(r"\b(?:inkstream|process)_\w+(\{[^}]*\})?", target["expr"])
            assert named and all('job=~"$job",instance=~"$instance"' in labels for labels in named), target["expr"]
    assert "job=" not in ALERTS.read_text()
    assert any(rule["expr"] == "absent(inkstream_build_info)" for rule in _rules())


@needs_prometheus
def test_every_query_and_alert_works_on_a_live_service(service: Server, prometheus: str) -> None:
    queries = _queries()
    assert len(queries) > 40 and not [query for query in queries if "$" in query]
    deadline = time.monotonic() + 60
    while (empty := _without_data(prometheus, queries)) and time.monotonic() < deadline:
        httpx.post(f"{service.url}/complete", json={"prompt": "once", "max_tokens": 20}, timeout=30)
        time.sleep(0.2)
    assert not empty, "every panel must have data"
    for rule in _rules():
        _get(prometheus, "query", query=rule["expr"])
    (group,) = _get(prometheus, "rules")["groups"]
    assert {rule["name"] for rule in group["rules"]} == {rule["alert"] for rule in _rules()}
    assert {rule["health"] for rule in group["rules"]} == {"ok"}, [rule.get("lastError") for rule in group["rules"]]
    assert not [rule["name"] for rule in group["rules"] if rule["state"] == "firing"], "on a healthy service"
