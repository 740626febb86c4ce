"""Two Ray nodes on this machine with a replica of the service on each, and ways to break them. Loopback only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster

from deploy.ray_serve import build

PORT = 8123
URL = f"http://127.0.0.1:{PORT}"
"""Of Ray's proxy."""
_STORE_BYTES = 100 << 20
_START_SECONDS = 240.0
_TITLE = "ray::ServeReplica:inkstream:replica"


class TwoNodes:
    """Two nodes. Each is a raylet with one CPU, which is what a replica asks for by default."""

    def __init__(self) -> None:
        node = {"num_cpus": 1, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=node)
        ray.init(address=self._cluster.address, log_to_driver=False)  # before there is a node that may be removed
        self._second = self._cluster.add_node(**node)
        # Both nodes share this machine's ports: with a proxy on each, connections would reach either one.
        serve.start(http_options={"host": "127.0.0.1", "port": PORT}, proxy_location="HeadOnly")

    def deploy(self, **arguments: float) -> None:
        """Deploys the service, or redeploys it with other arguments of build()."""
        serve.run(build({"replicas": 2, **arguments}), name="inkstream")

    def wait_for_replicas(self, count: int) -> None:
        """Waits for `count` ready replicas. Raises AssertionError at the time-out."""
        wait_until(lambda: running_replicas() == count, _START_SECONDS, f"there are not {count} replicas")

    def kill_replica(self) -> None:
        """Sends SIGKILL to the replica on the second node; Ray will start another."""
        victim = max(self._replicas(), key=lambda process: process.pid)
        victim.kill()

    def remove_node(self) -> None:
        """Kills all processes of the second node at once."""
        self._cluster.remove_node(self._second, allow_graceful=False)

    def stop(self) -> list[str]:
        """Stops everything. Returns the processes that still run after a while, which must be none."""
        started = psutil.Process().children(recursive=True)
        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()
        _, left = psutil.wait_procs(started, timeout=20)
        return [" ".join(process.cmdline()[:3]) for process in left if process.status() != psutil.STATUS_ZOMBIE]

    def _replicas(self) -> list[psutil.Process]:
        ours = psutil.Process().children(recursive=True)
        return [process for process in ours if " ".join(process.cmdline()).startswith(_TITLE)]


def apply_settings(weights: str) -> None:
    """Sets the service's variables: four completions at once per replica, so that most clients have to wait."""
    for name in [name for name in os.environ if name.startswith("INKSTREAM_")]:
        del os.environ[name]
    chosen = {"WEIGHTS": weights, "KERNELS": "torch", "THREADS": "1", "MAX_RUNNING": "4", "DRAIN_TIMEOUT": "5"}
    os.environ.update({f"INKSTREAM_{name}": value for name, value in chosen.items()})
    os.environ.update(INKSTREAM_INSECURE_NO_AUTH="true", OMP_WAIT_POLICY="PASSIVE", RAY_USAGE_STATS_ENABLED="0")
    # Ray's default is 15: under other load, its replicas would get no core.
    os.environ.update(RAY_worker_niceness="0")


def running_replicas() -> int:
    """Replicas that Ray sends requests to."""
    deployments = serve.status().applications["inkstream"].deployments
    return deployments["replica"].replica_states.get("RUNNING", 0) if "replica" in deployments else 0


def wait_until(condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
    """Waits for the condition. Raises AssertionError with `otherwise` at the time-out."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.2)
