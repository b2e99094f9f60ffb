"""`LLM`: generate and chat offline.  Lesson 00."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack

from minillm import garbage
from minillm.config import EngineOptions
from minillm.errors import EngineClosed, naming
from minillm.request import Completion, Prompt, RequestOptions, SamplingParams
from minillm.tokenizer import Tokenizer

from .engine import Engine, Tracked
from .inputs import as_conversations, as_prompts, one_for_each, rendered_chat, with_adapters

if TYPE_CHECKING:
    from tqdm import tqdm


class LLM:
    """Generate text offline: `LLM().generate("Once upon a time")`.  Lesson 00.

    model: a directory in Hugging Face's layout, a preset's name, or None for the embedded tiny-gemma. tokenizer: a
    directory, or an object with `encode` and `decode`; default: the model's own. Options: see `EngineConfig`.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        tokenizer: str | Path | Tokenizer | None = None,
        **options: Unpack[EngineOptions],
    ):
        engine = Engine(model, tokenizer, **options)
        self._engine: Engine | None = engine
        self.tokenizer = engine.tokenizer
        self.model_config = engine.model_config
        self.config = engine.config

    @garbage.young()
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        *,
        adapter: str | None | Sequence[str | None] = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete each prompt; returns one `Completion` for each, in order.

        prompts: a string, a list of token ids, a dictionary, or a list of those. {"prompt_embeds": tensor} gives the
        embeddings [tokens, hidden] that the model reads instead of tokens, as transformers' `inputs_embeds`;
        {"parts": [...]} joins texts, lists of token ids and tensors, in their order.

        params, options: one for all prompts, or a list with one for each. adapter: the name of an adapter for all
        prompts, or a list with a name or None for each. With n > 1 in its params, a prompt's `Completion` is the first
        choice, and its `outputs` are all of them. Raises InvalidRequest before anything runs if any prompt cannot be
        served; EngineClosed. No prompts, no completions.
        """
        engine, each_prompt = self.engine, as_prompts(prompts)
        if not each_prompt:
            return []
        count = len(each_prompt)
        each_params = one_for_each(params, SamplingParams, count)
        each_options = with_adapters(one_for_each(options, RequestOptions, count), adapter)
        batch: list[Tracked] = []
        first: list[int] = []  # each prompt's first choice, as an index of the batch
        for i, (prompt, sampling, option) in enumerate(zip(each_prompt, each_params, each_options, strict=True)):
            first.append(len(batch))
            with naming("prompt", i, count):
                prompt = engine.read(prompt)
                several = isinstance(sampling, SamplingParams) and sampling.n > 1
                batch += [
                    engine.prepare(prompt, choice, option)
                    for choice in (sampling.choices(sampling.n) if sampling and several else [sampling])
                ]
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
                engine.abort(tracked)
            while engine.in_flight and not engine.tracked:  # steps launched ahead of the last end
                engine.step()
            if bar is not None:
                bar.close()
        done = [tracked.completion for tracked in batch]
        for prompt, begin, end in zip(each_prompt, first, [*first[1:], len(done)], strict=True):
            for index, each in enumerate(done[begin:end]):
                each.prompt, each.index = prompt if isinstance(prompt, str) else None, index
            done[begin].others = done[begin + 1 : end]
        return [done[begin] for begin in first]

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        *,
        adapter: str | None | Sequence[str | None] = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Answer one conversation, a list of {"role", "content"} messages, or a list of conversations.

        Returns one `Completion` for each. The other arguments are those of `generate`. Raises InvalidRequest,
        EngineClosed, and TokenizerError where the model has no chat template or the template rejects the messages.
        """
        conversations, prompts = as_conversations(messages), []
        for i, conversation in enumerate(conversations):
            with naming("conversation", i, len(conversations)):
                prompts.append(rendered_chat(self.tokenizer, conversation))
        done = self.generate([ids for _, ids in prompts], params, options, adapter=adapter, progress=progress)
        for first, (text, _) in zip(done, prompts, strict=True):
            for each in first.outputs:
                each.prompt = text
        return done

    def stats(self) -> dict[str, int]:
        """Counts of requests, cache blocks and steps so far: see `Engine.stats`."""
        return self.engine.stats()

    def warm_up(self) -> None:
        """Compile kernels and capture CUDA graphs before the first request. On a CPU it does nothing."""
        self.engine.warm_up()

    def close(self) -> None:
        """Free everything; the object cannot be used afterwards."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    @property
    def engine(self) -> Engine:
        """Return the engine that runs the requests. Raises EngineClosed after `close`."""
        if self._engine is None:
            raise EngineClosed("this LLM is closed; make a new one")
        return self._engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _progress_bar(total: int) -> "tqdm":
    from tqdm.auto import tqdm

    return tqdm(total=total, unit="request", desc="generating")
