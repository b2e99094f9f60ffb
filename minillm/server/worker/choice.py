"""Prompts on their way to the engine, and the choices of a response as a worker assembles them.  Lesson 99."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from minillm.engine.output_text import OutputText
from minillm.request import Completion, Delta, SamplingParams, TokenLogprobs
from minillm.tokenizer import Tokenizer

from ..wire import Event, PromptForm

ONLY_TOKENS = Event(0, [])  # the other fields of an event that has nothing but tokens


@dataclass
class Prompt:
    """A prompt on its way to the engine."""

    ids: list[int] | None  # None: only the engine's process can tokenize
    text: str | None = None
    special: bool = True  # whether the tokenizer adds its special tokens
    values: str = ""  # its embeddings: see `PromptForm`
    echoed: bool = False  # whether its complete characters are sent before the output: see `OutputText`

    @property
    def form(self) -> PromptForm:
        return PromptForm(None if self.ids is None else len(self.ids), self.text, self.special, self.values)


class Choice:
    """One running choice of a response, as a worker assembles it."""

    def __init__(self, index: int, prompt: Prompt, tokenizer: Tokenizer | None, params: SamplingParams):
        self.index = index
        self.completion = Completion("", [])
        self.failure: Exception | None = None  # why the engine ended this choice alone
        self._start: Callable[..., OutputText] | None = None
        if tokenizer is not None:
            locates = params.logprobs is not None
            self._start = partial(
                OutputText, tokenizer, params.stop, params.min_tokens, echoed=prompt.echoed, locates=locates
            )
        if params.logprobs is not None:
            self.completion.logprobs, self.completion.text_offsets = [], []
        self.follow(prompt.ids or [])

    def follow(self, ids: list[int]) -> None:
        """Start over with the prompt's token ids."""
        self.completion.prompt_token_ids = ids
        self.output = self._start(prompt=ids) if self._start is not None else None

    def take(self, ids: list[int], event: Event = ONLY_TOKENS) -> Delta:
        """Apply what the engine reports: more tokens, and the other fields of an event.

        A stop string ends the choice; the tokens after it are dropped.
        """
        done = self.completion
        text, offsets, reason, stop = event.text, event.offsets, event.reason, event.stop
        if self.output is not None:
            ids = ids[: self.output.add(ids, reason)]
            if self.output.stop_string is not None:
                reason, stop = "stop", self.output.stop_string
            text = self.output.new()
            offsets = self.output.offsets and self.output.offsets[len(done.token_ids) :]
        done.text += text
        done.token_ids += ids
        done.num_cached_tokens += event.cached
        logprobs: list | None = None
        if event.logprobs is not None:
            logprobs = [_with_ids(entry) for entry in event.logprobs[: len(ids)]]
            if done.logprobs is not None:
                done.logprobs += logprobs
        if offsets is not None and done.text_offsets is not None:
            done.text_offsets += offsets
        if event.prompt_logprobs is not None:
            done.prompt_logprobs = [_with_ids(entry) for entry in event.prompt_logprobs]
        delta = Delta(text, ids, logprobs, reason, stop, text_offsets=offsets)
        if reason is not None:
            done.finish_reason, done.stop_reason = reason, stop
            delta.completion = done
        return delta


def _with_ids(entry: dict[str, float] | None) -> TokenLogprobs | None:
    """Return log-probabilities from JSON, with their string keys converted to token ids."""
    return None if entry is None else {int(token): logprob for token, logprob in entry.items()}
