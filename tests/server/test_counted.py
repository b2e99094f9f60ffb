"""Every response is counted, once, by the status that its request came to."""

import asyncio
import json
from collections import Counter

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import minillm
from minillm.server.worker.scrape import REFUSED, Counted, Scrape, text_of
from tests.server.in_process import JSON, worker_here
from tests.waiting import TIMEOUT, async_wait_until, paused_steps

KEY = "a-key-of-tests"
ALLOWED = {"authorization": f"Bearer {KEY}"}
BODY = {"prompt": "The river", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
POST = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n".encode()


async def raw(port: int, *pieces: bytes) -> int:
    """Send bytes as they are; the status of the answer, after which the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0)
    line = await reader.readline()
    writer.close()
    return int(line.split()[1])


async def counts(port: int) -> Counter[int]:
    """The responses by status, as a scrape has them, which is not counted itself."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT) as client:
        families = text_string_to_metric_families((await client.get("/metrics")).text)
    (family,) = [each for each in families if each.name == "minillm_http_requests"]
    assert all(set(sample.labels) == {"status"} for sample in family.samples), "a client can add no other label"
    return Counter({int(sample.labels["status"]): int(sample.value) for sample in family.samples})


def test_every_status_is_counted_once(engine):
    async def work() -> None:
        async with worker_here(engine, api_key=KEY, header_timeout=1.0) as (port, _):
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT) as client:
                url = "/v1/completions"
                sent = [
                    await client.get("/version"),  # 401
                    await client.get("/version", headers=ALLOWED),
                    await client.head("/health"),
                    await client.get("/nowhere/at/all", headers=ALLOWED),
                    await client.request("BREW", url, headers=ALLOWED),
                    await client.options(url),
                    await client.get("/version", headers=ALLOWED | {"host": "elsewhere.example"}),  # 421
                    await client.post(url, json=BODY, headers=ALLOWED),
                    await client.post(url, json=BODY | {"stream": True}, headers=ALLOWED),
                    await client.post(url, json=BODY | {"max_tokens": 0}, headers=ALLOWED),
                    await client.post(url, content=b"{", headers=ALLOWED | JSON),
                    await client.post(url, content=b"{}", headers=ALLOWED | {"content-type": "text/html"}),
                    await client.post(url, content=b"{}", headers=ALLOWED | JSON | {"content-encoding": "gzip"}),
                    await client.post("/v2/models/unknown/infer", json={}, headers=ALLOWED),
                    await client.get("/ping"),
                ]
            found = [each.status_code for each in sent]
            found += [
                await raw(port, b"HELLO\r\n\r\n"),
                await raw(port, b"GET / HTTP/9.9\r\n\r\n"),
                await raw(port, b"GET /version HTTP/1.1\r\nx: " + b"y" * (1 << 17) + b"\r\n\r\n"),
                await raw(port, POST + b"content-type: application/json\r\ncontent-length: 999999999\r\n\r\n"),
                await raw(port, b"GET /version HTTP/1.1\r\n"),  # and nothing more
            ]
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT) as client:
                with minillm.using(linear=lambda x, weight: 1 / 0):
                    found.append((await client.post(url, json=BODY, headers=ALLOWED)).status_code)
            assert await counts(port) == Counter(found)
            assert {200, 400, 401, 404, 405, 408, 413, 421, 500} <= set(found)

    asyncio.run(work())


def test_a_body_that_is_broken_off_is_counted_once(engine):
    """The connection refuses it while the application waits for it, and finds the client gone."""

    async def work() -> None:
        async with worker_here(engine, api_key=KEY) as (port, _):
            head = POST + b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
            assert await raw(port, head, b"zz\r\n") == 400
            assert await counts(port) == {400: 1}

    asyncio.run(work())


def test_a_client_that_leaves_counts_by_what_it_was_sent(engine):
    """Nothing: 499, as nginx has it. The begin of a stream: 200."""

    async def work(resume) -> None:
        async with worker_here(engine) as (port, hub), asyncio.timeout(TIMEOUT):
            scrapes, found = 0, Counter[int]()  # the scrapes are counted too
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT) as client:
                body = BODY | {"max_tokens": 99}
                async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                    await anext(response.aiter_lines())
                    asking = asyncio.ensure_future(client.post("/v1/completions", json=body))
                    await async_wait_until(lambda: hub.running == 2)
                    asking.cancel()
                    await asyncio.wait([asking])
                    while found[499] == 0:  # or else its answer might be complete before the server knows that it left
                        found, scrapes = await counts(port), scrapes + 1
            resume.set()
            await async_wait_until(lambda: not hub.running)
            while found.total() < 2 + (scrapes - 1):
                found, scrapes = await counts(port), scrapes + 1
            assert found == {200: 1 + (scrapes - 1), 499: 1}

    with paused_steps(free=3) as resume:
        asyncio.run(work(resume))


@pytest.mark.parametrize("path", ["/v1/completions", "/v2/models/{name}/generate_stream"])
def test_a_stream_that_breaks_counts_as_its_error(engine, path):
    async def work(resume) -> None:
        async with worker_here(engine) as (port, hub):
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT) as client:
                body = BODY | {"stream": True, "max_tokens": 200}
                if "v2" in path:
                    body = {"text_input": body.pop("prompt"), **body}
                where = path.format(name="here")
                async with client.stream("POST", where, json=body) as response:
                    assert response.status_code == 200
                    lines = response.aiter_lines()
                    await anext(lines)
                    with minillm.using(linear=lambda x, weight: 1 / 0):
                        resume.set()
                        rest = [line async for line in lines if line]
            assert any("division by zero" in json.dumps(line) for line in rest)
            assert await counts(port) == {500: 1}

    with paused_steps(free=3) as resume:
        asyncio.run(work(resume))


# ---- the parts


def outcome(app, *, refused: bool = False) -> list[int]:
    """What is counted of a request to an ASGI application."""
    found: list[int] = []

    async def send(message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            assert len(found) == (not refused), "a client that has its answer may ask for the count"

    scope = {"type": "http"} | ({REFUSED: True} if refused else {})
    try:
        asyncio.run(Counted(app, found.append)(scope, None, send))
    except ArithmeticError:
        found.append(-1)
    return found


def test_a_response_is_counted_before_its_last_byte_or_when_it_has_failed():
    async def whole(scope, receive, send):
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body", "more_body": True})
        await send({"type": "http.response.body"})
        await send({"type": "http.response.body"})

    async def nothing(scope, receive, send): ...

    async def begun(scope, receive, send):
        await send({"type": "http.response.start", "status": 206})

    async def fails(scope, receive, send):
        await begun(scope, receive, send)
        raise ArithmeticError

    assert [outcome(app) for app in (whole, nothing, begun, fails)] == [[204], [499], [206], [500, -1]]
    assert outcome(whole, refused=True) == []


def test_neither_an_engine_nor_an_owner_that_is_stuck_keeps_a_scrape_waiting(monkeypatch):
    """The counts of an engine that does not answer are those that its owner has heard of."""

    def wait(seconds) -> None:
        monkeypatch.setattr("minillm.server.worker.scrape.HEALTH", seconds)

    class Stuck:
        async def ask(self, what):
            try:
                await asyncio.Event().wait()
            finally:
                wait(patience)

    class Owner:
        def send(self, message):
            asked.append(message["id"])
            for number in asked if patience == TIMEOUT else ():
                scrape.received(number, [["a", "counter", "b", [["a_total", {}, 7]]]])

    asked: list[int] = []
    scrape = Scrape([Stuck()], Owner())
    for patience in (0.01, TIMEOUT):
        wait(0.01)
        if patience == TIMEOUT:
            assert {"a_total 7.0", "minillm_engine_up 0.0"} <= set(asyncio.run(scrape.render()).decode().splitlines())
        else:
            with pytest.raises(minillm.MinillmError, match="does not answer"):
                asyncio.run(scrape.render())
    assert text_of([]) == b""
