"""How many choices one client may have in flight, and for which hosts the server takes requests."""

import asyncio

import httpx
import pytest

from minillm.errors import ConfigError
from minillm.server import running
from minillm.server.access import CURRENT
from minillm.server.worker.gate import HEALTH, Gate, hosts
from tests.waiting import TIMEOUT, async_wait_until, idle, paused_steps, wait_until

BODY = {"prompt": "The river", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
SCHEMA = {"response_format": {"type": "json_object"}, "max_tokens": 4, "ignore_eos": False}


@pytest.fixture(scope="module")
def shared(model_directory):
    """Two workers; a client, as the proxy names it, may have two choices in flight."""
    options = {"load_format": "dummy", "device": "cpu", "max_num_seqs": 32, "workers": 2}
    with running(model_directory, max_per_client=2, client_header="X-Forwarded-For", **options) as server:
        yield server


def ask(client, who: str, **more):
    return client.post("/v1/completions", json=BODY | more, headers={"x-forwarded-for": who, "connection": "close"})


def test_a_client_has_so_many_choices_in_all_workers_and_others_have_their_own(shared):
    async def clients(resume):
        async with httpx.AsyncClient(base_url=shared.url, timeout=TIMEOUT) as client:
            taken = []
            for count in (1, 2):
                taken.append(asyncio.create_task(ask(client, "ann", stream=count == 2)))
                await async_wait_until(lambda count=count: shared.hub.running == count)
            for more in ({}, {"n": 2}, {"prompt": ["a", "b"]}, SCHEMA):
                asked = asyncio.create_task(ask(client, "ann", **more))
                await async_wait_until(lambda asked=asked: asked.done() or shared.hub.running > 2)
                assert asked.done(), "it was accepted"
                refused = asked.result()
                assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
                error = refused.json()["error"]
                assert "this client has 2 of at most 2 choices" in error["message"] and error["code"] == "server_busy"
            taken.append(asyncio.create_task(ask(client, "bob", n=2)))
            await async_wait_until(lambda: shared.hub.running == 4)
            assert (await ask(client, "bob")).status_code == 429
            assert (await ask(client, "cid", n=3)).status_code == 429, "more than it may ever have"
            resume.set()
            assert [each.status_code for each in await asyncio.gather(*taken)] == [200] * 3

    with paused_steps() as resume:
        asyncio.run(clients(resume))


@pytest.mark.parametrize("more", [{}, SCHEMA, {"stop": "e"}, {"max_tokens": 10**6}, {"n": 2}], ids=str)
def test_a_choice_that_ended_in_any_way_no_longer_counts(shared, more):
    with httpx.Client(base_url=shared.url, timeout=TIMEOUT) as client:
        for _ in range(3):
            ask(client, "eve", **more)
        wait_until(lambda: shared.hub.running == 0)  # the other worker's message may come first
        assert ask(client, "eve", n=2).status_code == 200
    wait_until(lambda: not any(line._clients for line in shared.hub.lines) and idle(shared.engine))


def test_what_a_client_puts_before_the_proxys_own_words_makes_no_difference(shared):
    async def clients(resume):
        async with httpx.AsyncClient(base_url=shared.url, timeout=TIMEOUT) as client:
            taken = [asyncio.create_task(ask(client, f"1.2.3.{i}, gil")) for i in range(2)]
            await async_wait_until(lambda: shared.hub.running == 2)
            assert (await ask(client, "1.2.3.9, gil")).status_code == 429
            resume.set()
            assert [each.status_code for each in await asyncio.gather(*taken)] == [200] * 2

    with paused_steps() as resume:
        asyncio.run(clients(resume))


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        (["10.0.0.1"], "10.0.0.1"),
        (["1.2.3.4, 10.0.0.1"], "10.0.0.1"),
        (["1.2.3.4", " 5.6.7.8 ,10.0.0.1 "], "10.0.0.1"),
        (["10.0.0.1:5678"], "10.0.0.1"),
        (["[2001:db8::1]:5678"], "2001:db8::1"),
        (["[2001:db8::1]"], "2001:db8::1"),
        (["2001:db8::1"], "2001:db8::1"),
        (['"[2001:db8::1]:5678"'], "2001:db8::1"),
        (["team-7"], "team-7"),
        (["x" * 1000], "x" * 128),
        ([""], "9.9.9.9"),
        (["1.2.3.4,"], "9.9.9.9"),
        ([" , "], "9.9.9.9"),
        ([], "9.9.9.9"),
    ],
    ids=str,
)
def test_the_client_is_the_last_one_that_the_header_names_or_the_connections_other_end(lines, want):
    found = []

    async def app(scope, receive, send):
        found.append(CURRENT.get().client)

    headers = [(b"x-forwarded-for", line.encode()) for line in lines]
    scope = {"type": "http", "method": "GET", "path": "/", "headers": headers, "client": ("9.9.9.9", 1)}
    asyncio.run(Gate(app, None, client_header="X-Forwarded-For")(scope, None, None))
    assert found == [want]


def test_one_that_leaves_makes_room(shared):
    async def clients(resume):
        async with httpx.AsyncClient(base_url=shared.url, timeout=TIMEOUT) as client:
            leaves = asyncio.create_task(ask(client, "fay", n=2))
            await async_wait_until(lambda: shared.hub.running == 2)
            leaves.cancel()
            resume.set()
            await async_wait_until(lambda: shared.hub.running == 0)
            assert (await ask(client, "fay", n=2)).status_code == 200

    with paused_steps() as resume:
        asyncio.run(clients(resume))


# ---- the host


@pytest.mark.parametrize(
    ("allowed", "address", "want"),
    [
        (None, "127.0.0.1", {"localhost", "127.0.0.1", "[::1]"}),
        (None, "127.0.0.9", {"localhost", "127.0.0.1", "127.0.0.9", "[::1]"}),
        (None, "::1", {"localhost", "127.0.0.1", "[::1]"}),
        (None, "0.0.0.0", None),
        (None, "::", None),
        (None, "10.1.2.3", None),
        ("LLM.example.com, localhost", "0.0.0.0", {"llm.example.com", "localhost"}),
        ("a.example", "127.0.0.1", {"a.example"}),
        ("*", "127.0.0.1", None),
        ("a.example.:8000, ::1, [::2]:80", "0.0.0.0", {"a.example", "[::1]", "[::2]"}),
    ],
)
def test_the_hosts_that_a_server_is(allowed, address, want):
    assert hosts(allowed, address) == want


@pytest.mark.parametrize("nothing", ["", " , "])
def test_a_list_of_hosts_without_a_name_is_rejected_before_the_model_loads(nothing):
    with pytest.raises(ConfigError, match="allowed_hosts has no name"), running("no/such/model", allowed_hosts=nothing):
        pass


def test_a_client_cannot_choose_its_address_without_a_trusted_header(server):
    """What a client says of itself counts only in `client_header`, which this server has not."""

    async def clients(resume):
        async with httpx.AsyncClient(base_url=limited.url, timeout=TIMEOUT) as client:
            taken = asyncio.create_task(ask(client, "1.2.3.4"))
            await async_wait_until(lambda: limited.hub.running == 1)
            asked = asyncio.create_task(ask(client, "5.6.7.8"))
            await async_wait_until(lambda: asked.done() or limited.hub.running > 1)
            assert asked.done() and asked.result().status_code == 429
            resume.set()
            assert (await taken).status_code == 200

    with running(server.engine, max_per_client=1) as limited, paused_steps() as resume:
        asyncio.run(clients(resume))


def test_a_request_for_another_host_is_refused_but_health_is_not(server):
    port = server.url.rpartition(":")[2]
    with httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:

        def status(host: str, path: str = "/v1/models") -> int:
            return client.get(path, headers={"host": host}).status_code

        for name in ("localhost", "LOCALHOST.", f"localhost:{port}", "127.0.0.1:1", "[::1]", f"[::1]:{port}"):
            assert status(name) == 200, name
        for name in ("rebound.example", f"rebound.example:{port}", "localhost.example", "", "[::2]:80", "127.0.0.2"):
            assert status(name) == 421, name
            assert {status(name, path) for path in HEALTH} == {200}
            assert {status(name, path) for path in ("/", "/metrics", "/v2/models/x", "/engine/state")} == {421}
        refused = client.post("/v1/completions", json=BODY, headers={"host": "rebound.example"})
    error = refused.json()["error"]
    assert (
        error["code"] == "host_not_allowed" and "'rebound.example': start it with --allowed-hosts" in error["message"]
    )
    assert len(refused.headers["x-request-id"]) == 32
