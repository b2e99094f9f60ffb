"""`LLM`: generate and chat offline.  Lesson 00."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from minillm.errors import EngineClosed, InvalidRequest
from minillm.request import Completion, RequestOptions, SamplingParams

from .engine import Engine


class LLM:
    """Generate text offline: `LLM().generate("Once upon a time")`.  Lesson 00.

    model: a directory in Hugging Face's layout, a preset's name, or None for the embedded tiny-gemma. tokenizer: a
    directory, or an object with `encode` and `decode`; default: the model's own. Options: see `EngineConfig`.
    """

    def __init__(self, model: str | Path | None = None, tokenizer=None, **options):
        self.engine: Engine | None = Engine(model, tokenizer, **options)
        self.tokenizer = self.engine.tokenizer
        self.model_config = self.engine.model_config
        self.config = self.engine.config

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """One completion a prompt, in order. Prompts are strings or lists of token ids; params and options one for all,
        or one each.

        Raises InvalidRequest, before anything runs, if any prompt cannot be served.
        """
        engine = self._open_engine()
        prompts = as_prompts(prompts)
        each_params = _one_each(params, SamplingParams, len(prompts))
        each_options = _one_each(options, RequestOptions, len(prompts))
        batch = []
        for i, (prompt, wanted, option) in enumerate(zip(prompts, each_params, each_options, strict=True)):
            try:
                batch.append(engine.prepare(prompt, wanted, option))
            except InvalidRequest as error:
                raise InvalidRequest(f"prompt {i}: {error}" if len(prompts) > 1 else str(error)) from None
        bar = _progress_bar(len(batch)) if progress else None
        try:
            for tracked in batch:
                engine.submit(tracked)
            for tracked in batch:  # while the first unfinished one runs, so do the others
                while tracked.completion.finish_reason is None:
                    finished = engine.step()
                    if bar is not None:
                        bar.update(len(finished))
        finally:
            for tracked in batch:
                engine.abort(tracked.request.request_id)
            while engine.in_flight and not engine.tracked:  # steps launched ahead of the last end
                engine.step()
            if bar is not None:
                bar.close()
        return [tracked.completion for tracked in batch]

    def chat(
        self,
        messages: Sequence[dict] | Sequence[Sequence[dict]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Answer conversations: one list of {"role", "content"} messages, or several."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [chat_prompt(self.tokenizer, conversation) for conversation in conversations]
        return self.generate(prompts, params, options, progress=progress)

    def stats(self) -> dict[str, int]:
        return self._open_engine().stats()

    def warm_up(self) -> None:
        """Compile kernels and capture CUDA graphs now, not while the first requests wait. On a CPU nothing is to do."""
        self._open_engine().warm_up()

    def close(self) -> None:
        """Free everything; the object cannot be used afterwards."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def _open_engine(self) -> Engine:
        if self.engine is None:
            raise EngineClosed("this LLM is closed; make a new one")
        return self.engine

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


Asked = TypeVar("Asked", SamplingParams, RequestOptions)


def _one_each(given: Asked | Sequence[Asked] | None, kind: type[Asked], count: int) -> Sequence[Asked | None]:
    """One for each of `count` prompts. Raises InvalidRequest."""
    if given is None or isinstance(given, kind):
        return [given] * count
    if len(given) != count:
        raise InvalidRequest(f"{count} prompts, but {len(given)} {kind.__name__}: give one, or one each")
    return given


def as_prompts(prompts) -> list:
    """One prompt or several -> a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], (int, np.integer)) else prompts


def chat_prompt(tokenizer, messages: Sequence[dict]) -> list[int]:
    """A conversation's token ids, ending where the model's turn begins. Raises InvalidRequest."""
    if tokenizer is None:
        raise InvalidRequest("chat needs a tokenizer with a chat template, and this model has no tokenizer files")
    return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)


def _progress_bar(total: int):
    from tqdm.auto import tqdm

    return tqdm(total=total, unit="request", desc="generating")
