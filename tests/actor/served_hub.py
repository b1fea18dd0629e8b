"""A real hub whose messages a function handles."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offbeat.protocols.channels import Hub, Received


@contextmanager
def served(hub: Hub, handle: Callable[[Received], None]) -> Iterator[str]:
    """Handle the hub's messages in a thread, and close the hub at the end; yield its address."""
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            hub.wait(0.02)
            while (received := hub.receive()) is not None:
                handle(received)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield hub.address
    finally:
        is_over.set()
        thread.join()
        hub.close()
