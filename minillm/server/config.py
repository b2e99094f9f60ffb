"""The server's options.  Lesson 99."""

import hashlib
import re
from dataclasses import dataclass, fields
from typing import Any, cast

from minillm.config import EngineOptions, Options, option, with_field_help
from minillm.errors import ConfigError
from minillm.values import shown

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")  # uvicorn's
KEY = re.compile(r"[\x21-\x7e]{8,512}")


class ServerOptions(EngineOptions, total=False):
    """The keyword arguments of `serve` and `running`: the fields of `ServerConfig` and those of `EngineConfig`."""

    log_level: str
    log_format: str
    workers: int
    max_queued: int
    max_wait: float | None
    max_per_client: int | None
    client_header: str | None
    allowed_hosts: str | None
    cors_origins: str | None
    queue_timeout: float | None
    first_token_timeout: float | None
    request_timeout: float | None
    header_timeout: float
    body_timeout: float
    write_timeout: float
    keep_alive_timeout: float
    shutdown_grace: float
    api_key: str | None
    enable_prompt_embeds: bool
    hang_timeout: float
    load_timeout: float
    adapter_folder: str | None
    max_adapters: int


@dataclass(frozen=True)
class ServerConfig(Options):
    """Says how a server treats its clients."""

    log_level: str = option("info", ", ".join(LOG_LEVELS[:-1]) + f" or {LOG_LEVELS[-1]}", choices=LOG_LEVELS)
    log_format: str = option(
        "text",
        "as text, or as json: each message is a line of JSON, and so is each request, with its id, client, status, "
        "tokens and times, but never with its text",
        choices=("text", "json"),
    )
    workers: int = option(1, "processes that handle HTTP and tokenize", least=1)
    max_queued: int = option(1024, "requests that may wait; further ones are answered with 429", least=0)
    max_wait: float | None = option(
        60.0, "seconds that a request may have to wait, by estimate; longer: 429; 0: no limit", from_=0
    )
    max_per_client: int | None = option(
        None, "choices that one client (an IP address) may have running or waiting; further ones: 429", least=1
    )
    client_header: str | None = option(
        None,
        "the header in which a trusted proxy names the client, such as x-forwarded-for; of a list, the last one counts",
    )
    allowed_hosts: str | None = option(
        None,
        "the server's names, separated by commas; a request for another host is refused. Default: this machine's own "
        "names if the server listens only there (or else a web page could reach it through a name of its own), and "
        "any name otherwise; * is any",
    )
    cors_origins: str | None = option(
        None,
        "origins whose web pages may use the server from a browser, separated by commas, such as "
        "http://localhost:3000; * is any. Default: none but the server's own page",
    )
    queue_timeout: float | None = option(
        None, "seconds that a request may actually wait before it runs; longer: 429  [default: no limit]", above=0
    )
    first_token_timeout: float | None = option(
        None, "seconds until a request must have its first token, or it is aborted  [default: no limit]", above=0
    )
    request_timeout: float | None = option(
        None, "seconds until a request must be complete, or it is aborted  [default: no limit]", above=0
    )
    header_timeout: float = option(
        10.0,
        "seconds from a connection's start, or a later request's first byte, until the headers are complete",
        above=0,
    )
    body_timeout: float = option(60.0, "seconds from the end of the headers until the body is complete", above=0)
    write_timeout: float = option(
        60.0, "seconds in which a client reads nothing of what waits for it, after which it is disconnected", above=0
    )
    keep_alive_timeout: float = option(
        20.0, "seconds until an idle connection is closed; best longer than clients keep theirs", above=0
    )
    shutdown_grace: float = option(
        5.0, "seconds that running requests have to finish when the server stops; 0 aborts them at once", from_=0
    )
    api_key: str | None = option(
        None, "a key that clients have to send, except for health and metrics", envvar="MINILLM_API_KEY"
    )
    enable_prompt_embeds: bool = option(
        False,
        "accept prompt_embeds in /v1/completions: embeddings instead of tokens, as a tensor that torch.save wrote",
    )
    hang_timeout: float = option(
        300.0,  # a large model's long prompt may take a minute on a CPU
        "seconds in the same step, or without a sign of life, after which the engine is ended and started anew; so is "
        "an HTTP worker that shows no sign of life",
        above=0,
    )
    load_timeout: float = option(
        1800.0,  # a model of hundreds of gigabytes, quantized while it loads from a slow disk
        "seconds from the engine's start until it must have loaded the model, or it is ended and started anew",
        above=0,
    )
    adapter_folder: str | None = option(
        None,
        "a folder whose directories clients may load as adapters while the server runs, at /v1/load_lora_adapter; "
        "default: they may load none. LoRA also takes --max-loras. Not with --replicas",
    )
    max_adapters: int = option(
        64,
        "adapters that may be loaded, with those given at the start; clients can load no more, until one is unloaded. "
        "Each is kept in this machine's memory",
        least=1,
    )


ServerConfig.__doc__ = with_field_help(ServerConfig.__doc__, ServerConfig)


def split(options: ServerOptions, **defaults: Any) -> tuple[ServerConfig, EngineOptions]:
    """Return the server's options, checked, and the engine's. Raises ConfigError."""
    names = {field.name for field in fields(ServerConfig)}
    ours = {name: value for name, value in options.items() if name in names}
    engine = {name: value for name, value in options.items() if name not in names}
    return ServerConfig(**defaults | ours), cast(EngineOptions, engine)


def digest(key: str | None) -> str | None:
    """Return what workers know of the key. Raises ConfigError if clients could not send it or it is too short."""
    if key is None:
        return None
    if not isinstance(key, str) or not KEY.fullmatch(key):
        length = f" of {len(key)} characters" if isinstance(key, str) else f", {shown(key)}"
        raise ConfigError(f"api_key must be 8 to 512 printable ASCII characters without spaces, not one{length}")
    return hashlib.sha256(key.encode()).hexdigest()
