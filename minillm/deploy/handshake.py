"""Let only those connect who know the replica's secret: a challenge and a response in each direction.

Workers and replicas talk over TCP, so anything that reaches a replica's port can connect. Each end proves that it knows
the secret by an HMAC over fresh random numbers of both ends, so a recorded exchange is of no use, and the secret is
never sent here: workers learn it from Ray. The replica's id is part of it: a port that has passed to another replica is
not mistaken for the first one. So is the worker's id, by which the replica knows whose places to give back once the
worker is gone.

What follows is neither encrypted nor signed. Use a network on which nobody else can read or change packets.
"""

import hmac
import secrets
import socket
import time
from typing import NamedTuple

from minillm.errors import MinillmError

MAGIC = b"minillm replica 1\n"
NONCE, PROOF, WORKER = 32, 32, 16  # bytes
SECONDS = 10.0  # for the whole exchange
# A peer that vanished, with its machine or its network, is noticed after IDLE + INTERVAL * PROBES seconds.
IDLE, INTERVAL, PROBES = 5, 3, 3


class Address(NamedTuple):
    """The address of a replica, and the secret that it drew: who reads it in Ray may connect."""

    host: str
    port: int
    secret: str


class Stranger(MinillmError):
    """The other end of a connection does not know the secret, or is not the replica that it should be."""


def new_secret() -> str:
    """Return a secret for one replica, as text."""
    return secrets.token_hex(32)


def new_worker() -> str:
    """Return an id for a worker."""
    return secrets.token_hex(WORKER)


def connect(address: Address, replica: str, worker: str) -> socket.socket:
    """Return a connection to a replica. worker: this one's id. Raises OSError, Stranger. Blocks."""
    until = time.monotonic() + SECONDS
    secret = address.secret
    sock = socket.create_connection(address[:2], SECONDS)
    try:
        theirs = _receive(sock, len(MAGIC) + NONCE, until).removeprefix(MAGIC)
        ours = secrets.token_bytes(NONCE)
        me = bytes.fromhex(worker)
        sock.sendall(ours + me + _proof(secret, b"worker", replica, theirs, ours, me))
        if not hmac.compare_digest(_receive(sock, PROOF, until), _proof(secret, b"replica", replica, theirs, ours)):
            raise Stranger(f"what listens at {address.host}:{address.port} is not replica {replica}")
        return _prepared(sock)
    except BaseException:
        sock.close()
        raise


def accept(sock: socket.socket, secret: str, replica: str) -> tuple[socket.socket, str]:
    """Return a connection and the worker's id, once it has proved that it knows the secret; close it if it has not.

    Raises OSError, Stranger. Blocks.
    """
    until = time.monotonic() + SECONDS
    try:
        ours = secrets.token_bytes(NONCE)
        sock.settimeout(SECONDS)
        sock.sendall(MAGIC + ours)
        theirs, worker = _receive(sock, NONCE, until), _receive(sock, WORKER, until)
        proof = _proof(secret, b"worker", replica, ours, theirs, worker)
        if not hmac.compare_digest(_receive(sock, PROOF, until), proof):
            raise Stranger("a connection was refused: its other end does not know this replica's secret")
        sock.sendall(_proof(secret, b"replica", replica, ours, theirs))
        return _prepared(sock), worker.hex()
    except BaseException:
        sock.close()
        raise


def _proof(secret: str, end: bytes, replica: str, *fields: bytes) -> bytes:
    """Return the HMAC that one end sends. end: which one, so that neither can send the other's back.

    fields: the numbers of both ends, and the worker's id; each has a fixed length.
    """
    return hmac.digest(bytes.fromhex(secret), b"\0".join((end, replica.encode(), *fields)), "sha256")


def _receive(sock: socket.socket, count: int, until: float) -> bytes:
    """Return exactly `count` bytes. Raises TimeoutError; ConnectionError if the connection ends before."""
    data = b""
    while len(data) < count:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other end did not prove in time that it knows the secret")
        sock.settimeout(left)
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionResetError("the other end closed the connection")
        data += more
    return data


def _prepared(sock: socket.socket) -> socket.socket:
    """Set what the messages need: no delay, and an end if the other machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", IDLE), ("TCP_KEEPINTVL", INTERVAL), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # milliseconds until data that is not acknowledged ends the connection
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (IDLE + INTERVAL * PROBES))
    sock.settimeout(None)
    return sock
