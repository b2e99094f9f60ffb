"""Log each HTTP request, and keep which client sent it.  Lesson 99."""

import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from minillm.request import Completion

log = logging.getLogger(__name__)


@dataclass
class Access:
    """One request. Neither a prompt nor an answer is part of it: logs are read by people whom these may not concern."""

    request_id: str = ""
    client: str = ""  # an address, or what a trusted proxy said
    method: str = ""
    path: str = ""
    begun: float = field(default_factory=time.perf_counter)
    status: int | None = None
    first_token: float | None = None  # seconds
    error: str | None = None  # its code
    failed: int | None = None  # the status of an error that came after another one was sent
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Return the seconds since the request began."""
        return time.perf_counter() - self.begun

    def ended(self, done: Completion, first: bool) -> None:
        """A choice has ended, or was aborted after some of its tokens. first: it is the first of its prompt."""
        self.prompt_tokens += len(done.prompt_token_ids) if first else 0
        self.output_tokens += len(done.token_ids)
        if (reason := done.finish_reason) is not None:
            self.finish_reasons[reason] = self.finish_reasons.get(reason, 0) + 1

    def write(self) -> None:
        """Write the request to the log, now that it is over."""
        if not log.isEnabledFor(logging.INFO):
            return
        took, status = self.seconds, self.status or 499
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "client": self.client,
            "method": self.method,
            "path": self.path,
            "status": status,
            "seconds": round(took, 6),
        }
        if self.first_token is not None:
            fields["first_token_seconds"] = round(self.first_token, 6)
        if self.prompt_tokens:  # the engine has taken it
            fields |= {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}
        if self.finish_reasons:
            fields["finish_reasons"] = self.finish_reasons
        if self.error is not None:
            fields["error"] = self.error
        path = ascii(self.path)[1:-1]  # a line break in it would begin a line of the client's own
        log.info("%s %s %s in %.3f s", self.method, path, status, took, extra={"fields": fields})


CURRENT: ContextVar[Access | None] = ContextVar("access", default=None)
