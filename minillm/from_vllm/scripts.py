"""The classes that scripts import: subclasses of minillm's that take vLLM's arguments and explain what is missing."""

from collections.abc import AsyncGenerator, Awaitable, Coroutine, Generator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any, NoReturn

from minillm import request
from minillm.engine import async_llm, inputs, llm
from minillm.engine.engine import Engine
from minillm.errors import InvalidRequest, naming
from minillm.request import RequestOptions as RequestOptions
from minillm.tokenizer import Tokenizer as PlainTokenizer
from minillm.tokenizer import TokenizerError
from minillm.values import shown

from .attributes import explain_missing
from .options import engine_options, generate_arguments, sampling_options, translated_prompt


@explain_missing
class SamplingParams(request.SamplingParams):
    """`minillm.SamplingParams` with vLLM's options."""

    def __init__(self, *values: Any, **named: Any):
        if values:  # vLLM's order is another one, and most of these numbers could mean anything
            raise InvalidRequest(
                "SamplingParams takes arguments by name only, as SamplingParams(temperature=0.8, max_tokens=64), not "
                f"{shown(values[0])} by position"
            )
        super().__init__(**sampling_options(named))

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise FrozenInstanceError(f"{name} cannot change: make others, as dataclasses.replace(params, {name}=...)")


@explain_missing
class Logprob(float):
    """A token's log-probability, in nats: a number that has it as `logprob` too."""

    __slots__ = ()

    @property
    def logprob(self) -> float:
        """Return the number as a plain float."""
        return float(self)


@explain_missing
class Completion(request.Completion):
    """`minillm.Completion`, whose log-probabilities have the attribute `logprob`."""

    @classmethod
    def of(cls, done: request.Completion) -> "Completion":
        """Copy a result, with its choices."""
        changed = {
            "logprobs": _with_attributes(done.logprobs),
            "prompt_logprobs": _with_attributes(done.prompt_logprobs),
            "others": [cls.of(each) for each in done.others],
        }
        return cls(**(vars(done) | changed))


@explain_missing
class Delta(request.Delta):
    """`minillm.request.Delta`, whose log-probabilities have the attribute `logprob`."""

    @classmethod
    def of(cls, delta: request.Delta) -> "Delta":
        """Copy a delta, with the completion that comes with the last one."""
        completion = None if delta.completion is None else Completion.of(delta.completion)
        return cls(**(vars(delta) | {"logprobs": _with_attributes(delta.logprobs), "completion": completion}))


def _with_attributes(logprobs: Sequence[request.TokenLogprobs | None] | None) -> list[dict | None] | None:
    """Return the same with each log-probability as a `Logprob`."""
    if logprobs is None:
        return None
    return [each and {token: Logprob(value) for token, value in each.items()} for each in logprobs]


@explain_missing
class Tokenizer(PlainTokenizer):
    """`minillm.Tokenizer`, which says what to call instead of the methods that transformers' tokenizers have."""

    def __call__(self, *texts: Any, **options: Any) -> NoReturn:
        raise TokenizerError("a tokenizer is no function here: use encode(text), which returns the list of ids")


def _explaining(tokenizer: PlainTokenizer | None) -> PlainTokenizer | None:
    """Return the same tokenizer as one of this module's; an object of the user's own stays as it is."""
    if type(tokenizer) is not PlainTokenizer:
        return tokenizer
    copy = Tokenizer.__new__(Tokenizer)
    vars(copy).update(vars(tokenizer))
    return copy


@explain_missing
class LLM(llm.LLM):
    """`minillm.LLM` with vLLM's options and arguments."""

    def __init__(
        self,
        model: str | Path | None = None,
        tokenizer: str | Path | PlainTokenizer | None = None,
        **options: Any,
    ):
        super().__init__(model, tokenizer, **engine_options(options))
        self.tokenizer = _explaining(self.tokenizer)

    def generate(
        self,
        prompts: Any = None,
        params: Any = None,
        options: Any = None,
        *,
        adapter: Any = None,
        progress: bool = False,
        **vllm: Any,
    ) -> list[request.Completion]:
        """Complete prompts, which may be dictionaries. vllm: sampling_params, use_tqdm, and what asks for nothing.

        Raises InvalidRequest.
        """
        params, progress = generate_arguments(params, options, progress, vllm)
        each: list[Any] = [prompts] if isinstance(prompts, Mapping) else inputs.as_prompts(prompts)
        for i in range(len(each)):
            with naming("prompt", i, len(each)):
                each[i] = translated_prompt(each[i])
        done = super().generate(each, params, options, adapter=adapter, progress=progress)
        return [Completion.of(one) for one in done]

    def chat(
        self,
        messages: Any,
        params: Any = None,
        options: Any = None,
        *,
        adapter: Any = None,
        progress: bool = False,
        **vllm: Any,
    ) -> list[request.Completion]:
        """Answer one conversation or several; arguments as those of `generate`."""
        params, progress = generate_arguments(params, options, progress, vllm)
        return super().chat(messages, params, options, adapter=adapter, progress=progress)

    def get_tokenizer(self) -> PlainTokenizer | None:
        """Return the tokenizer."""
        return self.tokenizer


@explain_missing
class AsyncLLM(async_llm.AsyncLLM):
    """`minillm.AsyncLLM` with vLLM's options and arguments."""

    def __init__(
        self,
        model: str | Path | None = None,
        tokenizer: str | Path | PlainTokenizer | None = None,
        *,
        engine: llm.LLM | Engine | None = None,
        **options: Any,
    ):
        super().__init__(model, tokenizer, engine=engine, **engine_options(options))
        self.tokenizer = _explaining(self.tokenizer)

    async def stream(
        self, prompt: Any, params: Any = None, request_id: str | None = None, options: Any = None, **vllm: Any
    ) -> AsyncGenerator[request.Delta, None]:
        """Yield what is new; the prompt may be a dictionary. vllm: as for `LLM.generate`."""
        params, _ = generate_arguments(params, None, False, vllm)
        async with aclosing(super().stream(translated_prompt(prompt), params, request_id, options)) as deltas:
            async for delta in deltas:
                yield Delta.of(delta)

    def generate(
        self, prompt: Any, params: Any = None, request_id: str | None = None, options: Any = None, **vllm: Any
    ) -> Coroutine[Any, Any, request.Completion]:
        """Return the whole completion, to be awaited; arguments as those of `stream`."""
        params, _ = generate_arguments(params, None, False, vllm)
        return _Whole(super().generate(prompt, params, request_id, options))

    def abort(self, request: str | async_llm.Prepared) -> Awaitable[None]:  # type: ignore[override]
        """End a request, as `minillm.AsyncLLM.abort` does. The result may be awaited, as vLLM's must be."""
        super().abort(request)
        return _Done()


class _Whole(Coroutine[Any, Any, request.Completion]):
    """A coroutine that says what to do instead of iterating over it, as over vLLM's `AsyncLLM.generate`."""

    def __init__(self, coroutine: Coroutine[Any, Any, request.Completion]):
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, request.Completion]:
        return self._coroutine.__await__()

    def __aiter__(self) -> NoReturn:
        self.close()
        raise InvalidRequest(
            "generate gives the whole completion, as `await engine.generate(...)`; for its text as it comes, write "
            "`async for delta in engine.stream(prompt, params)`"
        )


class _Done:
    """Something that may be awaited, or not."""

    def __await__(self) -> Generator[Any, Any, None]:
        yield from ()
