"""A request as the engine keeps it.  Lesson 10."""

from collections.abc import Callable
from dataclasses import dataclass

from minillm.request import Completion, Delta, Request

from .output_text import OutputText

Listener = Callable[[Delta], None]


@dataclass(eq=False)
class Tracked:
    """What the engine keeps for a request, in addition to the scheduler's state."""

    request: Request
    completion: Completion
    listener: Listener | None = None
    output: OutputText | None = None  # set if text is needed token by token
    wants_text: bool = True  # False: the caller decodes the ids itself
    row: int = -1  # where it was last admitted

    @property
    def watched(self) -> bool:
        """Whether each of its tokens must be looked at as it comes."""
        known = self.listener is not None or self.output is not None or self.completion.logprobs is not None
        return self.request.generates and (known or self.request.matcher is not None)

    def gained(self, token_ids: list[int], logprobs: list | None) -> Delta:
        """These tokens, which are the latest, and the text since the last call; with the result, if it has ended."""
        done, before = self.completion, len(self.completion.token_ids) - len(token_ids)
        text = "" if self.output is None else self.output.new()
        ended = None if done.finish_reason is None else done
        offsets = None if done.text_offsets is None else done.text_offsets[before:]
        return Delta(text, token_ids, logprobs, done.finish_reason, done.stop_reason, ended, offsets)
