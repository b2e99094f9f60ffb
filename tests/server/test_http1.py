"""How requests are read from bytes: where they end, their targets, HEAD and OPTIONS. From RFC 9110 and RFC 9112."""

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable

import httpx
import pytest

from minillm.server import limits, running
from tests.waiting import TIMEOUT

BODY = b'{"prompt": [5], "max_tokens": 1}'
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
NEXT = b"GET /v1/nothing HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:
        yield client


@pytest.fixture(scope="module")
def send(server) -> Callable[[bytes], list[int]]:
    """Send bytes, say that no more follow, and return the statuses of all answers until the server closes."""
    host, port = server.url.removeprefix("http://").split(":")

    def send(data: bytes) -> list[int]:
        with socket.create_connection((host, int(port)), timeout=TIMEOUT) as client:
            got = b""
            with contextlib.suppress(ConnectionError):  # closed before it had read everything
                client.sendall(data)
            while b"HTTP/1.1 404" not in got:
                try:
                    if not (part := client.recv(1 << 16)):
                        break
                except ConnectionError:
                    break
                got += part
        return [int(status) for status in re.findall(rb"HTTP/1\.1 ([0-9]+) ", got)]

    return send


SMUGGLING = {  # RFC 9112, sections 2.2, 5.1, 6.1, 6.3 and 7.1
    "both lengths": POST + LENGTH + CHUNKED + b"\r\n" + CHUNKS,
    "both lengths, the other way round": POST + CHUNKED + LENGTH + b"\r\n" + CHUNKS,
    "both lengths, one of them huge": POST + CHUNKED + b"content-length: 999999999\r\n\r\n" + CHUNKS,
    "identity and chunked": POST + b"transfer-encoding: identity, chunked\r\n\r\n" + CHUNKS,
    "a coding with a similar name": POST + b"transfer-encoding: xchunked\r\n\r\n" + CHUNKS,
    "chunked twice": POST + CHUNKED + CHUNKED + b"\r\n" + CHUNKS,
    "chunked in HTTP/1.0": POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + CHUNKS,
    "two lengths": POST + LENGTH + b"content-length: 5\r\n\r\n" + BODY,
    "a list of two lengths": POST + b"content-length: %d, 5\r\n\r\n" % len(BODY) + BODY,
    "a length with a sign": POST + b"content-length: +%d\r\n\r\n" % len(BODY) + BODY,
    "a length in hexadecimal": POST + b"content-length: 0x20\r\n\r\n" + BODY,
    "a length with a folded line": POST + LENGTH + b" transfer-encoding: chunked\r\n\r\n" + CHUNKS,
    "a space before the colon": POST + b"transfer-encoding : chunked\r\n\r\n" + CHUNKS,
    "a bare carriage return": POST + b"x: a\rtransfer-encoding: chunked\r\n" + LENGTH + b"\r\n" + BODY,
    "a bare line feed in a chunk's head": POST + CHUNKED + b"\r\n" + CHUNKS.replace(b"\r\n", b"\n", 1),
    "a bare line feed in a chunk's extension": POST + CHUNKED + b"\r\n" + CHUNKS.replace(b"\r\n", b";\nx\r\n", 1),
    "a chunk that is longer than it says": POST + CHUNKED + b"\r\n" + CHUNKS.replace(b"20", b"1f", 1),
    "two hosts": b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n",
    "a user in the target": b"GET http://me@localhost/health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a target that is no path": b"GET health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a tunnel": b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("what", SMUGGLING)
def test_a_request_that_could_be_read_in_two_ways_is_refused_and_ends_the_connection(send, what):
    assert send(SMUGGLING[what] + NEXT) in ([400], [501])


HEADS = (
    b"HEAD /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n" + CHUNKED,
    b"HEAD /health HTTP/1.1\r\nhost: localhost\r\n" + CHUNKED + b"\r\nno number\r\n",
    b"HEAD /health HTTP/1.0\r\n" + CHUNKED,
    b"HEAD health HTTP/1.1\r\nhost: localhost\r\n",
)


def test_a_refusal_of_head_has_no_body_and_is_no_error_of_the_server(server, capfd):
    with running(server.engine) as other:  # whose log is read here
        for head in HEADS:
            with socket.create_connection(other.url.removeprefix("http://").split(":"), timeout=TIMEOUT) as client:
                client.sendall(head + b"\r\n")
                answer = b"".join(iter(lambda client=client: client.recv(1 << 16), b""))
            assert answer.startswith(b"HTTP/1.1 400 ") and answer.partition(b"\r\n\r\n")[2] == b"", head
    assert "Traceback" not in capfd.readouterr().err


CLEAR = {
    "a length": POST + LENGTH + b"\r\n" + BODY,
    "the same length twice": POST + LENGTH + LENGTH + b"\r\n" + BODY,
    "a list of the same length": POST + b"content-length: %d, %d\r\n\r\n" % (len(BODY), len(BODY)) + BODY,
    "chunks": POST + CHUNKED + b"\r\n" + CHUNKS,
    "chunks with extensions and trailers": POST + CHUNKED + b"\r\n" + b"20;a=b\r\n%b\r\n0;c\r\nx: y\r\n\r\n" % BODY,
    "a folded line": POST + b"transfer-encoding:\r\n chunked\r\n\r\n" + CHUNKS,
    "bare line feeds": (POST + LENGTH + b"\r\n").replace(b"\r\n", b"\n") + BODY,
}


@pytest.mark.parametrize("what", CLEAR)
def test_a_request_whose_end_is_certain_is_answered_and_so_is_the_next_one(send, what):
    assert send(CLEAR[what] + NEXT) == [200, 404]


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        (b"http://localhost/v1/models?x=1", b"rebound.example", 200),
        (b"HTTP://LOCALHOST:1/v1/models", b"rebound.example", 200),
        (b"https://localhost/v1/models", b"localhost", 200),
        (b"http://localhost", b"localhost", 200),
        (b"http://localhost?x=1", b"localhost", 200),
        (b"http://rebound.example/v1/models", b"localhost", 421),
        (b"/v1/models", b"localhost:80@rebound.example", 421),
    ],
)
def test_the_host_in_a_target_counts_and_the_header_does_not(send, target, host, status):
    assert send(b"GET %b HTTP/1.1\r\nhost: %b\r\n\r\n" % (target, host) + NEXT) == [status] + [404] * (status == 200)


def test_headers_that_are_too_large_are_named(send, server):
    line = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * (limits.MAX_HEAD - 100)
    assert send(line + b"\r\n\r\n" + NEXT) == [200, 404]
    assert send(line + b"a" * (100 + limits.READ)) == [431]

    async def words() -> bytes:
        reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
        writer.write(line + b"a" * (100 + limits.READ))
        return await reader.readuntil(b"}}")

    assert b"the headers exceed the limit of 65,536 bytes" in asyncio.run(words())


# ---- methods


def paths(http, method: str) -> list[str]:
    described = http.get("/openapi.json").json()["paths"]
    return [
        path.replace("{name}", "small-random").replace("{version}", "1")
        for path in described
        if method in described[path]
    ]


def test_head_is_answered_as_get_without_a_body(http):
    for path in (*paths(http, "get"), "/", "/engine/script.js", "/openapi.json"):
        head, get = http.head(path), http.get(path)
        assert (head.status_code, head.content) == (get.status_code, b"") == (200, b""), path
        kept = [{name: each.headers[name] for name in each.headers} for each in (head, get)]
        for headers in kept:
            for varies in (
                "x-request-id",
                "date",
                *(("content-length",) if path in ("/engine/state", "/v1/metrics", "/metrics") else ()),
            ):
                assert headers.pop(varies)
        assert kept[0] == kept[1], path
    assert http.head("/v1/nothing").status_code == 404
    assert http.head("/v1/models/none").status_code == 404


def test_a_path_says_which_methods_it_has(http):
    get, post = set(paths(http, "get")), set(paths(http, "post"))
    assert len(get) > 15 and len(post) > 9
    for path in get | post:
        allow = {"OPTIONS"} | ({"GET", "HEAD"} if path in get else set()) | ({"POST"} if path in post else set())
        options, wrong = http.options(path), http.delete(path)
        assert (options.status_code, wrong.status_code) == (204, 405), path
        assert set(options.headers["allow"].split(", ")) == set(wrong.headers["allow"].split(", ")) == allow, path
        if path not in get:
            assert (http.get(path).status_code, http.head(path).status_code) == (405, 405), path
    assert http.options("/v1/nothing").status_code == 404


def test_the_methods_of_the_server_as_a_whole(send):
    assert send(b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n" + NEXT) == [204, 404]
