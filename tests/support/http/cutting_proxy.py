"""A TCP proxy that cuts connections in the middle of a response."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def cutting_proxy(url: str, *limits: int) -> Iterator[tuple[str, list[int]]]:
    """Cuts its first connections after `limits` bytes of the response each, and later ones never.

    Yields its address, and a growing list of the limits of the opened connections.
    """
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    opened: list[int] = []

    def forward(client: socket.socket, upstream: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                upstream.sendall(data)

    def respond(client: socket.socket, limit: int) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(address) as upstream:
            threading.Thread(target=forward, args=(client, upstream), daemon=True).start()
            while limit > 0 and (data := upstream.recv(min(4096, limit))):
                client.sendall(data)
                limit -= len(data)
            client.shutdown(socket.SHUT_RDWR)

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                opened.append((*limits, *[1 << 30] * (len(opened) + 1))[len(opened)])
                threading.Thread(target=respond, args=(client, opened[-1]), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", opened
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()
