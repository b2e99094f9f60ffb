"""Fixed limits on client input: counts, bytes, and seconds. `config` has those to set.  Lesson 99.

Every loop over client input is bounded by one of these limits, so that one request cannot delay the others for long.
"""

import math

# ---- values in a request
MAX_PROMPTS = 2048
MAX_CHOICES = 2048  # in one request: n for each prompt
MAX_MESSAGES = 2048
MAX_PARTS = 2048  # in one message
MAX_ROLE = 64  # characters
MAX_STOPS = 16  # stop strings: each new token's text is searched for each of them; OpenAI allows 4
MAX_STOP_LENGTH = 256  # characters
MAX_STOP_TOKENS = 64  # the engine's table of them is as wide as the longest list; vLLM allows 128
MAX_BIASES = 1024  # vLLM's limit (MAX_NUM_LOGIT_BIAS_TOKENS); OpenAI documents none
MAX_SALT = 1024  # characters; the salt is hashed once per choice
MAX_ADAPTER_NAME = 1024  # characters, of its name and of its directory
MAX_LOADS = 8  # adapters that wait to be loaded, or are
MAX_METADATA = 16  # key-value pairs, as in OpenAI's API
MAX_VALUES = 16_384  # JSON values in a body, without numbers in lists; 2,048 messages of one part each need 12,290
MAX_DEPTH = 32  # levels of nested lists and objects

# ---- bytes
MAX_TOKENS = 1 << 20  # token ids in all prompts of a request; more only if a single prompt may be longer
PROMPTS_AT_ONCE = 64  # full-length prompts that fit in one request, up to MAX_TOKENS
TOKEN_BYTES = 24  # per token of a body: an id and its separator take up to 12; four characters, all escaped, take 24
MIN_BODY, MAX_BODY = 1 << 20, 16 << 20
MAX_HEAD = 64 << 10  # bytes of a request's line and headers
FREE_BODY = 16 << 10  # bytes; a body up to this size does not count toward MAX_HELD and is decoded without a thread
MAX_HELD = 64 << 20  # bytes in a worker of all bodies not decoded yet, each without its first FREE_BODY bytes
READ = 16 << 10  # bytes per read: parsing many tiny chunks at once would delay other connections
SWITCH_INTERVAL = 0.001  # seconds until a thread that decodes or tokenizes releases the GIL to the event loop

# ---- connections
RESERVED_FILES = 32  # file descriptors of a worker not available to client connections
HEAD_START = 10  # milliseconds that a worker with more connections than another leaves it to accept the next
ACCEPT_RETRY = 1  # seconds to wait after accept() fails
FIRST_PROBE, PROBE = 0.1, 1.0  # seconds until a client that sends no more is asked for signs of life, and between two
HEALTH = 5  # seconds for the engine's process to answer that it is well
LOADED_SOON = 5  # seconds after which a client may try again to load an adapter, while too many wait
MAX_RETRY_AFTER = 60  # seconds that a client is asked to wait at most before it tries again
BEAT = 1.0  # seconds between two reports of a process to its owner
RELINK = 0.1  # seconds until a worker that has lost its engine asks for another connection
FLUSH = 1  # seconds after the grace period for the errors of aborted requests to reach their clients


def max_tokens(max_request_len: int) -> int:
    """Return the most token ids in one request if prompt and output together have at most `max_request_len` tokens."""
    return max(max_request_len, min(MAX_TOKENS, PROMPTS_AT_ONCE * max_request_len))


def max_body(max_request_len: int) -> int:
    """Return the most bytes in a body: enough for `max_tokens` tokens, from MIN_BODY to MAX_BODY."""
    return min(MAX_BODY, max(MIN_BODY, TOKEN_BYTES * max_tokens(max_request_len)))


def retry_after(seconds: float | None) -> int:
    """Return the whole seconds of a Retry-After header."""
    return 1 if seconds is None else min(max(math.ceil(seconds), 1), MAX_RETRY_AFTER)
