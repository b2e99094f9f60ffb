"""`LLM`: generate and chat offline.  Lesson 00."""

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from minillm.config import EngineOptions
from minillm.errors import EngineClosed, InvalidRequest, naming
from minillm.request import Completion, Prompt, RequestOptions, SamplingParams
from minillm.tokenizer import Tokenizer
from minillm.values import as_int, as_tuple, shown

from .engine import Engine, Tracked

if TYPE_CHECKING:
    from tqdm import tqdm

MESSAGE = '{"role": ..., "content": ...}'


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

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete each prompt; returns one `Completion` for each, in order.

        prompts: a string, a list of token ids, or a list of those. params, options: one for all prompts, or a list
        with one for each. With n > 1 in its params, a prompt's `Completion` is the first choice, and its `outputs` are
        all of them. Raises InvalidRequest before anything runs if any prompt cannot be served; EngineClosed. No
        prompts, no completions.
        """
        engine, each_prompt = self.engine, as_prompts(prompts)
        if not each_prompt:
            return []
        count = len(each_prompt)
        each_params = _one_each(params, SamplingParams, count)
        each_options = _one_each(options, RequestOptions, count)
        batch: list[Tracked] = []
        first: list[int] = []  # the place in the batch of each prompt's first choice
        for i, (prompt, wanted, option) in enumerate(zip(each_prompt, each_params, each_options, strict=True)):
            first.append(len(batch))
            with naming("prompt", i, count):
                several = isinstance(wanted, SamplingParams) and wanted.n > 1
                batch += [
                    engine.prepare(prompt, choice, option)
                    for choice in (wanted.choices(wanted.n) if wanted and several else [wanted])
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
        progress: bool = False,
    ) -> list[Completion]:
        """Answer one conversation, a list of {"role", "content"} messages, or a list of conversations.

        Returns one `Completion` for each. Raises InvalidRequest, EngineClosed, and TokenizerError where the model has
        no chat template or the template rejects the messages.
        """
        conversations = as_tuple(messages)
        if not conversations:
            raise InvalidRequest(f"messages must be a list of {MESSAGE}, not {shown(messages)}")
        if isinstance(conversations[0], Mapping):
            conversations = (conversations,)
        prompts = []
        for i, conversation in enumerate(conversations):
            with naming("conversation", i, len(conversations)):
                prompts.append(rendered_chat(self.tokenizer, conversation))
        done = self.generate([ids for _, ids in prompts], params, options, progress=progress)
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
        """The engine that runs the requests. Raises EngineClosed after `close`."""
        if self._engine is None:
            raise EngineClosed("this LLM is closed; make a new one")
        return self._engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


Asked = TypeVar("Asked", SamplingParams, RequestOptions)


def _one_each(given: Asked | Sequence[Asked] | None, kind: type[Asked], count: int) -> Sequence[Asked | None]:
    """One for each of `count` prompts. Raises InvalidRequest."""
    if given is None or isinstance(given, kind):
        return [given] * count
    each = as_tuple(given)
    if each is None:
        raise InvalidRequest(f"{kind.__name__}(...) or a list of them was expected, not {shown(given)}")
    if len(each) != count:
        raise InvalidRequest(f"{count} prompts, but {len(each)} {kind.__name__}: give one, or one each")
    return each


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several -> a list of prompts. Raises InvalidRequest for what is neither text nor a list."""
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "columns"):  # iterating over a table gives the names of its columns
        raise InvalidRequest(f"prompts must be one column of a table, as table['prompt'], not {type(prompts).__name__}")
    several = None if prompts is None or isinstance(prompts, Set) else as_tuple(prompts)  # a set has no order
    if several is None:
        raise InvalidRequest(f"prompts must be a string, a list of token ids, or a list of those, not {shown(prompts)}")
    if several and (isinstance(several[0], int) or as_int(several[0]) is not None):
        return [several]
    return list(several)


def chat_prompt(tokenizer: Tokenizer | None, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """A conversation's token ids, ending where the model's turn begins. Raises InvalidRequest."""
    return rendered_chat(tokenizer, messages)[1]


def rendered_chat(tokenizer: Tokenizer | None, messages: Sequence[Mapping[str, str]]) -> tuple[str, list[int]]:
    """What the template makes of a conversation, special tokens included, and its token ids. Raises InvalidRequest."""
    if tokenizer is None:
        raise InvalidRequest("chat needs a tokenizer with a chat template, and this model has no tokenizer files")
    conversation = as_tuple(messages)
    if not conversation:
        raise InvalidRequest(f"a conversation must be a list of {MESSAGE}, not {shown(messages)}")
    for i, message in enumerate(conversation):
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"messages[{i}] must be {MESSAGE}, not {shown(message)}")
    rendered = tokenizer.apply_chat_template([_message(i, each) for i, each in enumerate(conversation)])
    return rendered, tokenizer.encode(rendered, add_special_tokens=False)


def _message(place: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """With its content as text, also if it comes in parts as OpenAI has them. Raises InvalidRequest."""
    message = dict(given)
    parts = message.get("content")
    if isinstance(parts, (list, tuple)) and parts:
        texts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts
        ]
        if None not in texts:
            message["content"] = "\n".join(map(str, texts))
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            ways = "a string" if name == "role" else 'a string or a list of {"type": "text", "text": ...}'
            raise InvalidRequest(f"messages[{place}] must have {name!r} as {ways}, not {shown(message.get(name))}")
    return message


def _progress_bar(total: int) -> "tqdm":
    from tqdm.auto import tqdm

    return tqdm(total=total, unit="request", desc="generating")
