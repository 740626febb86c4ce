"""What a person at the terminal sees of a start: progress of a slow one, and a summary once the service is ready.

Also opens the page in the browser (--open).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import threading
import time
import webbrowser

from app.common import logs
from app.common.ipc import Ready
from app.common.settings import Settings
from app.common.version import VERSION
from app.serving.service import Service
from model.files import one_line

_log = logging.getLogger("inkstream")
_PATIENCE_SECONDS = 3.0
"""A start that takes longer names its phases."""
_POLL_SECONDS = 0.5
_BACKENDS = {"native": "C++ kernels", "triton": "Triton kernels", "torch": "torch"}


async def follow_start(service: Service, address: tuple[str, int]) -> None:
    """Returns once the first model is loaded, and all of the above is done. address: of the listener."""
    settings, url, started = service.settings, page_url(*address), time.monotonic()
    is_watched = logs.resolve_format(settings.log_format) == "text" and _log.isEnabledFor(logging.INFO)
    loaded = asyncio.ensure_future(service.wait_loaded())
    shown = ""
    while not (await asyncio.wait([loaded], timeout=_POLL_SECONDS if is_watched else None))[0]:
        if service.phase != shown and time.monotonic() - started > _PATIENCE_SECONDS:
            shown = service.phase
            _log.info("%s ...", shown)
    ready = service.engine.ready
    if is_watched and ready:
        logs.print_lines(summary(service, ready, url))
    if settings.open:
        open_page(url)


def page_url(host: str, port: int) -> str:
    """Where a browser on this machine finds a service that listens on this address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"


def summary(service: Service, ready: Ready, url: str) -> str:
    """The served model, its device and its address."""
    settings = service.settings
    with_key = " (with an API key)" if settings.keys_file else ""
    of_model = f" (the model's is {ready.model_context:,})" if ready.context < ready.model_context else ""
    context = f"context of {ready.context:,} tokens{of_model}"
    rows = [
        ("model", one_line(f"{service.model_name}, from {settings.weights}")),
        ("size", f"{ready.n_params / 1e6:,.2f} M parameters, {_formats(ready, settings)}, {context}"),
        ("device", one_line(f"{ready.device}, {_backend(ready)}")),
        ("page", f"{url}{with_key}"),
        ("API", f"{url}/docs{with_key}"),
        *([] if settings.is_loopback else [("network", _reach(settings))]),
    ]
    lines = [f"  {label:<8}{text}" for label, text in rows]
    return "\n".join(["", f"  inkstream {VERSION} is ready. Ctrl+C stops it.", "", *lines, ""])


def open_page(url: str) -> None:
    """Opens the page in the user's browser; logs a line if that fails. Does not wait for the browser."""
    # A daemon: a command in BROWSER may run for as long as the browser is open, and must not delay the end.
    threading.Thread(target=_open, args=(url,), name="browser", daemon=True).start()


def _open(url: str) -> None:
    try:
        has_opened = webbrowser.open(url)
    except (webbrowser.Error, OSError):
        has_opened = False
    if not has_opened:
        _log.warning("--open: no browser could be started: open %s yourself", url)


def _backend(ready: Ready) -> str:
    name = next((text for kind, text in _BACKENDS.items() if ready.numerics.startswith(kind)), ready.numerics)
    return f"{name}; faster kernels are being built for the next start" if ready.waits_for_build else name


def _formats(ready: Ready, settings: Settings) -> str:
    if ready.weights in ("", ready.dtype):
        return ready.dtype
    bits = f", {ready.weight_bits:.3g} bits per weight" if ready.weight_bits else ""
    is_chosen = settings.dtype == "auto" and ready.dtype == "float32"
    reason = " (the device does not multiply bfloat16)" if is_chosen else ""
    return f"{ready.weights} weights{bits}, computed in {ready.dtype}{reason}"


def _reach(settings: Settings) -> str:
    if settings.keys_file:
        return f"other machines reach the service at {settings.host}, with an API key"
    return f"other machines reach the service at {settings.host}, without an API key (--insecure-no-auth)"
