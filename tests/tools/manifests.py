"""Renders and checks the manifests in deploy/kubernetes, and checks Grafana's dashboard: make manifests.

kustomize builds every overlay. The resources must match the schemas of three Kubernetes versions and name the right
image, and a rollout on GPUs must not need a spare GPU. Helm must render the same from the chart's default values.
kubernetes-validate rejects unknown fields; @kubernetes-models, which has the schema of PodMonitor, checks only types
and required fields. TypeScript's compiler checks the dashboard against the types of @grafana/schema, and rejects
unknown fields.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/kubernetes"
VERSIONS = ("1.30", "1.33", "1.37")
IMAGES = {"cpu": "inkstream:latest", "gpu": "inkstream:cuda"}
_POD_MONITOR = """
import { PodMonitor } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PodMonitor";
new PodMonitor(JSON.parse(process.argv[1])).validate();
"""
_TOOLS = ROOT / ".manifests"
_DASHBOARD = ROOT / "deploy/grafana/dashboards/inkstream.json"
_TYPED_DASHBOARD = """
import type { DataQuery } from "@grafana/schema";
import type { Dashboard, Panel } from "@grafana/schema/dist/esm/raw/dashboard/x/Dashboard_types.gen";
import type { FieldConfig, Options } from
    "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";
type Defaults = Omit<NonNullable<Panel["fieldConfig"]>["defaults"], "custom"> & { custom: Partial<FieldConfig> };
type TimeSeries = Omit<Panel, "type" | "targets" | "fieldConfig" | "options"> & {
  type: "timeseries";
  targets: (DataQuery & { expr: string; legendFormat: string })[];
  fieldConfig: { defaults: Defaults; overrides: [] };
  options?: Partial<Options>;
};
export const dashboard: Omit<Dashboard, "panels"> & { panels: TimeSeries[] } = """
"""@grafana/schema leaves queries, options and styles open; these types fix them to Prometheus and time series."""
_TSC = (
    *("tsc", "--noEmit", "--strict", "--skipLibCheck", "--pretty", "false"),
    *("--module", "nodenext", "--moduleResolution", "nodenext"),
)
_TERMS = "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0]"
_EVERY_VALUE = (
    "image.repository=registry.example/ink,image.tag=v1,image.pullPolicy=Always,image.pullSecrets={registry}",
    "gpu=true,settings.max_running=1000000,settings.device=cuda:0,keysSecret=prod-keys,hosts={ink.example}",
    "volumes[0].name=weights,volumes[0].persistentVolumeClaim.claimName=models",
    "volumeMounts[0].name=weights,volumeMounts[0].mountPath=/weights",
    "resources.limits.memory=32Gi,nodeSelector.pool=gpus,tolerations[0].key=gpu,tolerations[0].operator=Exists",
    f"{_TERMS}.key=zone,{_TERMS}.operator=Exists",
    "env[0].name=HF_TOKEN,env[0].valueFrom.secretKeyRef.name=hub,env[0].valueFrom.secretKeyRef.key=token",
    "modelCache.enabled=true,modelCache.claimName=hub-models,modelCache.size=9Gi,startupSeconds=1001",
    "networkPolicy.egress[0].ports[0].port=4318,networkPolicy.egress[0].to[0].ipBlock.cidr=10.0.0.0/8",
    "autoscaling.minReplicas=3,autoscaling.maxReplicas=5,networkPolicy.namespaces={edge}",
    "ingress.enabled=true,ingress.className=internal,ingress.tlsSecret=prod-tls",
    "podMonitor.enabled=true,podMonitor.keySecret=prod-prometheus",
)
_EXPECTED = (
    *("registry.example/ink:v1", "imagePullPolicy: Always", "- name: registry", "value: '1000000'", "value: cuda:0"),
    *(
        "secretName: prod-keys",
        "cluster.local,ink.example",
        "host: ink.example",
        "claimName: models",
        "pool: gpus",
        "key: zone",
    ),
    *("mountPath: /weights", "memory: 32Gi", "operator: Exists", "minReplicas: 3", "maxReplicas: 5", "- edge"),
    *("name: HF_TOKEN", "name: hub", "claimName: hub-models", "name: HF_HOME", "failureThreshold: 501"),
    *("port: 4318", "cidr: 10.0.0.0/8"),
    *("ingressClassName: internal", "secretName: prod-tls", "name: prod-prometheus"),
)


_MISSPELLED = (
    "gpus=true",
    "settings.max_runing=1",
    "settings.INKSTREAM_PORT=1",
    "autoscaling.minReplicas=two",
    "autoscaling.minReplica=2",
    "ingress.enabled=true",
    "image.tags=v1",
    "env[0].nam=A",
    "env[0].name=INKSTREAM_PORT",
    "modelCache.enable=true",
    "startupSecond=9",
    "networkPolicy.egres[0].ports[0].port=1",
    "networkPolicy.egress[0].port[0].port=1",
    "resources.limit.memory=1Gi",
    "tolerations[0].opperator=Exists",
    "affinity.nodeAffinty.x=1",
    "volumeMounts[0].name=a,volumeMounts[0].mountpath=/x",
    "volumes[0].name=a,volumes[0].pvc.claimName=x",
)
"""Values that Helm must refuse."""


class ManifestError(Exception):
    """A manifest that a cluster would reject, or that differs from what it should be."""


def rendered(overlay: Path) -> list[dict[str, Any]]:
    """The resources of an overlay. Raises ManifestError if kustomize cannot build it."""
    done = subprocess.run(["kustomize", "build", str(overlay)], capture_output=True, text=True)
    if done.returncode:
        raise ManifestError(f"{overlay.name}: {done.stderr.strip()}")
    return list(yaml.safe_load_all(done.stdout))


def rendered_by_helm(*values: str, release: str = "inkstream") -> list[dict[str, Any]]:
    """The resources of the chart with these values (--set). Raises ManifestError if Helm rejects them."""
    options = [word for value in values for word in ("--set", value)]
    done = subprocess.run(["helm", "template", release, str(FOLDER), *options], capture_output=True, text=True)
    if done.returncode:
        raise ManifestError(f"helm {' '.join(values)}: {done.stderr.strip()}")
    return list(yaml.safe_load_all(done.stdout))


def comparable(value: Any) -> Any:
    """The value with lists of named entries sorted by name: Kubernetes ignores their order."""
    if isinstance(value, dict):
        return {key: comparable(entry) for key, entry in value.items()}
    if isinstance(value, list):
        entries = [comparable(entry) for entry in value]
        return (
            sorted(entries, key=lambda entry: str(entry.get("name", entry.get("kind"))))
            if _is_named(value)
            else entries
        )
    return value


def _is_named(entries: list[Any]) -> bool:
    return all(isinstance(entry, dict) and entry.keys() & {"name", "kind"} for entry in entries)


def validate(resource: dict[str, Any]) -> None:
    """Raises ManifestError if a Kubernetes version does not have a field, or a required field is missing."""
    if resource["kind"] == "PodMonitor":
        command = ["node", "--input-type=module", "--eval", _POD_MONITOR, json.dumps(resource)]
        done = subprocess.run(command, cwd=_TOOLS, capture_output=True, text=True)
        if done.returncode:
            raise ManifestError(f"PodMonitor: {done.stderr.strip()}")
        return
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(resource, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise ManifestError(f"{resource['kind']}, Kubernetes {version}: {error.message}") from error


def check_deployment(overlay: str, resources: list[dict[str, Any]]) -> None:
    """Raises ManifestError if pods have the wrong image, or if a rollout needs a spare GPU."""
    (deployment,) = (one["spec"] for one in resources if one["kind"] == "Deployment")
    (container,) = deployment["template"]["spec"]["containers"]
    if container["image"] != IMAGES[overlay]:
        raise ManifestError(f"{overlay}: the image is {container['image']}, not {IMAGES[overlay]}")
    has_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
    surge = deployment["strategy"]["rollingUpdate"]["maxSurge"]
    if has_gpu != (overlay == "gpu") or surge != int(not has_gpu):
        raise ManifestError(f"{overlay}: a GPU: {has_gpu}, maxSurge: {surge}")


def check_a_registry_in_the_base() -> None:
    """Raises ManifestError if an image that a user sets in base/ reaches the pods with a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "kubernetes"
        shutil.copytree(FOLDER, copy)
        base = copy / "base/kustomization.yaml"
        base.write_text(base.read_text() + "images: [{name: inkstream, newName: registry.example/ink, newTag: cpu}]\n")
        check_deployment("gpu", rendered(copy / "gpu"))


def check_the_hub_component() -> str:
    """Raises ManifestError if pods of a model of the Hub differ between kustomize's component and Helm's values."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "kubernetes"
        shutil.copytree(FOLDER, copy)
        overlay = copy / "cpu/kustomization.yaml"
        overlay.write_text(overlay.read_text() + "components: [../hub]\n")
        ours = rendered(copy / "cpu")
    for resource in ours:
        validate(resource)
    theirs = rendered_by_helm("modelCache.enabled=true", "settings.weights=org/name")
    if comparable(ours) != comparable(theirs):
        raise ManifestError("hub: the component differs from the chart with modelCache.enabled")
    return f"hub: {len(ours)} resources, the same with Helm"


def check_the_chart() -> Iterator[str]:
    """Yields a line for each set of values. Raises ManifestError if Helm's resources differ from kustomize's."""
    for overlay, values in {"cpu": [], "gpu": ["gpu=true"]}.items():
        ours, theirs = comparable(rendered(FOLDER / overlay)), comparable(rendered_by_helm(*values))
        if ours != theirs:
            raise ManifestError(
                f"helm {overlay}: {[pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]]}"
            )
        yield f"helm, {overlay}: the same {len(ours)} resources"
    resources = rendered_by_helm(*_EVERY_VALUE, release="prod")
    for resource in resources:
        validate(resource)
        if resource["metadata"]["name"] != "prod-inkstream":
            raise ManifestError(f"helm: {resource['kind']} is called {resource['metadata']['name']}")
    text = yaml.safe_dump_all(resources)
    if lost := [word for word in _EXPECTED if word not in text]:
        raise ManifestError(f"helm: the resources do not have {lost}")
    yield f"helm, every value changed: {len(resources)} resources fit Kubernetes {', '.join(VERSIONS)}"
    for value in _MISSPELLED:
        try:
            rendered_by_helm(value)
        except ManifestError:
            continue
        raise ManifestError(f"control: helm accepts {value}")


def check_dashboard(text: str) -> None:
    """Raises ManifestError if a field is not in Grafana's types, or has another type there."""
    source = _TOOLS / "dashboard.ts"
    source.write_text(f"{_TYPED_DASHBOARD}{text}")
    done = subprocess.run([*_TSC, source.name], cwd=_TOOLS, capture_output=True, text=True)
    if done.returncode:
        raise ManifestError(f"{_DASHBOARD.name}: {done.stdout.strip()[:500]}")


def check_the_dashboard() -> None:
    """Raises ManifestError if the dashboard is invalid, or if the check misses a planted fault."""
    text = _DASHBOARD.read_text()
    check_dashboard(text)
    for right, wrong in (
        ('"fillOpacity"', '"fillOpacty"'),
        ('"legendFormat"', '"legend"'),
        ('"unit": "s"', '"unit": 1'),
    ):
        try:
            check_dashboard(text.replace(right, wrong, 1))
        except ManifestError:
            continue
        raise ManifestError(f"control: {wrong} in the dashboard is not noticed")


def refused(resource: dict[str, Any]) -> bool:
    """Control: whether validate() rejects the resource with a number as its selector, whatever its kind."""
    try:
        validate({**resource, "spec": {**resource["spec"], "selector": 0}})
    except ManifestError:
        return True
    return False


def checked() -> Iterator[str]:
    """Yields a line for each overlay and example. Raises ManifestError."""
    for name in IMAGES:
        resources = rendered(FOLDER / name)
        for resource in resources:
            validate(resource)
        check_deployment(name, resources)
        yield f"{name}: {len(resources)} resources fit Kubernetes {', '.join(VERSIONS)}"
    check_a_registry_in_the_base()
    yield check_the_hub_component()
    yield from check_the_chart()
    examples = [yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("examples/*.yaml"))]
    for resource in examples:
        validate(resource)
        yield f"example: {resource['kind']}"
    for resource in [*resources, *examples]:
        if not refused(resource):
            raise ManifestError(f"control: a wrong selector of {resource['kind']} is not noticed")
    check_the_dashboard()
    yield "dashboard: fits @grafana/schema"


def main() -> int:
    """Prints what was checked; returns 1 at the first fault."""
    try:
        for line in checked():
            print(line)
    except ManifestError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
