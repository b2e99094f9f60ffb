"""Servers to measure: which may be, what they serve, and how to ask them.  Lesson 99.

Our own server and vLLM generate exactly as many tokens as asked and return their ids. Others know only OpenAI's fields:
a first request finds out what they take, and their tokens are counted by the usage that ends a stream, or by events.
"""

import http.client
import ipaddress
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from minillm.errors import ConfigError, Unreachable

from . import generators
from .clients import Target
from .generators import LoadError
from .serve_bench import ServeBench
from .workloads import BenchRequest

CARD_TIMEOUT = 10  # seconds for the list of models
PROBE_TIMEOUT = 120  # seconds for a short answer
VOCABULARY = 4096  # token ids to draw from where the server does not say how many it has: every model has as many
# What to ask for, from the most exact measurement to the plainest request.
FORMS: tuple[dict[str, bool], ...] = (
    {"extensions": True, "usage": True},
    {"extensions": False, "usage": True},
    {"extensions": True, "usage": True, "text": True},
    {"extensions": False, "usage": True, "text": True},
    {"extensions": False, "usage": False, "text": True},
)


@dataclass(frozen=True)
class Server:
    """A server to measure: how to ask it, and what its list of models says."""

    target: Target
    engine: str
    vocab_size: int
    dtype: str | None


def find(url: str, settings: ServeBench) -> Server:
    """Look up a server's model and find out how to ask it. Raises ConfigError, Unreachable or LoadError."""
    base = address(url, allow_remote=settings.allow_remote)
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    card = _card(base, headers, settings.model)
    target = Target(base, card["id"], settings.temperature, headers, sampling=settings.sampling or {})
    vocabulary = settings.vocab_size or card.get("vocab_size") or VOCABULARY
    ours = card.get("owned_by") == "minillm" or "vocab_size" in card
    engine = "minillm serve" if ours else card.get("owned_by") or urlsplit(base).netloc
    return Server(target if ours else _probe(target, vocabulary), engine, vocabulary, card.get("dtype"))


def address(url: str, *, allow_remote: bool = False) -> str:
    """Return the URL without /v1. Raises ConfigError unless it names this machine or other machines are allowed."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if parts.username or parts.password:
        raise ConfigError("the URL has a user name or password: pass a key as api_key instead")
    if allow_remote:
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"{url!r} is no server's URL: it begins with http:// or https:// and a host")
    elif parts.scheme != "http" or not local:
        raise ConfigError(
            f"the load generator sends only to this machine (http://127.0.0.1:PORT), not to {url!r}; "
            "if you may load that server, allow it with allow_remote (--allow-remote)"
        )
    return url.rstrip("/").removesuffix("/v1")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirection is an error: it could lead to another machine, and the key with it."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _card(base: str, headers: Mapping[str, str], model: str | None) -> dict[str, Any]:
    """Return the model of this name in the server's list, or the first one. Raises Unreachable or LoadError."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
    request = urllib.request.Request(f"{base}/v1/models", headers=dict(headers))
    try:
        with direct.open(request, timeout=CARD_TIMEOUT) as answer:
            cards = json.load(answer)["data"]
            listed = {card["id"]: card for card in cards}
            return listed[cards[0]["id"]] if model is None else listed.get(model, {"id": model})
    except urllib.error.HTTPError as error:
        error.close()
        if model is not None and error.code == 404:  # a server without a list
            return {"id": model}
        raise LoadError(f"{base}/v1/models answered with status {error.code}") from None
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"no server answers at {base} ({error}): start one with `minillm serve`") from None
    except (ValueError, LookupError, TypeError):
        raise LoadError(f"{base}/v1/models did not answer with a list of models: name one with model") from None


def _probe(target: Target, vocabulary: int) -> Target:
    """Return the most exact form of a request that the server takes. Raises LoadError."""
    request = BenchRequest([index % vocabulary for index in range(10, 18)], 4)
    problems = []
    for form in FORMS:
        tried = replace(target, **form, exact=False)  # type: ignore[arg-type]  # all fields of `form` are bools
        (seen,), _ = generators.run(tried, [request], 1, timeout=PROBE_TIMEOUT)
        if seen.error is None and not seen.refused:
            return replace(tried, exact=seen.counted == "ids" and tried.extensions)
        problems.append(seen.error or "status 429")
    raise LoadError(f"{target.base} answers no request for a completion; the last with: {problems[-1]}")
