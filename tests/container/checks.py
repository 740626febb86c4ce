"""Checks that docs/deploy.md is right on real containers. tests/container/run builds them and starts this program.

It prints one line for each check and, at the end, one JSON object of measurements. The first failing check ends it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from tests.container.engine import (
    DIRECT,
    NGINX,
    PAGE,
    PROMETHEUS,
    ROOT,
    Container,
    is_ready,
    metric,
    run,
    running_with,
    shell,
    status,
    wait_for,
)
from tests.support.concurrent_readers import ConcurrentReaders, Reader
from tests.support.docs_commands import commands

SERVICE = Container("inkstream_inkstream_1")
PROXY = Container("inkstream_nginx_1")
FIGURES: dict[str, Any] = {}
BODY = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "seed": 7, "n": 16}


def starts_and_is_healthy() -> str:
    """The service runs with nothing mounted and without rights."""
    began = time.monotonic()
    run("docker compose up --wait")
    commanded = time.monotonic() - began
    wait_for(is_ready)
    FIGURES["start_s"] = round(time.monotonic() - began, 2)
    FIGURES["image_mb"] = round(json.loads(shell("docker image inspect $INKSTREAM_IMAGE"))[0]["Size"] / 1e6)
    assert SERVICE.is_healthy()
    return f"ready {FIGURES['start_s']} s after the command ({commanded:.1f} s of it Compose's)"


def has_no_rights() -> str:
    """Reads the rights of the process from the kernel, not from the compose file."""
    status_lines = SERVICE.inside("grep", "-E", "^(Uid|Gid|CapEff|CapBnd|NoNewPrivs):", "/proc/1/status")
    facts = {line.split(":")[0]: line.split()[1] for line in status_lines.splitlines()}
    none = "0" * 16
    assert facts == {"Uid": "10001", "Gid": "10001", "CapEff": none, "CapBnd": none, "NoNewPrivs": "1"}, facts
    refused = subprocess.run(["podman", "exec", SERVICE.name, "touch", "/srv/x"], capture_output=True, text=True)
    assert "Read-only file system" in refused.stderr
    SERVICE.inside("touch", "/tmp/x")
    compiler = subprocess.run(
        ["podman", "exec", SERVICE.name, "sh", "-c", "command -v g++ cc gcc"], capture_output=True
    )
    assert compiler.returncode, "the image has a compiler"
    return "uid 10001, no capabilities, no new privileges, read-only, no compiler"


MOST_MEGABYTES, MOST_CODE_MEGABYTES = 700, 10


def contains_only_what_serving_needs() -> str:
    """No installer, header or setuid program; a separate layer for the code; a list of the packages."""
    image = json.loads(shell("docker image inspect $INKSTREAM_IMAGE"))[0]
    unwanted = r"-type f -perm /6000 -o -name pip -o -name ensurepip -o -name '*.h' -not -path '/srv/*'"
    found = shell(rf"docker exec --user 0 {SERVICE.name} find / -xdev \( {unwanted} \)")
    assert found == "", found
    listed = json.loads(SERVICE.inside("cat", "/srv/inkstream/sbom.cdx.json"))["components"]
    assert {"libc6", "torch", "fastapi", "inkstream"} <= {component["name"] for component in listed}
    layers = shell("docker history --no-trunc --format '{{.Size}} {{.CreatedBy}}' $INKSTREAM_IMAGE")
    (code,) = (float(size) for size in re.findall(r"^([\d.]+) MB .* in /srv/inkstream/code\b", layers, re.M))
    FIGURES["code_layer_mb"] = code
    assert code < MOST_CODE_MEGABYTES and image["Size"] < MOST_MEGABYTES * 1e6, (code, image["Size"])
    return f"{image['Size'] / 1e6:.0f} MB, {code} MB of it code; {len(listed)} packages listed"


def checks_weights_and_refuses_to_train() -> str:
    """The image lacks what training needs and serving never loads."""
    SERVICE.inside("inkstream", "check", "/srv/inkstream/weights")
    train = ["podman", "exec", SERVICE.name, "inkstream", "train", "--data", "/etc/passwd", "--out", "/tmp/out"]
    result = subprocess.run([*train, "--steps", "1"], capture_output=True, text=True)
    assert result.returncode == 2 and "--build-arg SLIM=" in result.stderr, result.stderr
    return "the default model; one line says how to train"


MOST_MEGABYTES_WITHOUT_TORCH = 300


def serves_without_torch() -> str:
    """The smaller image gives the same completion; it refuses what it cannot do in one line."""
    smaller = "$INKSTREAM_IMAGE:no-torch"
    size = json.loads(shell(f"docker image inspect {smaller}"))[0]["Size"] / 1e6
    shell(
        f"docker run --detach --name no-torch --read-only --tmpfs /tmp --env INKSTREAM_INSECURE_NO_AUTH=true {smaller}"
    )
    container = Container("no-torch")
    complete = "inkstream", "complete", "--seed", "7", "--max-tokens", "40", "Once upon a time"
    try:
        wait_for(container.is_healthy)
        assert container.inside(*complete) == SERVICE.inside(*complete)
        for words in ("serve --port 8001 --kernels torch", "check weights", "train --data / --out /tmp/out"):
            command = ["podman", "exec", container.name, "inkstream", *words.split()]
            result = subprocess.run(command, capture_output=True, text=True)
            last = result.stderr.splitlines()[-1]
            assert result.returncode == 2 and last.startswith("error: ") and "torch" in last, result.stderr
    finally:
        shell("podman rm --force no-torch")
    FIGURES["image_without_torch_mb"] = round(size)
    assert size < MOST_MEGABYTES_WITHOUT_TORCH, size
    return f"{size:.0f} MB, the same text"


def can_download_models() -> str:
    """Works without a network: it checks that the packages for downloads are installed."""
    unreachable = "HF_ENDPOINT=http://127.0.0.1:9"
    check = ["podman", "exec", "--env", unreachable, SERVICE.name, "inkstream", "check", "org/name"]
    result = subprocess.run(check, capture_output=True, text=True)
    assert result.returncode == 2 and "cannot reach http://127.0.0.1:9" in result.stderr, result.stderr
    return "it tries to"


def computes_with_torch() -> str:
    """Runs without the native kernels, and with 8-bit weights."""
    flags = "serve --port 8001 --kernels torch --quantize int8"
    shell(f"podman exec --detach {SERVICE.name} inkstream {flags}")
    ask = "import urllib.request as r; r.urlopen('http://127.0.0.1:8001/health/ready')"
    ready = ["podman", "exec", SERVICE.name, "python", "-c", ask]
    wait_for(lambda: subprocess.run(ready, capture_output=True).returncode == 0)
    text = SERVICE.inside("inkstream", "complete", "--url", "http://127.0.0.1:8001", "--max-tokens", "8", "Once")
    assert text
    for pid in running_with("serve", "--port", "8001"):
        os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not running_with("serve", "--port", "8001"))
    return "a text"


def computes_with_native_kernels() -> str:
    """The image contains the native kernels; torch is not used."""
    body = {**BODY, "max_tokens": 4, "n": 1, "stream": False}
    kernels = json.dumps(httpx.post(f"{DIRECT}/complete", json=body, timeout=60).json())
    assert "native" in kernels, kernels
    return "the receipt names them"


def streams_through_nginx() -> str:
    """Tokens come one by one, not at the end."""
    run("docker compose --profile nginx up --wait")
    wait_for(lambda: is_ready(NGINX))
    direct, proxied = Reader(BODY), Reader(BODY)
    for url, stream in ((DIRECT, direct), (NGINX, proxied)):
        stream.read(url)
        assert stream.end == "done" and stream.at[-1] - stream.at[0] > 0.5 * stream.at[-1], (
            "the response came in one piece"
        )
    assert proxied.texts == direct.texts
    return f"first token after {direct.at[0]:.3f} s directly, {proxied.at[0]:.3f} s through nginx"


def survives_a_thousand_requests() -> str:
    """Through nginx, with a read-only root file system."""
    level = _load(NGINX, requests=1000, max_tokens=16)
    assert (level["completed"], level["errors"]) == (1000, 0), level
    changed = shell(f"docker diff {SERVICE.name}").split("\n")
    assert not [line for line in changed if line and line[2:6] not in ("/tmp", "/run", "/etc", "/dev")], changed
    assert SERVICE.is_healthy()
    return f"{level['requests_per_second']:.0f} requests a second, 16 tokens each, 32 at a time"


def nginx_costs_little() -> str:
    """Median requests per second, in turns; and nginx's share of CPU time, which other load does not disturb."""
    rates: dict[str, list[float]] = {DIRECT: [], NGINX: []}
    cpu = [0.0, 0.0]
    for turn in range(5):
        for url in (DIRECT, NGINX) if turn % 2 else (NGINX, DIRECT):
            before = SERVICE.cpu_seconds(), PROXY.cpu_seconds()
            level = _load(url, requests=192, max_tokens=64)
            assert level["errors"] == 0, level
            rates[url].append(level["requests_per_second"])
            if url == NGINX:
                cpu[0] += SERVICE.cpu_seconds() - before[0]
                cpu[1] += PROXY.cpu_seconds() - before[1]
    direct, proxied = (statistics.median(rates[url]) for url in (DIRECT, NGINX))
    left = cpu[0] / sum(cpu)
    FIGURES.update(direct_rps=round(direct, 1), nginx_rps=round(proxied, 1), cpu_left_by_nginx=round(left, 3))
    assert left > 0.9, f"nginx left {left:.1%} of the CPU time that both took to the service"
    return (
        f"{proxied:.1f} requests a second through nginx, {direct:.1f} directly ({proxied / direct:.0%});"
        f" nginx left {left:.1%} of the CPU time to the service"
    )


def _four_streams() -> ConcurrentReaders:
    """Four streams of sixteen completions each, which take some seconds."""
    return ConcurrentReaders(NGINX, [Reader({**BODY, "seed": seed}) for seed in range(4)])


def restarts_a_killed_engine() -> str:
    """The streams notice nothing but a pause."""
    undisturbed = _four_streams()
    undisturbed.join()
    (before,) = SERVICE.engines()
    streams = _four_streams()
    wait_for(lambda: streams.tokens > 100)
    os.kill(before, signal.SIGKILL)
    streams.join()
    for stream, expected in zip(streams.readers, undisturbed.readers, strict=True):
        assert stream.end == "done" and stream.texts == expected.texts, "the completions differ"
    assert (metric("engine_restarts_total"), metric("replayed_requests_total") > 0) == (1, True)
    pause = streams.longest_pause()
    assert pause > 0.3, "too short for a restart of the engine: nothing was interrupted"
    wait_for(is_ready)
    assert SERVICE.engines() != [before] and SERVICE.is_healthy()
    FIGURES["engine_killed_pause_s"] = round(pause, 2)
    return f"64 completions the same, after a pause of {pause:.2f} s"


def is_monitored() -> str:
    """Prometheus scrapes all metrics and accepts all queries of the dashboard and all alerts."""
    run("docker compose --profile monitoring up --detach inkstream prometheus")
    wait_for(lambda: _ask('up{job="inkstream"}') == [1.0])
    board = json.loads((ROOT / "deploy/grafana/dashboards/inkstream.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    wait_for(lambda: bool(_ask("rate(inkstream_generation_tokens_total[30s])")))
    variables = {"$__rate_interval": "1m", "$__range": "5m", "$job": ".*", "$instance": ".*"}
    for variable, value in variables.items():
        queries = [query.replace(variable, value) for query in queries]
    empty = [query for query in queries if not _ask(query)]
    # No request was refused and no connection cut, so these have no value yet.
    assert not [query for query in empty if "rejected" not in query and "connections_cut" not in query], empty
    rules = httpx.get(f"{PROMETHEUS}/api/v1/rules", timeout=10).json()["data"]["groups"][0]["rules"]
    assert rules and all(rule["health"] in ("ok", "unknown") for rule in rules), rules
    return f"{len(queries)} queries of the dashboard, {len(rules)} alerts"


def _read_until_refused(streams: list[Reader]) -> None:
    """Reads one stream after the other, until one does not end with `done`."""
    end = "done"
    while end == "done":
        streams.append(stream := Reader(BODY))
        stream.read(NGINX)
        end = stream.end


def drains_when_it_is_stopped() -> str:
    """While clients keep connecting, each stream is complete or was refused before its first token."""
    whole = Reader(BODY)
    whole.read(NGINX)
    streams: list[Reader] = []
    clients = [threading.Thread(target=_read_until_refused, args=[streams]) for _ in range(4)]
    for client in clients:
        client.start()
    wait_for(lambda: sum(len(stream.at) for stream in streams) > 100)
    began = time.monotonic()
    run("docker compose stop inkstream")
    took = time.monotonic() - began
    for client in clients:
        client.join()
    state = SERVICE.facts()["State"]
    assert (state["ExitCode"], state["OOMKilled"]) == (0, False), state
    refused = [stream for stream in streams if stream.end != "done"]
    assert len(refused) == 4 and not any(stream.texts for stream in refused), [stream.end for stream in refused]
    assert all(stream.texts == whole.texts for stream in streams if stream.end == "done")
    FIGURES["drain_s"] = round(took, 2)
    return f"stopped in {took:.1f} s, exit 0; of {len(streams)} streams none was cut, the last 4 refused"


def requires_keys() -> str:
    """The keys are a secret file that root gives to the service's group, mode 0440."""
    run("docker compose --profile nginx --profile monitoring down")
    assert not (ROOT / "keys").exists(), "a folder named keys exists already"
    run("install -d keys")
    key = run(".venv/bin/inkstream keys add alice --keys-file keys/keys.json").strip()
    run("chown :10001 keys/keys.json && chmod 440 keys/keys.json")
    run("docker compose --file docker-compose.yml --file compose.keys.yaml up --wait")
    wait_for(is_ready)
    bearer = {"Authorization": f"Bearer {key}"}
    responses = status(f"{DIRECT}/v1/models"), status(f"{DIRECT}/v1/models", headers=bearer)
    run("docker compose --file docker-compose.yml --file compose.keys.yaml down")
    shell("rm -rf keys")
    assert responses == (401, 200), responses
    return "401 without, 200 with"


def serves_other_weights() -> str:
    """The weights are mounted read-only and reloaded by a signal, without a restart."""
    run("docker compose --profile nginx --profile monitoring down")
    (start,) = (line for line in commands(PAGE.read_text()) if line.startswith("docker run "))
    run(start)
    try:
        wait_for(is_ready)
        run("docker kill --signal HUP inkstream")
        wait_for(lambda: metric("weights_reloads_total") == 1)
        assert is_ready()
        run("docker stop --time 40 inkstream")
        run("docker rm inkstream")
    finally:
        subprocess.run(["podman", "rm", "--force", "--ignore", "inkstream"], capture_output=True)
    return "mounted, and loaded again by SIGHUP"


def _load(url: str, *, requests: int, max_tokens: int) -> Any:
    arguments = f"--streams 32 --requests {requests} --max-tokens {max_tokens} --seconds 600 --json-only"
    result = shell(f"{sys.executable} -m app bench --url {url} {arguments}")
    return json.loads(result)["levels"][0]


def _ask(query: str) -> list[float]:
    """The current values of a query in Prometheus; none while it does not listen yet."""
    try:
        response = httpx.get(f"{PROMETHEUS}/api/v1/query", params={"query": query}, timeout=10)
    except httpx.TransportError:
        return []
    if response.status_code in (502, 503):
        return []
    assert response.status_code == 200, f"{query}: {response.text}"
    return [float(one["value"][1]) for one in response.json()["data"]["result"]]


CHECKS: list[Callable[[], str]] = [
    starts_and_is_healthy, has_no_rights, computes_with_native_kernels, streams_through_nginx,
    contains_only_what_serving_needs, checks_weights_and_refuses_to_train, can_download_models, computes_with_torch,
    serves_without_torch,
    survives_a_thousand_requests, nginx_costs_little, restarts_a_killed_engine, is_monitored,
    drains_when_it_is_stopped, requires_keys, serves_other_weights,
]  # fmt: skip


def main(only: Sequence[str]) -> int:
    """Runs the checks, or the first four and the named ones; returns 0 if all pass."""
    chosen = [check for check in CHECKS if not only or check in CHECKS[:4] or check.__name__ in only]
    try:
        for check in chosen:
            print(f"{check.__name__.replace('_', ' ')}: {check()}", flush=True)
    finally:
        run("docker compose --profile nginx --profile monitoring down")
    print(json.dumps(FIGURES))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
