"""The container runs as uid 10001 with a read-only root, no capabilities and no way to gain rights.

Checks the files; tests/container/run checks real containers. The same rules apply to the other compose services.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.support import ROOT
from tests.support.promise_figures import Promise

DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = (ROOT / "docker-compose.yml").read_text()


def _last_stage(dockerfile: str) -> list[str]:
    """Instructions of the last stage, one per line."""
    joined = re.sub(r"\\\n(\s*#.*\n)*", " ", dockerfile)
    return [line for line in re.split(r"^FROM .*$", joined, flags=re.M)[-1].splitlines() if line and line[0] != "#"]


def _values(stage: list[str], instruction: str) -> list[str]:
    return [line.partition(" ")[2].strip() for line in stage if line.startswith(f"{instruction} ")]


@functools.cache
def _services(compose: str) -> list[dict[str, Any]]:
    """Services of the compose file, inkstream first."""
    services = yaml.safe_load(compose)["services"]
    assert next(iter(services)) == "inkstream"
    return list(services.values())


def _each(is_followed: Callable[[dict[str, Any]], bool]) -> Callable[[str], bool]:
    return lambda compose: all(map(is_followed, _services(compose)))


def _mounts_are_read_only(compose: str) -> bool:
    """Whether all mounts except named volumes are read-only, without the Docker socket."""
    volumes = re.findall(r"^\s*#?\s+- (\S+:/\S+)$", compose, re.M)  # also commented-out ones
    return "docker.sock" not in compose and all(v.endswith(":ro") or re.match(r"\w+:/", v) for v in volumes)


FILE_RULES: dict[str, Callable[[str], bool]] = {
    "runs as 10001": lambda text: _values(_last_stage(text), "USER") == ["10001:10001"],
    "last instruction is CMD or ENTRYPOINT": lambda text: _last_stage(text)[-1].startswith(("CMD", "ENTRYPOINT")),
    "user 10001 has no login shell": lambda text: bool(
        re.search(r"useradd --uid 10001 --gid 10001 --no-create-home .*--shell /usr/sbin/nologin", text)
    ),
    "nothing is fetched from a URL": lambda text: not re.search(r"^ADD |curl |wget ", text, re.M),
    "not the whole checkout is copied": lambda text: not re.search(r"^COPY (--\S+ )*\.+/? ", text, re.M),
    "no compiler and no pip cache in the last stage": lambda text: "apt-get" not in "".join(_last_stage(text)),
    "no secret is baked in": lambda text: not re.search(r"^(ARG|ENV) .*(KEY|TOKEN|SECRET|PASSWORD)", text, re.M | re.I),
    "packages are installed with hashes": lambda text: (
        "--require-hashes --no-deps --requirement requirements.lock" in text
    ),
    "has a health check": lambda text: bool(_values(_last_stage(text), "HEALTHCHECK")),
    "stops with SIGTERM": lambda text: _values(_last_stage(text), "STOPSIGNAL") == ["SIGTERM"],
    "no shell between the signal and the service": lambda text: all(
        value.startswith("[") for name in ("ENTRYPOINT", "CMD") for value in _values(_last_stage(text), name)
    ),
}
_RIGHTS = {"privileged", "devices", "network_mode", "pid", "ipc", "cap_add"}
COMPOSE_RULES: dict[str, Callable[[str], bool]] = {
    "read-only root": _each(lambda service: service.get("read_only") is True),
    "a tmpfs for /tmp": lambda text: _services(text)[0].get("tmpfs") == ["/tmp"],
    "no capabilities": _each(lambda service: service.get("cap_drop") == ["ALL"]),
    "no new privileges": _each(lambda service: service.get("security_opt") == ["no-new-privileges:true"]),
    "not privileged": _each(lambda service: not _RIGHTS & service.keys()),
    "limit of processes": _each(lambda service: 0 < service.get("pids_limit", 0) <= 1024),
    "no user is root": _each(lambda service: bool(re.match(r"[1-9]\d*(:|$)", str(service.get("user", 10001))))),
    "no other user than the image's": lambda text: "user" not in _services(text)[0],
    "published on loopback": _each(
        lambda service: all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    ),
    "mounts are read-only": _mounts_are_read_only,
    "time to drain": lambda text: int(_services(text)[0]["stop_grace_period"].removesuffix("s")) > 32,
}
WEAKENED = [
    ("USER 10001:10001", "USER root"),
    ('"--host", "0.0.0.0"]', '"--host", "0.0.0.0"]\nRUN id'),
    ("--shell /usr/sbin/nologin", "--shell /bin/sh"),
    ("COPY weights weights", "ADD https://example.org/x /x"),
    ("COPY weights weights", "COPY . ."),
    ("WORKDIR /srv/inkstream", "RUN apt-get install g++"),
    ("EXPOSE 8000", "ENV INKSTREAM_API_KEY=x"),
    ("--require-hashes --no-deps --requirement", "--requirement"),
    ("HEALTHCHECK", "#"),
    ("STOPSIGNAL SIGTERM", ""),
    ('ENTRYPOINT ["inkstream"]', "ENTRYPOINT inkstream"),
    ("read_only: true", "read_only: false"),
    ("tmpfs:\n      - /tmp", "tmpfs:\n      - /"),
    ("cap_drop:\n      - ALL", "cap_drop:\n      - CHOWN"),
    ("restart:", "cap_add: [SYS_ADMIN]\n    restart:"),
    ("no-new-privileges:true", "seccomp:unconfined"),
    ("restart:", "privileged: true\n    restart:"),
    ("127.0.0.1:${SERVICE_PORT:-8000}:8000", "8000:8000"),
    ("/weights:ro", "/weights"),
    ("stop_grace_period: 40s", "stop_grace_period: 10s"),
    ("pids_limit: 1024", "pids_limit: -1"),
    ('user: "101:101"', 'user: "0:0"'),
    ("restart:", 'user: "10002"\n    restart:'),
    ('- "127.0.0.1:${PROMETHEUS_PORT:-9090}:9090"', '- "9090:9090"'),
    ("/etc/prometheus:ro", "/etc/prometheus"),
]


def _broken(dockerfile: str, compose: str) -> list[str]:
    found = [name for name, is_followed in FILE_RULES.items() if not is_followed(dockerfile)]
    return found + [name for name, is_followed in COMPOSE_RULES.items() if not is_followed(compose)]


def test_container_files_follow_all_rules(promise: Promise) -> None:
    broken = _broken(DOCKERFILE, COMPOSE)
    n = len(FILE_RULES) + len(COMPOSE_RULES)
    promise.all_of(
        "rules for Dockerfile and compose file that hold (tests/container/run tries them on containers)",
        n - len(broken),
        n,
    )
    assert broken == []


@pytest.mark.parametrize(("old", "new"), WEAKENED)
def test_weakened_container_files_are_detected(old: str, new: str) -> None:
    assert old in DOCKERFILE + COMPOSE
    assert len(_broken(DOCKERFILE.replace(old, new), COMPOSE.replace(old, new))) >= 1
