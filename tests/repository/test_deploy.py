"""deploy/, the compose files and docs/deploy.md agree with the service and with the tools that run them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import yaml

from app.api.health import router
from app.common.settings import Settings
from app.engine.cpu.toolchain.cpu_target import NEON, X86_LEVELS, levels_of
from tests.container.engine import PORTS
from tests.support import ROOT
from tests.support.docs_commands import commands
from tests.support.servers import Server

KUBERNETES = ROOT / "deploy/kubernetes"
LOAD = "inkstream_load_ratio"


def _read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def _pod() -> Any:
    return _read("deploy/kubernetes/base/deployment.yaml")["spec"]["template"]["spec"]


def _container() -> Any:
    (container,) = _pod()["containers"]
    return container


def _variables(container: Any) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in container["env"]}


def test_stopped_services_have_time_to_drain() -> None:
    """Includes the pause before SIGTERM and a few seconds for the processes to end."""
    (_, pause) = _container()["lifecycle"]["preStop"]["exec"]["command"]
    assert _pod()["terminationGracePeriodSeconds"] > int(pause) + Settings().drain_timeout + 5
    services = _read("docker-compose.yml")["services"]
    assert services["nginx"]["stop_grace_period"] == services["inkstream"]["stop_grace_period"]
    assert services["nginx"]["stop_signal"] == "SIGQUIT"


def test_pods_have_no_privileges() -> None:
    pod, container = _pod(), _container()
    ids = {key: pod["securityContext"][key] for key in ("runAsUser", "runAsGroup", "fsGroup")}
    assert set(ids.values()) == {10001} and pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert _read("deploy/kubernetes/base/network.yaml")["spec"]["egress"] == []


def test_probes_use_routes_without_keys_and_liveness_does_not_depend_on_the_engine() -> None:
    container = _container()
    probes = {kind: container[kind]["httpGet"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    paths = {getattr(route, "path", "") for route in router.routes}
    assert {probe["path"] for probe in probes.values()} <= paths
    assert probes["livenessProbe"]["path"] == "/health/live"
    assert probes["readinessProbe"]["path"] == probes["startupProbe"]["path"] == "/health/ready"
    assert all(probe["port"] == "http" for probe in probes.values())
    assert container["ports"] == [{"name": "http", "containerPort": Settings().port}]


def test_every_variable_of_a_pod_is_a_setting_and_kubernetes_sets_none() -> None:
    """A Service named inkstream would set INKSTREAM_PORT to tcp://... instead of a number."""
    for file in ("base/deployment.yaml", "gpu/deployment.yaml"):
        (container,) = _read(f"deploy/kubernetes/{file}")["spec"]["template"]["spec"]["containers"]
        assert container["name"] == _container()["name"]
        for name in _variables(container):
            assert name == "NAMESPACE" or name.removeprefix("INKSTREAM_").lower() in Settings.model_fields
    assert _read("deploy/kubernetes/base/service.yaml")["metadata"]["name"] == "inkstream"
    assert _pod()["enableServiceLinks"] is False


def test_keys_are_mounted_as_a_folder_readable_by_the_group() -> None:
    (mount,) = [one for one in _container()["volumeMounts"] if one["name"] == "keys"]
    (volume,) = [one for one in _pod()["volumes"] if one["name"] == "keys"]
    assert volume["secret"]["defaultMode"] == 0o440 and mount["readOnly"] is True and "subPath" not in mount
    assert str(Path(_variables(_container())["INKSTREAM_KEYS_FILE"]).parent) == mount["mountPath"]


def test_all_manifests_select_the_same_pods() -> None:
    labels = {"app.kubernetes.io/name": "inkstream"}
    names = ("deployment", "service", "disruption")
    specs = {name: _read(f"deploy/kubernetes/base/{name}.yaml")["spec"] for name in names}
    assert specs["deployment"]["template"]["metadata"]["labels"] == labels == specs["service"]["selector"]
    assert specs["deployment"]["selector"]["matchLabels"] == specs["disruption"]["selector"]["matchLabels"] == labels
    assert _read("deploy/kubernetes/base/network.yaml")["spec"]["podSelector"]["matchLabels"] == labels
    target = _read("deploy/kubernetes/base/autoscaler.yaml")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", "inkstream")


def test_every_manifest_is_applied() -> None:
    """`make manifests` renders and validates what the overlays apply."""
    files = {path.name for path in (KUBERNETES / "base").glob("*.yaml")} - {"kustomization.yaml"}
    base = _read("deploy/kubernetes/base/kustomization.yaml")
    assert set(base["resources"]) == files and "images" not in base, "the overlay must name the image"
    assert "replicas" not in _read("deploy/kubernetes/base/deployment.yaml")["spec"], "the autoscaler sets them"
    notes = _read("deploy/kubernetes/examples/ingress.yaml")["metadata"]["annotations"]
    assert int(notes["nginx.ingress.kubernetes.io/proxy-read-timeout"]) > Settings().request_timeout
    assert notes["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"


def test_no_proxy_chooses_a_replica_by_the_address_of_the_client() -> None:
    """Behind another proxy all clients have one address, and one replica gets all requests."""
    notes = _read("deploy/kubernetes/examples/ingress.yaml")["metadata"]["annotations"]
    assert not [name for name in notes if "hash" in name or "affinity" in name]
    tries = int(notes["nginx.ingress.kubernetes.io/proxy-next-upstream-tries"])
    assert tries >= _read("deploy/kubernetes/base/autoscaler.yaml")["spec"]["maxReplicas"]
    assert "http_404" in notes["nginx.ingress.kubernetes.io/proxy-next-upstream"].split()
    for path in (ROOT / "deploy/nginx").iterdir():
        text = re.sub(r"#.*", "", path.read_text())
        assert "ip_hash" not in text and "hash $" not in text and "X-Request-Id" not in text, path


def test_chart_knows_every_setting_and_closes_every_object_with_fixed_names() -> None:
    schema = json.loads((KUBERNETES / "values.schema.json").read_text())
    assert set(schema["properties"]["settings"]["properties"]) == set(Settings.model_fields)
    assert set(schema["properties"]) == set(_read("deploy/kubernetes/values.yaml"))
    for value in _objects(schema):
        assert "properties" not in value or value["additionalProperties"] is False, value
    probes = _read("deploy/kubernetes/hub/deployment.yaml")["spec"]["template"]["spec"]["containers"][0]
    assert probes["startupProbe"]["failureThreshold"] * _container()["startupProbe"]["periodSeconds"] == 3600


def _objects(schema: Any) -> list[dict[str, Any]]:
    """The schema of values.schema.json and all below it that describe objects."""
    below = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    found = [one for value in below for one in _objects(value)]
    return [schema, *found] if isinstance(schema, dict) and schema.get("type") == "object" else found


def test_workflow_runs_the_ci_script_and_requires_the_audit() -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    workflow = yaml.safe_load(text)
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1]["run"] == ".ci/run" and job["env"] == {"AUDIT_REQUIRED": "1"}
    assert workflow["permissions"] == {"contents": "read"}
    assert {"push", "pull_request", "schedule"} == set(workflow[True]), "yaml reads `on` as true"
    uses = re.findall(r"uses: (\S+)", text)
    assert uses and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", one) for one in uses), "actions are pinned by commit"


def test_every_used_metric_is_exported(server: Server) -> None:
    """Covers dashboard, alerts and autoscaler; the dashboard shows every metric."""
    text = httpx.get(f"{server.url}/metrics").text
    exported = set(re.findall(r"^# TYPE (inkstream_\w+) ", text, re.M))
    exported = {name for name in exported if not name.endswith("_created")}
    shown = _metrics((ROOT / "deploy/grafana/dashboards/inkstream.json").read_text())
    assert {name for name in shown if name.startswith("inkstream_")} == exported
    assert {name for name in shown if name.startswith("process_")} <= set(re.findall(r"^# TYPE (\w+) ", text, re.M))
    only_with_several_engines = {"inkstream_replica_ready"}  # tests/engine_client/test_two_engines.py covers it
    assert _metrics((ROOT / "deploy/prometheus/alerts.yml").read_text()) - only_with_several_engines <= exported
    (scaled,) = _read("deploy/kubernetes/base/autoscaler.yaml")["spec"]["metrics"]
    assert scaled["pods"]["metric"]["name"] == LOAD in exported
    assert f"seriesQuery: '{LOAD}{{" in (ROOT / "docs/deploy.md").read_text()


def _metrics(queries: str) -> set[str]:
    return {name.removesuffix("_bucket") for name in re.findall(r"\b((?:inkstream|process)_\w+)", queries)}


def test_grafana_prometheus_and_nginx_point_to_the_service() -> None:
    grafana = _read("docker-compose.yml")["services"]["grafana"]
    (source,) = _read("deploy/grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    (provider,) = _read("deploy/grafana/provisioning/dashboards/inkstream.yaml")["providers"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in grafana["volumes"]
    panels = json.loads((ROOT / "deploy/grafana/dashboards/inkstream.json").read_text())["panels"]
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"} and source["type"] == "prometheus"
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert source["url"] == "http://prometheus:9090"
    (job,) = _read("deploy/prometheus/prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"inkstream:{Settings().port}"]}]
    nginx = (ROOT / "deploy/nginx/inkstream.conf").read_text()
    assert f"server inkstream:{Settings().port};" in nginx
    (kept,) = re.findall(r"keepalive_timeout (\d+)s;", nginx)
    (silent,) = re.findall(r"proxy_read_timeout (\d+)s;", nginx)
    assert int(kept) < Settings().keep_alive_timeout and int(silent) > Settings().request_timeout
    assert Settings().max_body_bytes == 1 << 20 and "client_max_body_size 1m;" in nginx


def test_compose_overrides_change_only_the_service() -> None:
    with_keys, with_gpu = _read("compose.keys.yaml"), _read("compose.gpu.yaml")
    assert set(with_keys["services"]) == set(with_gpu["services"]) == {"inkstream"}
    (secret,) = with_keys["services"]["inkstream"]["secrets"]
    environment = with_keys["services"]["inkstream"]["environment"]
    assert environment["INKSTREAM_KEYS_FILE"] == f"/run/secrets/{secret}" and secret in with_keys["secrets"]
    assert environment["INKSTREAM_INSECURE_NO_AUTH"] == "false"
    build = with_gpu["services"]["inkstream"]["build"]["args"]
    assert build == {"TORCH_INDEX": "", "BASE": build["BASE"], "SLIM": ""}


def test_every_published_port_is_configurable_and_used_by_the_checks() -> None:
    services = _read("docker-compose.yml")["services"]
    published = [port for service in services.values() for port in service.get("ports", [])]
    chosen = dict(re.fullmatch(r"127\.0\.0\.1:\$\{(\w+_PORT):-(\d+)\}:\2", port).groups() for port in published)  # type: ignore[union-attr]
    assert chosen == {**PORTS, "GRAFANA_PORT": "3000"}
    assert all(f"`{name}`" in (ROOT / "docs/deploy.md").read_text() for name in chosen)


def test_code_changes_affect_no_lower_layer() -> None:
    """The packages' stage copies no code; the code is copied after all larger layers."""
    stages = dict(re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM |\Z)", (ROOT / "Dockerfile").read_text(), re.M | re.S))
    copied = re.findall(r"^COPY (?:--from=(\w+) )?(.*) \S+$", stages["builder"] + stages["packages"], re.M)
    assert copied == [("", "constraints.txt requirements.lock"), ("", "deploy/image/strip-packages")]
    assert not re.search(r"^COPY --from=(code|kernels)", stages["base"], re.M)
    last = re.findall(
        r"^COPY --from=(\w+) (\S+)", (ROOT / "Dockerfile").read_text().rpartition("FROM scratch")[2], re.M
    )
    assert last == [
        ("base", "/"),
        ("packages", "/opt/inkstream"),
        ("code", "/weights"),
        ("code", "/code"),
        ("sbom", "/sbom.cdx.json"),
    ]


def test_kernels_compiled_for_a_gpu_survive_the_container() -> None:
    """In a directory that the image created for its user, since a new volume inherits its owner."""
    service, pod = _read("compose.gpu.yaml"), _read("deploy/kubernetes/gpu/deployment.yaml")["spec"]["template"]["spec"]
    directory = service["services"]["inkstream"]["environment"]["INKSTREAM_CACHE_DIR"]
    (volume,) = service["services"]["inkstream"]["volumes"]
    assert volume == f"cache:{directory}" and "cache" in service["volumes"]
    assert f"install -d -o 10001 -g 10001 {directory} " in (ROOT / "Dockerfile").read_text()
    (container,) = pod["containers"]
    assert _variables(container)["INKSTREAM_CACHE_DIR"] == directory
    assert container["volumeMounts"] == [{"name": "cache", "mountPath": directory}]
    assert [volume["name"] for volume in pod["volumes"]] == ["cache"]


NOT_RUN = {
    "docker buildx build --platform linux/amd64,linux/arm64 --tag registry.example/inkstream --push .": "no ARM",
    "docker build --tag inkstream .": "buildah builds the same Dockerfile",
    "docker build --build-arg TORCH= --tag inkstream:no-torch .": "buildah builds the same Dockerfile",
    "docker compose --file docker-compose.yml --file compose.gpu.yaml up --build --wait": "no GPU",
    "kubectl create secret generic inkstream-keys --from-file=keys.json=keys/keys.json": "no cluster",
    "kubectl apply -k deploy/kubernetes/cpu": "no cluster",
    "kubectl rollout status deployment/inkstream": "no cluster",
    "helm install inkstream deploy/kubernetes --set settings.max_running=64": "no cluster",
}


def test_base_images_are_pinned_by_digest() -> None:
    slim = re.findall(r"^ARG BASE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.M)
    gpu = _read("compose.gpu.yaml")["services"]["inkstream"]["build"]["args"]["BASE"]
    assert all(re.fullmatch(r"python:3\.1[123]\.\d+(-slim)?-\w+@sha256:[0-9a-f]{64}", image) for image in [*slim, gpu])
    assert len(slim) == 1 and ("-slim" in slim[0], "-slim" in gpu) == (True, False)


def test_every_command_of_the_page_runs_on_containers_or_has_a_reason_not_to() -> None:
    """tests/container/checks.py runs them, in calls of run()."""
    page = (ROOT / "docs/deploy.md").read_text()
    checks = (ROOT / "tests/container/checks.py").read_text()
    (start,) = (line for line in commands(page) if line.startswith("docker run "))
    assert "run(start)" in checks
    run = {*re.findall(r'\brun\("([^"]+)"\)', checks), start}
    (restarts,) = (block for block in re.findall(r"```sh\n.*?```\n", page, re.S) if "> two-servers.conf" in block)
    in_r22 = set(commands(restarts))  # tests/promises/test_r22_nginx.py restarts two services behind the same file
    assert run | NOT_RUN.keys() | in_r22 == set(commands(page))
    assert not run & NOT_RUN.keys()


def test_the_image_is_built_for_amd64_and_arm64() -> None:
    """The build names no architecture: `docker buildx build --platform` chooses it for all stages alike."""
    for path in (ROOT / "Dockerfile", *(ROOT / "deploy/image").iterdir()):
        if path.is_file():
            text = re.sub(r"^#.*$", "", path.read_text(), flags=re.MULTILINE)
            assert not re.search(r"x86|amd64|aarch64|arm64|--platform|linux-gnu/", text), path
    assert levels_of("aarch64") == (NEON,)
    assert levels_of("x86_64") == X86_LEVELS
