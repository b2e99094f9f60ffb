"""Only a worker that knows the secret is let in, and only by the replica that it looks for."""

import hmac
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from minillm.deploy import handshake
from minillm.deploy.handshake import MAGIC, NONCE, PROOF, WORKER, Address, Stranger
from tests.waiting import TIMEOUT

SECRET, OTHER = handshake.new_secret(), handshake.new_secret()
ME = handshake.new_worker()


@pytest.fixture
def met():
    """Connects a worker to a replica, with a secret and a replica's id of each; returns both results or errors."""

    def outcome(function, *arguments):
        try:
            return function(*arguments)
        except (OSError, Stranger) as error:
            return error

    opened = []

    def meet(worker, replica):
        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
            theirs = pool.submit(lambda: outcome(handshake.accept, listener.accept()[0], *replica))
            secret, name = worker
            ours = outcome(handshake.connect, Address(*listener.getsockname(), secret), name, ME)
            found = theirs.result(TIMEOUT)
            if isinstance(found, tuple):
                found, met = found
                assert met == ME
            opened.extend(each for each in (ours, found) if isinstance(each, socket.socket))
            return ours, found

    yield meet
    for each in opened:
        each.close()


def test_both_ends_that_know_the_secret_can_talk(met):
    worker, replica = met((SECRET, "a"), (SECRET, "a"))
    worker.sendall(b"question")
    assert replica.recv(100) == b"question"
    replica.sendall(b"answer")
    assert worker.recv(100) == b"answer"
    for each in (worker, replica):
        assert each.gettimeout() is None
        assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.parametrize(
    ("worker", "replica"), [((OTHER, "a"), (SECRET, "a")), ((SECRET, "a"), (SECRET, "b"))], ids=["secret", "replica"]
)
def test_a_worker_with_another_secret_or_for_another_replica_is_refused_and_gets_nothing(met, worker, replica):
    ours, theirs = met(worker, replica)
    assert isinstance(theirs, Stranger)
    assert isinstance(ours, ConnectionError), "the replica proves nothing to a stranger"


def replica_of(script):
    """A port at which a thread runs `script` with each connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def work():
        with listener, listener.accept()[0] as sock:
            script(sock)

    threading.Thread(target=work, daemon=True).start()
    return listener.getsockname()


def receive(sock, count):
    return sock.recv(count, socket.MSG_WAITALL)


def test_a_replica_that_does_not_know_the_secret_is_noticed():
    def script(sock):
        sock.sendall(MAGIC + bytes(NONCE))
        receive(sock, NONCE + WORKER + PROOF)
        sock.sendall(bytes(PROOF))

    with pytest.raises(Stranger, match="is not replica a"):
        handshake.connect(Address(*replica_of(script), SECRET), "a", ME)


def test_a_workers_own_proof_is_no_proof_of_the_replica():
    def script(sock):
        sock.sendall(MAGIC + bytes(NONCE))
        sock.sendall(receive(sock, NONCE + WORKER + PROOF)[NONCE + WORKER :])

    with pytest.raises(Stranger):
        handshake.connect(Address(*replica_of(script), SECRET), "a", ME)


def said(number, sent_by=ME, proved=ME):
    """What a worker sends to replica a, which has drawn a number: with an id, and the proof of one."""
    nonce = bytes(NONCE)
    fields = b"\0".join((b"worker", b"a", number, nonce, bytes.fromhex(proved)))
    return nonce + bytes.fromhex(sent_by) + hmac.digest(bytes.fromhex(SECRET), fields, "sha256")


def test_a_recorded_exchange_does_not_let_anybody_in():
    ours, theirs = socket.socketpair()
    with ours, ThreadPoolExecutor(1) as pool:
        let_in = pool.submit(handshake.accept, theirs, SECRET, "a")
        ours.sendall(said(bytes(NONCE)))  # valid if the replica had drawn the same number again
        with pytest.raises(Stranger):
            let_in.result(TIMEOUT)


def test_a_worker_proves_its_id_too():
    for claimed in (ME, handshake.new_worker()):
        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
            let_in = pool.submit(lambda each: handshake.accept(each.accept()[0], SECRET, "a"), listener)
            with socket.create_connection(listener.getsockname()) as ours:
                ours.sendall(said(receive(ours, len(MAGIC) + NONCE)[len(MAGIC) :], sent_by=claimed))
                if claimed != ME:
                    with pytest.raises(Stranger):
                        let_in.result(TIMEOUT)
                    continue
                sock, worker = let_in.result(TIMEOUT)
                sock.close()
                assert worker == ME


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(200)])
def test_what_says_nothing_or_something_else_is_refused_in_time(monkeypatch, sent):
    monkeypatch.setattr(handshake, "SECONDS", 0.2)
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(sent)
        with pytest.raises((TimeoutError, Stranger)):
            handshake.accept(theirs, SECRET, "a")
        assert theirs.fileno() == -1, "the connection is still open"


def test_a_peer_that_sends_byte_by_byte_has_no_more_time(monkeypatch):
    monkeypatch.setattr(handshake, "SECONDS", 0.3)
    ours, theirs = socket.socketpair()
    over = threading.Event()

    def trickle():
        with ours:
            while not over.wait(0.05):
                try:
                    ours.sendall(b"x")
                except OSError:
                    return

    threading.Thread(target=trickle, daemon=True).start()
    with pytest.raises(TimeoutError):
        handshake.accept(theirs, SECRET, "a")
    over.set()


def test_a_secret_has_256_bits_and_is_drawn_anew():
    assert len({handshake.new_secret() for _ in range(10)}) == 10
    assert len(bytes.fromhex(SECRET)) == 32
