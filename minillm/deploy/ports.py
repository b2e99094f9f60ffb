"""Ports for processes that open them some seconds later."""

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")  # the ports that Linux gives to those who name none: ip(7)
ABOVE = 10_000  # below, many services have a port of their own


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that are free.

    The system gives none of them to a connection, or to a server that names no port, until they are opened. Where it
    does not say which it gives, or none of the others is free, they are among those, and may be taken meanwhile.
    """
    first = ABOVE
    with suppress(OSError):
        first = int(GIVEN.read_text().split()[0])
    others = range(ABOVE, max(first, ABOVE))
    ports: list[int] = []
    with ExitStack() as stack:
        for port in [*random.SystemRandom().sample(others, len(others)), *[0] * count]:  # other processes draw others
            if len(ports) == count:
                break
            with suppress(OSError):
                held = stack.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(held.getsockname()[1])
    return ports
