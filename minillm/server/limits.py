"""What a client may ask of a worker: counts, bytes and seconds.  Lesson 99.

Every loop over what a client sent is bounded by one of these, so that one request costs the others milliseconds.
"""

import math
from dataclasses import dataclass, fields

from minillm.errors import ConfigError
from minillm.values import shown

# ---- values of a request
MAX_PROMPTS = 2048
MAX_N = 128
MAX_CHOICES = 2048  # of one request, n of each prompt
MAX_MESSAGES = 2048
MAX_PARTS = 2048  # of one message
MAX_ROLE = 64  # characters
MAX_STOPS = 16  # stop strings: each is looked for in the text of each new token; OpenAI takes 4
MAX_STOP_LENGTH = 256  # characters
MAX_STOP_TOKENS = 64  # the engine's table of them is as wide as the longest list; vLLM takes 128
MAX_BIASES = 1024  # vLLM's limit (MAX_NUM_LOGIT_BIAS_TOKENS); OpenAI names none
MAX_SALT = 1024  # characters: it is hashed for each choice
MAX_METADATA = 16  # OpenAI's limit of key-value pairs
MAX_VALUES = 16_384  # JSON values of a body, the numbers in lists apart: 2,048 messages of a part each have 12,290
MAX_DEPTH = 32  # JSON values inside one another

# ---- bytes
MAX_TOKENS = 1 << 20  # token ids of all prompts of a request; more only where one prompt may be longer
PROMPTS_AT_ONCE = 64  # prompts of full length that a request has room for, below MAX_TOKENS
TOKEN_BYTES = 24  # of a body: an id takes at most 12, with its comma; text four characters of six bytes, all escaped
MIN_BODY, MAX_BODY = 1 << 20, 16 << 20
FREE_BODY = 16 << 10  # bytes of each body that do not count for MAX_HELD, and that are decoded without a thread
MAX_HELD = 64 << 20  # bytes that bodies may hold in a worker, those together that are not decoded yet
READ = 16 << 10  # bytes read at once: chunks of one byte cost 2.5 microseconds a byte to take apart
SWITCH_INTERVAL = 0.001  # seconds until a thread that decodes or tokenizes leaves the processor to the event loop

# ---- connections
RESERVED_FILES = 32  # file descriptors of a worker that are no client's
ACCEPT_RETRY = 1  # seconds until a connection that the machine refused is tried again
FLUSH = 1  # seconds past the grace for what is given up to reach its clients


def max_tokens(max_request_len: int) -> int:
    """Token ids that one request may bring, where prompt and output have `max_request_len` tokens together."""
    return max(max_request_len, min(MAX_TOKENS, PROMPTS_AT_ONCE * max_request_len))


def max_body(max_request_len: int) -> int:
    """Bytes of the largest body: what as many tokens need that a request may bring, ids or text."""
    return min(MAX_BODY, max(MIN_BODY, TOKEN_BYTES * max_tokens(max_request_len)))


@dataclass(frozen=True)
class Timeouts:
    """Seconds that a worker gives a client, checked here; raises ConfigError.

    header_timeout      from a connection's begin, or a next request's first byte, to the end of the request's headers
    body_timeout        from there to the end of the body
    keep_alive_timeout  of silence after an answer, until the connection is closed
    shutdown_grace      that requests in flight get to finish when the server stops; 0 ends them at once
    """

    header_timeout: float = 10
    body_timeout: float = 60
    keep_alive_timeout: float = 5
    shutdown_grace: float = 5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and field.name != "shutdown_grace"):
                low = "from 0" if field.name == "shutdown_grace" else "above 0"
                raise ConfigError(f"{field.name} must be a number of seconds {low}, not {shown(value)}")
