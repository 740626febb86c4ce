"""Reloads weights of a running service through a symbolic link, and reads the outcome."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.support.servers import Server


def point_link(link: Path, target: Path) -> None:
    """Points a link at `target` atomically, as `ln -sfn` and `mv -T` do."""
    new = link.with_name(".next")
    new.symlink_to(target)
    new.replace(link)


def count_reloads(server: Server, outcome: str) -> float:
    """Number of reloads with this outcome."""
    return server.metric(f'weights_reloads_total{{outcome="{outcome}"}}')


def has_reloaded(server: Server, outcome: str = "switched") -> bool:
    """Triggers a reload; whether it had this outcome."""
    before = count_reloads(server, outcome)
    server.process.send_signal(signal.SIGHUP)
    return server.wait_for(lambda: count_reloads(server, outcome) > before)


def refusal_lines(server: Server) -> list[str]:
    """Log lines about refused weights."""
    return [line for line in server.log_text().splitlines() if "new weights are refused" in line]
