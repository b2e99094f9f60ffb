"""Malformed and heavy bodies."""

import asyncio
import json
import random
import sys
import time

from .clients import (
    MEGABYTE,
    Bystanders,
    answer,
    case,
    chat,
    completion,
    head,
    post,
    raw,
    serving,
)

BODIES = {
    "alone": lambda: completion(),
    "stop, 8 million ones, 16 MB": lambda: completion(stop=[1] * 8_000_000),
    "stop, 1 MB": lambda: completion(stop=[1] * 500_000),
    "2,000 messages of 2,000 ones, 8 MB": lambda: chat([{"role": "user", "content": [1] * 2000}] * 2000),
    "a million unknown fields, 15 MB": lambda: completion(**{f"x{i}": 1 for i in range(1_100_000)}),
    "unknown fields, 1 MB": lambda: completion(**{f"x{i}": 1 for i in range(90_000)}),
    "logit_bias, 1 MB": lambda: completion(logit_bias={str(i): "x" for i in range(90_000)}),
    "stop_token_ids, 1 MB": lambda: completion(stop_token_ids=["x"] * 250_000),
    "prompt of empty lists, 15 MB": lambda: completion(prompt=[[]] * 5_000_000),
    "prompt of empty lists, 2 MB": lambda: completion(prompt=[[]] * 650_000),
    "prompt of ones, 2 MB": lambda: completion(prompt=[1] * 1_000_000),
    "spaces, 15 MB": lambda: raw(" " * (15 * MEGABYTE)),
    "spaces, 2 MB": lambda: raw(" " * (2 * MEGABYTE)),
    "escapes, 2 MB": lambda: raw('{"prompt":"' + '\\"' * MEGABYTE + '"}'),
    "a text, 200 kB": lambda: completion(prompt="word " * 40_000),
    "a field's name, 60 kB": lambda: completion(**{"x" * 60_000: 1}),
    "n=128 with 50,000 biases, 0.5 MB": lambda: completion(n=128, logit_bias={str(i): 1 for i in range(50_000)}),
    "n=128 with 1,024 biases": lambda: completion(n=128, logit_bias={str(i): 1 for i in range(3072, 4096)}),
    "2,048 choices with 1,024 biases of unknown tokens": lambda: completion(
        prompt=["a"] * 10, n=128, logit_bias={str(i): 1 for i in range(4096, 5120)}
    ),
}


@case
async def bodies() -> dict:
    """Malformed and heavy bodies, one at a time."""
    found = {}
    for name, make in BODIES.items():
        async with serving() as server:
            path, content = make()
            async with Bystanders(server) as others:
                status, body, seconds = await post(server.port, path, content)
            found[name] = {"status": status, "seconds": round(seconds, 3), "answer_bytes": len(body)} | others.report()
        print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    return found


@case
async def chunks() -> dict:
    """2 MB in one-byte chunks."""
    async with serving() as server, Bystanders(server) as others:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        start = time.perf_counter()
        writer.write(head("/v1/completions")[:-2] + b"transfer-encoding: chunked\r\n\r\n")
        writer.write(b"1\r\n \r\n" * (2 * MEGABYTE // 6) + b"0\r\n\r\n")
        status, _ = await answer(reader)
        return {"status": status, "seconds": round(time.perf_counter() - start, 3)} | others.report()


# ---- thousands of malformed requests

FIELDS = (
    "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "logit_bias", "logprobs",
    "stream", "stream_options", "stop_token_ids", "priority", "cache_salt", "echo", "best_of", "suffix", "user",
    "presence_penalty", "repetition_penalty", "model", "messages", "response_format", "ignore_eos",
)  # fmt: skip
WRONG = (
    None, True, -1, 0, 1.5, 10**400, -(10**30), "x", "", "\ud800", [], [[]], [None], {}, {"x": 1}, [1, "x"], [-1],
    "y" * 5000, [2**70], {"1": "x"}, {"-1": 1}, float("inf"),
)  # fmt: skip
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
HEAVY = 50  # one request in so many is one of BODIES


def malformed_request(chance: random.Random) -> bytes:
    """A whole HTTP request that is wrong in some way, or by accident in none."""
    path = chance.choice(PATHS)
    content = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    content["max_tokens"] = 1
    for _ in range(chance.randint(1, 4)):
        content[chance.choice(FIELDS)] = chance.choice(WRONG)
    if chance.randrange(10) == 0:
        content |= {f"x{chance.randrange(10**6)}": 1}
    body = json.dumps(content).encode("utf-8", "surrogatepass")
    kind = chance.randrange(8)
    if kind == 0:
        body = body[: chance.randrange(len(body))]
    elif kind == 1:
        at = chance.randrange(len(body))
        body = body[:at] + chance.randbytes(chance.randint(1, 20)) + body[at:]
    elif kind == 2:
        body = b"[" * chance.randint(1, 5000)
    elif kind == 3:
        return head(path, len(body), method=chance.choice(("GET", "PUT", "DELETE", "BREW"))) + body
    elif kind == 4:
        return head(path + chance.choice(("/x", "?a=1", "%00", "/../..")), len(body)) + body
    return head(path, len(body)) + body


async def exchange(port: int, data: bytes) -> int:
    """The status of the response; 0: the connection closed without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=64 * MEGABYTE)
    try:
        writer.write(data)
        async with asyncio.timeout(60):
            return int((await reader.readuntil(b"\r\n\r\n")).split()[1])
    except (OSError, asyncio.IncompleteReadError):
        return 0
    finally:
        writer.transport.abort()


@case
async def malformed(count: int = 2000, at_once: int = 8, seed: int = 0) -> dict:
    """Thousands of malformed requests, a few of them as large as the server accepts, by several clients at once."""
    chance = random.Random(seed)
    made = [make() for name, make in BODIES.items() if name != "alone"]  # now: it would hold up the bystanders
    heavy = [head(path, len(body)) + body for path, body in made]
    statuses: dict[int, int] = {}
    async with serving() as server:
        settled = server.memory()
        left = iter(range(count))

        async def client() -> None:
            for number in left:
                if number % HEAVY == HEAVY - 1:
                    data = chance.choice(heavy)
                else:
                    data = malformed_request(chance)
                status = await exchange(server.port, data)
                statuses[status] = statuses.get(status, 0) + 1

        start = time.perf_counter()
        async with Bystanders(server) as others:
            await asyncio.gather(*(client() for _ in range(at_once)))
        took = time.perf_counter() - start
        report = others.report()
        again, *_ = await post(server.port, *completion())
        return {
            "requests": count,
            "statuses": {str(status): statuses[status] for status in sorted(statuses)},
            "server_errors": sum(number for status, number in statuses.items() if status >= 500),
            "took_s": round(took, 1),
            "memory_at_start": settled,
            "answers_again": again,
            "tracebacks": server.tracebacks(),
        } | report
