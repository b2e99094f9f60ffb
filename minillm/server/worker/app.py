"""The routes: OpenAI's API, vLLM's /tokenize, Triton's /v2, health and metrics, and a page.  Lesson 99.

The application holds no model. It sends requests to a `ServedEngine`: in another process, or in this one. With several
of them it serves several models, and a request's `model` says which one is meant.
"""

import asyncio
import base64
import itertools
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from minillm.errors import InvalidRequest
from minillm.from_vllm.http import PATHS
from minillm.prompts import EMBEDDED
from minillm.prompts.saved_tensor import decoded, read_saved, saved_length
from minillm.request import Completion, Delta, SamplingParams
from minillm.tokenizer import Tokenizer, TokenizerError
from minillm.values import QUOTED, shown
from minillm.version import __version__

from ..engine_room.page import add_page
from ..lengths import check_length, one_of, readable
from ..limits import HEALTH
from ..token_texts import TokenText, TokenTexts, complete_text
from ..wire import (
    Adapters,
    Alive,
    Decode,
    Encode,
    LoadAdapter,
    Offsets,
    RenderChat,
    ShowTokens,
    State,
    UnloadAdapter,
)
from . import kserve
from .api_error import APIError
from .body import BodyReader, Form, takes
from .description import describe
from .event_stream import ClientGone, EventStream, unless_disconnected
from .gate import Gate, hosts, origins, refusal
from .link import Choice, EngineError, Prompt
from .messages import Message, turns
from .methods import Methods, allowed
from .protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    LoadAdapterRequest,
    SavedTensor,
    StreamOptions,
    TokenizeRequest,
    UnloadAdapterRequest,
    as_api_error,
)
from .responses import Answer, ChatForm, CompletionForm, Echo, dumps, usage
from .served_engine import ServedEngine

LONG_TEXT = 10_000  # characters in all prompts; text this long is tokenized in a thread, so other streams keep going


def create_app(
    engine: ServedEngine, address: str, metrics_text: Callable[[], Awaitable[bytes]], *more: ServedEngine
) -> FastAPI:
    """Return the application that serves `engine`, which must be connected. address: where the server listens.

    metrics_text: returns all metrics, in Prometheus' text format. more: engines of other models, with the same options
    of the server.
    """
    app = FastAPI(
        title="minillm", version=__version__, description="An OpenAI-compatible server over the minillm engine."
    )
    models = _Models((engine, *more))
    config = engine.facts.config
    app.add_middleware(Methods, routes=app.routes)
    app.add_middleware(
        Gate,
        key=engine.facts.api_key,
        allowed=hosts(config.allowed_hosts, address),
        client_header=config.client_header,
        pages=origins(config.cors_origins),
    )
    _report_errors(app)

    @app.get("/v1/health/live")
    async def live() -> Response:
        """200 while this worker answers at all, whatever the engine does."""
        return JSONResponse({"status": "ok"})

    @app.get("/health")
    @app.get("/v1/health/ready")
    async def health() -> Response:
        """200 while the engine accepts requests, 503 while it is closed, gone or stuck, or that of any model."""
        if await models.alive():
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "the engine is not running"}, status_code=503)

    @app.get("/ping")
    @app.post("/ping")
    async def ping() -> Response:
        """Return the same, as vLLM's server has it for Amazon SageMaker."""
        return await health()

    @app.get("/version")
    async def version() -> dict:
        return {"version": __version__}

    @app.get("/metrics")
    @app.get("/v1/metrics")
    async def metrics() -> Response:
        """Metrics of the whole server, not only of the worker that answers."""
        return Response(await metrics_text(), media_type="text/plain; version=0.0.4")

    add_page(app)

    @app.get("/engine/state")
    async def state(model: str | None = None) -> Response:
        """Return what the engine holds now: the numbers that the page at / shows, a few times a second at most."""
        chosen = models.named(model or engine.facts.name).engine
        return Response(await chosen.ask(State()), media_type="application/json", headers={"cache-control": "no-store"})

    @app.get("/v1/models")
    async def list_models() -> dict:
        return {"object": "list", "data": await models.cards()}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict:
        server, adapter = await models.chosen(name)
        return server.card if adapter is None else server.adapter_card(adapter)

    @app.post("/v1/completions", openapi_extra=takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await models.answer(request, CompletionRequest, lambda body: models.named(body.model).complete(body))

    @app.post("/v1/chat/completions", openapi_extra=takes(ChatRequest))
    async def chat(request: Request) -> Response:
        return await models.answer(request, ChatRequest, lambda body: models.named(body.model).chat(body))

    @app.post("/tokenize", openapi_extra=takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        return await models.answer(request, TokenizeRequest, lambda body: models.named(body.model).ids_of(body))

    @app.post("/detokenize", openapi_extra=takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        return await models.answer(request, DetokenizeRequest, lambda body: models.named(body.model).text_of(body))

    kserve.add_routes(app, models)
    forms: list[type[Body]] = [CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest, *kserve.FORMS]
    if config.adapter_folder is not None:
        _add_loading(app, models)
        forms += [LoadAdapterRequest, UnloadAdapterRequest]
    describe(app, forms, max(server.engine.facts.vocab_size for server in models.servers))
    return app


class _Models:
    """State that the routes share: the models by their names for clients, and the body reader."""

    def __init__(self, engines: Sequence[ServedEngine]):
        self.servers = [_Server(engine) for engine in engines]
        self._named = {server.engine.facts.name: server for server in self.servers}
        longest = max(engine.facts.max_request_len for engine in engines)
        config = engines[0].facts.config
        self._bodies = BodyReader(longest, config.body_timeout, config.enable_prompt_embeds)

    async def alive(self) -> bool:
        """Return whether the engines of all models accept requests."""
        return all(await asyncio.gather(*(server.alive() for server in self.servers)))

    def named(self, name: str | None) -> "_Server":
        """Return a model; None: the only one. Raises APIError if there is no such model."""
        if name is None and len(self.servers) == 1:
            return self.servers[0]
        if name in self._named:
            return self._named[name]
        names = ", ".join(map(repr, self._named))
        wrong = "this request names no model" if name is None else f"unknown model {shown(name)}"
        raise APIError(f"{wrong}: this server serves {names}", status=404, param="model", code="model_not_found")

    async def chosen(self, name: str | None) -> "tuple[_Server, str | None]":
        """Return the model of this name, or the one with the adapter of this name, and the adapter.

        Raises APIError if there is neither.
        """
        if name is not None and name not in self._named:
            for server in self.servers:
                if name in await server.adapters():
                    return server, name
        return self.named(name), None

    async def cards(self) -> list[dict]:
        """Return the models as /v1/models lists them, each with its adapters."""
        found = []
        for server in self.servers:
            found += [server.card, *map(server.adapter_card, await server.adapters())]
        return found

    async def answer(
        self, request: Request, form: type[Form], endpoint: Callable[[Form], Awaitable[Response]]
    ) -> Response:
        """Read the body, run the endpoint, and cancel the work if the client disconnects."""
        try:
            async with self.servers[0].engine.until_given_up():
                body = await self._bodies.read(request, form)
                if body.model is not None:
                    server, adapter = await self.chosen(body.model)
                    body.serve_with(server.engine.facts.name, adapter)
                return await unless_disconnected(request.receive, endpoint(body))
        except ClientGone:
            return Response(status_code=499)
        except Exception as error:
            response = refusal(as_api_error(error), request.url.path)
            # The frames are in a reference cycle, which would keep the request alive until the garbage collector runs.
            traceback.clear_frames(error.__traceback__)
            return response


class _Server:
    """One model: its engine and its card."""

    def __init__(self, engine: ServedEngine):
        self.engine = engine
        self.texts = TokenTexts(engine.tokenizer)
        self.created = int(time.time())

    @property
    def card(self) -> dict:
        """Return the model as /v1/models shows it."""
        engine = self.engine
        return {
            "id": engine.facts.name,
            "object": "model",
            "created": self.created,
            "owned_by": "minillm",
            "root": engine.facts.name,  # these two as vLLM has them, for its benchmark
            "parent": None,
            "max_model_len": engine.facts.max_model_len,
            "max_request_len": engine.facts.max_request_len,
            "vocab_size": engine.facts.vocab_size,
            "dtype": engine.facts.dtype,
            "max_num_seqs": engine.facts.max_num_seqs,
        }

    async def adapters(self) -> list[str]:
        """Return the names of the adapters that are loaded now."""
        return await self.engine.ask(Adapters()) if self.engine.facts.takes_adapters else []

    def adapter_card(self, name: str) -> dict:
        """Return an adapter as /v1/models shows it: as a model whose parent is the model that it changes."""
        return self.card | {"id": name, "parent": self.engine.facts.name}

    async def alive(self) -> bool:
        """Return whether the engine accepts requests. One that does not even answer this soon does not."""
        try:
            async with asyncio.timeout(HEALTH):
                return await self.engine.ask(Alive())
        except (EngineError, TimeoutError):
            return False

    def check_choices(self, choices: int, n: int) -> None:
        if choices > self.engine.facts.capacity:
            name, held = "n" if n > 1 else "prompt", self.engine.facts.capacity
            message = f"{name} asks for {choices} choices, but this server's limit is {held}: split the request"
            raise APIError(message, param=name)

    # ---- the endpoints

    async def complete(self, body: CompletionRequest) -> Response:
        texts, params, n = body.prompts(), body.params(), body.n or 1
        prompts = await self.prompts(texts, n, least=0 if body.scores_only else 1)
        form = CompletionForm(self.texts, body.logprobs, bool(body.return_token_ids), n)
        if body.echo:
            form.scores_only = body.scores_only
            form.echoes = [await self.echo(text, _long(texts), not form.scores_only) for text in texts]
            for prompt, echo in zip(prompts, form.echoes, strict=True):
                prompt.echoed = not echo.written
        return await self.respond(prompts, params, form, body)

    async def chat(self, body: ChatRequest) -> Response:
        self.check_choices(body.n or 1, body.n or 1)
        text, in_thread = await self.render(body.messages)
        prompt = await self.tokenize(text, in_thread, special=False, name="messages")
        # An engine that streams past its context accepts longer requests; the default is still the context length.
        left = min(self.engine.facts.max_request_len - len(prompt.ids or ()), self.engine.facts.max_model_len)
        params = body.params(left)
        top = (body.top_logprobs or 0) if body.logprobs else None
        form = ChatForm(self.texts, top, bool(body.return_token_ids), body.n or 1)
        return await self.respond([prompt], params, form, body)

    async def ids_of(self, body: TokenizeRequest) -> Response:
        """Return the token ids of a text. It may be longer than the context: this is how a client finds out."""
        engine, name = self.engine, "prompt" if body.messages is None else "messages"
        if not engine.facts.encodes:
            raise APIError("this model has no tokenizer")
        text = body.prompt or "" if body.messages is None else (await self.render(body.messages))[0]
        readable(len(text), engine.facts.max_request_len, name)
        special = name == "prompt" if body.add_special_tokens is None else body.add_special_tokens
        try:
            if engine.tokenizer is None:
                ids = await engine.ask(Encode(text, special))
            else:
                ids = await _run(len(text) >= LONG_TEXT, engine.tokenizer.encode, text, special)
        except (InvalidRequest, TokenizerError) as error:
            raise APIError(f"{name}: {error}", param=name) from None
        answer = {"count": len(ids), "max_model_len": engine.facts.max_model_len, "tokens": ids}
        if body.return_token_strs:
            await self._look_up(ids)
            answer["token_strs"] = [self.texts.of(each).piece for each in ids]
        return JSONResponse(answer)

    async def text_of(self, body: DetokenizeRequest) -> Response:
        """Return the text of token ids."""
        if not self.engine.facts.encodes:
            raise APIError("this model has no tokenizer")
        self._check_ids(body.tokens, "tokens")
        return JSONResponse({"prompt": (await self.echo(body.tokens, len(body.tokens) >= LONG_TEXT)).text})

    # ---- prompts

    async def prompts(self, texts: Sequence[str | list[int]], n: int, least: int = 1) -> list[Prompt]:
        """Check and tokenize the prompts of a request that wants n choices of each, of at least `least` tokens."""
        self.check_choices(len(texts) * n, n)
        in_thread = _long(texts)
        await _run(in_thread, self.check_lengths, texts, least)
        made = []
        for index, text in enumerate(texts):
            name = one_of(len(texts), index)
            if isinstance(text, SavedTensor):
                made.append(await _run(in_thread, self.embedded, text, name, least))
            elif isinstance(text, str):
                made.append(await self.tokenize(text, in_thread, name=name, least=least))
            else:
                made.append(Prompt(text))
        return made

    def embedded(self, saved: SavedTensor, name: str, least: int) -> Prompt:
        """Read a prompt of embeddings, whose length as base64 was checked before."""
        facts = self.engine.facts
        try:
            values = read_saved(decoded(saved), facts.hidden_size, facts.dtype, facts.max_request_len - least)
        except InvalidRequest as error:
            raise APIError(f"{name}: {error}", param="prompt_embeds") from None
        return Prompt([EMBEDDED] * len(values), values=base64.b64encode(values.data).decode())

    async def tokenize(
        self, text: str, in_thread: bool, *, special: bool = True, name: str = "prompt", least: int = 1
    ) -> Prompt:
        """Tokenize a prompt. Its ids are None if only the engine's process has the tokenizer.

        in_thread: tokenize in a thread, because the request's text is long. least: tokens of output that must fit, too.
        """
        engine = self.engine
        if not engine.facts.encodes:
            raise APIError("this model has no tokenizer: send token ids as the prompt of /v1/completions")
        if engine.tokenizer is None:
            return Prompt(None, text, special)
        try:
            ids = await _run(in_thread, engine.tokenizer.encode, text, special)
        except TokenizerError as error:
            raise APIError(f"{name}: {error}", param=name.split()[0]) from None
        check_length(len(ids), engine.facts.max_request_len, name, least)
        return Prompt(ids, text, special)

    def check_lengths(self, prompts: Sequence[str | list[int]], least: int) -> None:
        """Reject prompts that cannot fit before doing any work on them."""
        limit = self.engine.facts.max_request_len
        for index, prompt in enumerate(prompts):
            name = one_of(len(prompts), index)
            if isinstance(prompt, SavedTensor):
                self._check_saved(prompt, name)
            elif isinstance(prompt, str):
                readable(len(prompt), limit, name)
            else:
                check_length(len(prompt), limit, name, least)
                self._check_ids(prompt, name)

    def _check_saved(self, saved: SavedTensor, name: str) -> None:
        """Reject a tensor if the server takes none, and one that cannot fit, before it is decoded."""
        facts = self.engine.facts
        if not facts.config.enable_prompt_embeds:
            message = "prompt_embeds is off: send text or token ids, or start the server with --enable-prompt-embeds"
            raise APIError(message, param="prompt_embeds")
        if len(saved) > (most := saved_length(facts.max_request_len, facts.hidden_size)):
            message = f"{name}: prompt_embeds has {len(saved):,} characters, and the longest prompt needs {most:,}"
            raise APIError(f"{message}: send at most {facts.max_request_len:,} rows", param="prompt_embeds")

    def _check_ids(self, ids: list[int], name: str) -> None:
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < self.engine.facts.vocab_size:
                message = f"{name}: token id {shown(token)} is outside the vocabulary of {self.engine.facts.vocab_size}"
                raise APIError(message, param=name.split()[0])

    async def render(self, conversation: Sequence[Message]) -> tuple[str, bool]:
        """Return a conversation in the model's chat template, and whether it is so long as to need a thread."""
        engine, messages = self.engine, turns(conversation)
        length = sum(len(message["content"]) for message in messages)
        readable(length, engine.facts.max_request_len, "messages")
        in_thread = length >= LONG_TEXT
        try:
            if engine.tokenizer is not None:
                return await _run(in_thread, engine.tokenizer.apply_chat_template, messages), in_thread
            return await engine.ask(RenderChat(messages)) if engine.facts.encodes else "", in_thread
        except (InvalidRequest, TokenizerError) as error:
            raise APIError(str(error), param="messages") from error
        except Exception as error:  # a template may raise any exception
            raise APIError(f"the chat template rejects these messages: {error}", param="messages") from error

    async def echo(self, prompt: str | list[int], in_thread: bool, goes_on: bool = False) -> Echo:
        """Return a prompt's text; if the text `goes_on`, without an incomplete character at its end."""
        if isinstance(prompt, str):
            return Echo(prompt, True)
        if not self.engine.facts.encodes:
            return Echo("", False)
        if self.engine.tokenizer is None:
            return Echo(await self.engine.ask(Decode(prompt)), False)
        decode = complete_text if goes_on else Tokenizer.decode
        return Echo(await _run(in_thread, decode, self.engine.tokenizer, prompt), False)

    # ---- responses

    async def respond(
        self,
        prompts: list[Prompt],
        params: SamplingParams,
        form: CompletionForm | ChatForm,
        body: GenerationRequest,
    ) -> Response:
        """Return the response: one JSON document, or a stream of events."""
        usages, options = body.stream_usage(), body.options()
        answer = Answer(form.kind, body.adapter or self.engine.facts.name)
        source = self.engine.stream(prompts, params, form.n, options, True)
        count = len(prompts) * form.n
        if body.stream:
            # Wait for the first delta here: an error before it can still set the HTTP status.
            first = await anext(source)
            return EventStream(self.chunks(answer, form, count, first, source, usages), source)
        done = await self.collect(source, count)
        for i, each in enumerate(done):
            await self.read_tokens(form, i, each, each)
        choices = [form.whole(i, each) for i, each in enumerate(done)]
        generated = form.generated(sum(len(each.token_ids) for each in done))
        return JSONResponse(answer.whole(choices, done[:: form.n], generated) | form.whole_answer(done))

    async def collect(self, source: AsyncGenerator[tuple[Choice, Delta]], count: int) -> list[Completion]:
        """Run `count` choices to their ends; returns their completions in order."""
        ended: dict[int, Completion] = {}
        async with aclosing(source):
            async for choice, delta in source:
                if delta.completion is not None:
                    ended[choice.index] = delta.completion
        return [ended[index] for index in range(count)]

    async def chunks(
        self,
        answer: Answer,
        form: CompletionForm | ChatForm,
        count: int,
        first: tuple[Choice, Delta],
        source: AsyncIterator[tuple[Choice, Delta]],
        usages: StreamOptions,
    ) -> AsyncGenerator[str]:
        """Yield the chunks of a stream, as JSON."""
        prompts: dict[int, Completion] = {}  # the first choice of each prompt seen so far
        generated = 0

        def so_far() -> dict:
            return usage(prompts.values(), form.generated(generated))

        def chunk(choice: dict) -> str:
            if usages.continuous_usage_stats:
                return dumps(answer.chunk([choice], usage=so_far()))
            return f"{answer.opening}{dumps(choice)}{closing}"

        usual = form.is_plain and not usages.continuous_usage_stats
        closing = '],"usage":null}' if usages.include_usage else "]}"
        item: tuple[Choice, Delta] | None = first
        while item is not None:
            choice, delta = item
            if usual and item is not first and delta.finish_reason is None:  # nearly all: written without a dict
                generated += len(delta.token_ids)
                if delta.text or form.ids:  # a token that ends in the middle of a character has no text to send yet
                    yield f"{answer.opening}{form.plain(choice.index, delta)}{closing}"
                item = await anext(source, None)
                continue
            if choice.index % form.n == 0 or choice.index // form.n not in prompts:
                prompts[choice.index // form.n] = choice.completion  # further choices share the first one's prefix
            if item is first:
                for opening in form.openings(count):
                    yield chunk(opening)
            generated += len(delta.token_ids)
            await self.read_tokens(form, choice.index, delta, choice.completion)
            piece = form.piece(choice.index, delta, choice.completion)
            shows = piece.get("text") or piece.get("delta") or piece["logprobs"] or form.ids
            if shows or delta.finish_reason:
                yield chunk(piece)
            item = await anext(source, None)
        if usages.include_usage:
            yield dumps(answer.chunk([], usage=so_far()))

    async def read_tokens(
        self, form: CompletionForm | ChatForm, index: int, gained: Delta | Completion, done: Completion
    ) -> None:
        """Ask the engine's process what log-probabilities show of tokens, if only it has the tokenizer."""
        if self.engine.tokenizer is not None or not self.engine.facts.encodes or gained.logprobs is None:
            return
        entries = itertools.chain(gained.logprobs, done.prompt_logprobs or ())
        await self._look_up(itertools.chain(done.prompt_token_ids, *(each for each in entries if each is not None)))
        prompt, ids = index // form.n, done.prompt_token_ids
        if isinstance(form, CompletionForm) and form.echoes is not None and prompt not in form.located:
            text, written = form.echoes[prompt]
            form.located[prompt] = await self.engine.ask(Offsets(ids, text, written))

    async def _look_up(self, ids: Iterable[int]) -> None:
        """Ask the engine's process for the text of tokens, if only it has the tokenizer."""
        if unknown := self.texts.unknown(ids):
            shown = await self.engine.ask(ShowTokens(unknown))
            self.texts.seen |= {token: TokenText(*entry) for token, entry in zip(unknown, shown, strict=True)}


def _add_loading(app: FastAPI, models: _Models) -> None:
    """Add vLLM's two paths that change the adapters while the server runs."""

    @app.post("/v1/load_lora_adapter", openapi_extra=takes(LoadAdapterRequest))
    async def load_adapter(request: Request) -> Response:
        async def endpoint(body: LoadAdapterRequest) -> Response:
            name = body.lora_name
            if name in {card["id"] for card in await models.cards()}:
                message = f"{shown(name)} is the name of a model or an adapter already: unload it, or choose another"
                raise APIError(message, param="lora_name")
            try:
                await models.named(body.model).engine.ask(LoadAdapter(name, body.lora_path))
            except InvalidRequest as error:
                raise APIError(str(error), param="lora_path") from None
            return JSONResponse({"status": f"adapter {name} is loaded"})

        return await models.answer(request, LoadAdapterRequest, endpoint)

    @app.post("/v1/unload_lora_adapter", openapi_extra=takes(UnloadAdapterRequest))
    async def unload_adapter(request: Request) -> Response:
        async def endpoint(body: UnloadAdapterRequest) -> Response:
            server, adapter = await models.chosen(body.lora_name)
            if adapter is None:
                raise APIError(f"{shown(body.lora_name)} is no adapter", status=404, param="lora_name")
            await server.engine.ask(UnloadAdapter(adapter))
            return JSONResponse({"status": f"adapter {adapter} is unloaded"})

        return await models.answer(request, UnloadAdapterRequest, endpoint)


def _long(texts: Sequence[str | list[int]]) -> bool:
    """Return whether the prompts of a request are to be tokenized in a thread."""
    return sum(map(len, texts)) >= LONG_TEXT


async def _run(in_thread: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on the event loop or, if `in_thread`, in a worker thread."""
    return await asyncio.to_thread(function, *arguments) if in_thread else function(*arguments)


def _report_errors(app: FastAPI) -> None:
    """Send every error to the client in the format of its path: OpenAI's, or Triton's."""

    @app.exception_handler(APIError)
    async def api_error(request: Request, error: APIError) -> Response:
        return refusal(error, request.url.path)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:QUOTED]}: {error.detail}"
        if instead := PATHS.get(request.url.path):
            message += f"; {instead}"
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = allowed(app.routes, request.url.path)
        return refusal(APIError(message, status=error.status_code, headers=headers), request.url.path)

    @app.exception_handler(EngineError)
    async def engine_error(request: Request, error: EngineError) -> Response:
        return refusal(as_api_error(error), request.url.path)
