"""New weights for a running service: where a link leads to, and what became of the reload."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.support.servers import Server


def point(link: Path, target: Path) -> None:
    """As `ln -sfn` and `mv -T` do."""
    new = link.with_name(".next")
    new.symlink_to(target)
    new.replace(link)


def reloads(server: Server, outcome: str) -> float:
    """How many reloads have had this outcome."""
    return server.metric(f'weights_reloads_total{{outcome="{outcome}"}}')


def has_reloaded(server: Server, outcome: str = "switched") -> bool:
    """Asks for new weights; whether it came to this outcome."""
    before = reloads(server, outcome)
    server.process.send_signal(signal.SIGHUP)
    return server.wait_for(lambda: reloads(server, outcome) > before)


def refusals(server: Server) -> list[str]:
    """Log lines about weights that were refused."""
    return [line for line in server.log_text().splitlines() if "new weights are refused" in line]
