"""A request as the engine keeps it.  Lesson 10."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from minillm.request import Completion, Delta, Request
from minillm.tokenizer import Tokenizer

from .output_text import OutputText

Listener = Callable[[Delta], None]


@dataclass(eq=False)
class Tracked:
    """The engine's state of a request, in addition to the scheduler's."""

    request: Request
    completion: Completion
    listener: Listener | None = None
    output: OutputText | None = None  # set if text is needed token by token
    wants_text: bool = True  # False: the caller decodes the ids itself
    row: int = -1  # where it was last admitted

    @classmethod
    def of(
        cls, request: Request, tokenizer: Tokenizer | None, listener: Listener | None, wants_text: bool
    ) -> "Tracked":
        """Return a request that arrives now; arguments as those of `Engine.prepare`."""
        params = request.params
        done = Completion(request.request_id, request.prompt.tolist(), arrival_time=time.perf_counter())
        done.logprobs = None if params.logprobs is None else []
        done.prompt_logprobs = None if params.prompt_logprobs is None else [None] * len(request.prompt)
        output, locates = None, wants_text and params.logprobs is not None
        if tokenizer is not None and (params.stop or locates or (listener is not None and wants_text)):
            prompt = done.prompt_token_ids
            output = OutputText(tokenizer, params.stop, params.min_tokens, prompt=prompt, locates=locates)
            done.text_offsets = output.offsets
        return cls(request, done, listener, output, wants_text)

    @property
    def watched(self) -> bool:
        """Return whether the engine must read each token of the request as soon as it arrives."""
        known = self.listener is not None or self.output is not None or self.request.matcher is not None
        return self.request.generates and known

    def gained(self, token_ids: list[int], logprobs: list | None) -> Delta:
        """Return a delta of the latest tokens and the text since the last call; with the result if it has ended."""
        done, before = self.completion, len(self.completion.token_ids) - len(token_ids)
        text = "" if self.output is None else self.output.new()
        ended = None if done.finish_reason is None else done
        offsets = None if done.text_offsets is None else done.text_offsets[before:]
        return Delta(text, token_ids, logprobs, done.finish_reason, done.stop_reason, ended, offsets)
