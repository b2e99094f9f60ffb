"""The routes: OpenAI's completions and chat completions over an engine, health and metrics.  Lesson 99.

The engine is anything with `AsyncLLM`'s `stream(prompt, params)`, `stats()`, `tokenizer`, `model_config` and
`max_model_len`: the application owns no model, so it may run in another process than the engine.
"""

import asyncio
import time
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from minillm.request import Completion, Delta, InvalidRequest

from .metrics import Metrics
from .protocol import APIError, ChatRequest, CompletionRequest, GenerationRequest, Prompt, malformed
from .responses import (
    Answer,
    TokenTexts,
    chat_choice,
    chat_logprobs,
    completion_choice,
    completion_logprobs,
    usage,
)
from .streams import ClientGone, EventStream, Job, as_api_error, deltas, finish, unless_disconnected

LONG_TEXT = 10_000  # characters from which tokenizing would hold up everyone else's tokens


def create_app(engine, model: str) -> FastAPI:
    """The application that serves `engine` under the name `model`."""
    app = FastAPI(title="minillm", description="An OpenAI-compatible server over the minillm engine.")
    server = _Server(engine, model)
    _report_errors(app)

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine takes requests, 503 once it is closed."""
        if engine.alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "the engine is closed"}, status_code=503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.render(engine.stats()), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [server.card]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict:
        server.check_model(name)
        return server.card

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await server.answer(request, body, server.complete)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await server.answer(request, body, server.chat)

    return app


class _Server:
    """What the routes share: the engine, the name it is served under, and the counters."""

    def __init__(self, engine, model: str):
        self.engine, self.model = engine, model
        self.texts = TokenTexts(engine.tokenizer)
        self.metrics = Metrics()
        self.max_model_len = engine.max_model_len
        self.card = {
            "id": model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "minillm",
            "max_model_len": self.max_model_len,
            "vocab_size": engine.model_config.vocab_size,
        }

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.model):
            message = f"the model {name!r} is not served here; {self.model!r} is"
            raise APIError(message, status=404, param="model", code="model_not_found")

    async def answer(self, request: Request, body: GenerationRequest, endpoint) -> Response:
        """Run an endpoint, count its answer, and stop its work when the client hangs up."""
        status = 500
        try:
            self.check_model(body.model)
            response = await unless_disconnected(request.receive, endpoint(body))
            status = response.status_code
            return response
        except ClientGone:
            status = 499
            return Response(status_code=status)
        except Exception as error:
            wrong = as_api_error(error)
            status = wrong.status
            raise wrong from error
        finally:
            self.metrics.requests.labels(str(status)).inc()

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self.engine.tokenizer is None:
            raise APIError("this model has no tokenizer: send token ids as the prompt of /v1/completions")
        if len(text) < LONG_TEXT:
            return self.engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.engine.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        ids = await self.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        vocab_size = self.engine.model_config.vocab_size
        if stranger := next((token for token in ids if not 0 <= token < vocab_size), None):
            raise APIError(f"prompt: token id {stranger} is outside the vocabulary of {vocab_size}", param="prompt")
        return ids

    def room(self, ids: list[int], param: str) -> int:
        """Tokens left for the output in the model's context."""
        room = self.max_model_len - len(ids)
        if room < 1:
            message = f"{param} has {len(ids)} tokens, and with one more would not fit the context of "
            message += f"{self.max_model_len}: shorten it"
            raise APIError(message, param=param, code="context_length_exceeded")
        return room

    async def complete(self, body: CompletionRequest) -> Response:
        prompts, params, include_usage = body.prompts(), body.params(), body.include_usage
        jobs: list[Job] = []
        echoes: list[str | None] = []
        for prompt in prompts:
            ids = await self.tokenize(prompt)
            self.room(ids, "prompt")
            jobs += [(ids, each) for each in params]
            echoes += [self.echo(prompt) if body.echo else None] * len(params)
        answer, ids = Answer("text_completion", self.model), bool(body.return_token_ids)
        if not body.stream:
            done = await self.finish(jobs)
            options = {"top": body.logprobs, "scores_only": body.scores_only, "ids": ids}
            choices = [
                completion_choice(i, each, self.texts, echo=echo, **options)
                for i, (each, echo) in enumerate(zip(done, echoes, strict=True))
            ]
            return JSONResponse(answer.whole(choices, *self.count(jobs, len(params), choices, done)))

        offsets = [0] * len(jobs)

        def piece(index: int, delta: Delta) -> dict:
            choice = {
                "index": index,
                "text": delta.text,
                "logprobs": None,
                "finish_reason": delta.finish_reason,
            }
            if body.logprobs is not None:
                form = completion_logprobs(self.texts, delta.token_ids, delta.logprobs, body.logprobs, offsets[index])
                offsets[index] += sum(map(len, form["tokens"]))
                choice["logprobs"] = form
            return choice

        def opening(index: int) -> dict:
            offsets[index] = len(echoes[index])
            return {"index": index, "text": echoes[index], "logprobs": None, "finish_reason": None}

        openings = [opening(index) for index in range(len(jobs))] if body.echo else []
        return EventStream(await self.stream(answer, jobs, len(params), openings, piece, ids, include_usage))

    async def chat(self, body: ChatRequest) -> Response:
        ids = await self.encode(self.render(body), add_special_tokens=False)
        params, include_usage = body.params(self.room(ids, "messages")), body.include_usage
        jobs: list[Job] = [(ids, each) for each in params]
        top = (body.top_logprobs or 0) if body.logprobs else None
        answer, return_ids = Answer("chat.completion", self.model), bool(body.return_token_ids)
        if not body.stream:
            done = await self.finish(jobs)
            choices = [chat_choice(i, each, self.texts, top=top, ids=return_ids) for i, each in enumerate(done)]
            return JSONResponse(answer.whole(choices, *self.count(jobs, len(params), choices, done)))

        def piece(index: int, delta: Delta) -> dict:
            said = {"content": delta.text} if delta.text else {}
            choice = {"index": index, "delta": said, "logprobs": None, "finish_reason": delta.finish_reason}
            if top is not None:
                choice["logprobs"] = chat_logprobs(self.texts, delta.token_ids, delta.logprobs, top)
            return choice

        role = {"role": "assistant", "content": ""}
        openings = [{"index": i, "delta": role, "logprobs": None, "finish_reason": None} for i in range(len(jobs))]
        return EventStream(await self.stream(answer, jobs, len(params), openings, piece, return_ids, include_usage))

    def render(self, body: ChatRequest) -> str:
        if self.engine.tokenizer is None:
            raise APIError("this model has no tokenizer: send token ids to /v1/completions")
        try:
            return self.engine.tokenizer.apply_chat_template([message.plain() for message in body.messages])
        except Exception as error:  # a template may refuse a conversation with any exception of its own
            raise APIError(f"the chat template refuses these messages: {error}", param="messages") from error

    def echo(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        return self.engine.tokenizer.decode(prompt) if self.engine.tokenizer is not None else ""

    async def finish(self, jobs: list[Job]) -> list[Completion]:
        done = await finish(self.engine, jobs)
        for each in done:
            self.metrics.observe(each)
        return done

    @staticmethod
    def count(jobs: list[Job], n: int, choices: list[dict], done: list[Completion]) -> tuple[int, int]:
        """(prompt tokens, each prompt counted once however many choices it has; tokens generated)."""
        return sum(len(ids) for ids, _ in jobs[::n]), sum(len(each.token_ids) for each in done)

    async def stream(
        self,
        answer: Answer,
        jobs: list[Job],
        n: int,
        openings: list[dict],
        piece,
        ids: bool,
        include_usage: bool,
    ) -> AsyncIterator[dict]:
        """The chunks of an answer. The first delta is awaited here: until then an error has its HTTP status."""
        source = deltas(self.engine, jobs)
        first = await anext(source)
        more = {"usage": None} if include_usage else {}

        async def chunks() -> AsyncIterator[dict]:
            generated = 0
            try:
                for choice in openings:
                    yield answer.chunk([choice], **more)
                item = first
                while item is not None:
                    index, delta = item
                    generated += len(delta.token_ids)
                    if delta.completion is not None:
                        self.metrics.observe(delta.completion)
                    choice = piece(index, delta)
                    if ids:
                        choice["token_ids"] = delta.token_ids
                    # Tokens whose characters are still incomplete have nothing to show yet.
                    if delta.text or delta.finish_reason or ids or choice["logprobs"]:
                        yield answer.chunk([choice], **more)
                    item = await anext(source, None)
                if include_usage:
                    prompt_tokens = sum(len(prompt) for prompt, _ in jobs[::n])
                    yield answer.chunk([], usage=usage(prompt_tokens, generated))
            finally:
                await source.aclose()

        return chunks()


def _report_errors(app: FastAPI) -> None:
    """Every error a client sees has OpenAI's form."""

    @app.exception_handler(APIError)
    async def api_error(_: Request, error: APIError) -> Response:
        return JSONResponse(error.body, status_code=error.status)

    @app.exception_handler(InvalidRequest)
    async def invalid_request(_: Request, error: InvalidRequest) -> Response:
        return await api_error(_, as_api_error(error))

    @app.exception_handler(RequestValidationError)
    async def validation(_: Request, error: RequestValidationError) -> Response:
        return await api_error(_, malformed(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        wrong = APIError(message, status=error.status_code)
        return JSONResponse(wrong.body, status_code=error.status_code, headers=error.headers)
