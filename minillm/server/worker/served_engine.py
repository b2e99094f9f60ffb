"""Define `ServedEngine`: all that the HTTP side uses of an engine, wherever it runs.  Lesson 99.

`RemoteEngine` is an engine behind a socket, for HTTP workers; `LocalServedEngine` is one of this process.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

from minillm.request import Delta, RequestOptions, SamplingParams
from minillm.tokenizer import Tokenizer

from ..wire import EngineFacts, Question
from .choice import Choice, Prompt

Answer = TypeVar("Answer")


class ServedEngine(Protocol):
    """An engine that `create_app` can serve. tokenizer: None if text is encoded and decoded elsewhere or not at all."""

    facts: EngineFacts
    tokenizer: Tokenizer | None

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        n: int = 1,
        options: RequestOptions = RequestOptions(),
        partly: bool = False,
    ) -> AsyncGenerator[tuple[Choice, Delta]]:
        """Run n choices of each prompt: see `EngineClient.stream`."""

    async def ask(self, question: Question[Answer]) -> Answer:
        """Answer a question about the engine. Raises EngineError or InvalidRequest."""

    def until_given_up(self) -> AbstractAsyncContextManager[None]:
        """Return a block that is interrupted with ShuttingDown when the server's grace period is over."""
