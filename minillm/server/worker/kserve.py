"""Serve Triton's HTTP API under /v2: KServe's inference protocol, and Triton's generate endpoints.  Lesson 99.

The model takes a text and sampling parameters, one tensor each, and gives a text. `infer` has them as tensors, in JSON
or in Triton's binary form; `generate` and `generate_stream` as plain JSON. Errors have Triton's form, which is
{"error": message}. A text's answer does not repeat its prompt.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from copy import deepcopy
from typing import Annotated, Any, ClassVar, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.exceptions import HTTPException

from minillm.request import Completion, Delta
from minillm.values import QUOTED, shown
from minillm.version import __version__

from . import tensors
from .api_error import APIError, check_members, malformed, unknown_field
from .body import JSON_LENGTH, Form, takes
from .choice import Choice, Prompt
from .event_stream import BareStream
from .protocol import Body, GenerationRequest
from .responses import dumps
from .served_engine import ServedEngine

VERSION = "1"  # of the model; Triton numbers the versions in a model's folder
TEXT = "text_input"
# Each input's datatype. Inputs have one element; only text_input and stop may have several.
INPUTS = {TEXT: "BYTES", "stop": "BYTES", "ignore_eos": "BOOL"}
INPUTS |= dict.fromkeys(("max_tokens", "min_tokens", "top_k"), "INT32") | {"seed": "INT64"}
INPUTS |= dict.fromkeys(("temperature", "top_p", "min_p"), "FP32")
INPUTS |= dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), "FP32")
OUTPUT = "text_output"
SETTINGS = INPUTS.keys() - {TEXT}
BINARY = "binary_data"  # an output's parameter; a request's, for all outputs, is binary_data_output
POSTED = ("/infer", "/generate", "/generate_stream")  # what follows a model's name in paths that take POST
_CONFIG_TYPES = {"BYTES": "TYPE_STRING"}
_NO_EFFECT = ("n", "stream_options", "return_token_ids")  # fields of OpenAI's API that no response here could show


class ServedModel(Protocol):
    """The part of a model that these routes use."""

    engine: ServedEngine

    async def alive(self) -> bool: ...
    async def prompts(self, texts: list[str], n: int) -> list[Prompt]: ...
    async def collect(self, source: AsyncGenerator[tuple[Choice, Delta]], count: int) -> list[Completion]: ...


class Serving(Protocol):
    """The part of the application that these routes use."""

    async def alive(self) -> bool: ...
    def named(self, name: str | None) -> ServedModel: ...
    async def answer(
        self, request: Request, form: type[Form], endpoint: Callable[[Form], Awaitable[Response]]
    ) -> Response: ...


def _describe_parameters(schema: dict[str, Any]) -> None:
    """Let the JSON schema of a `GenerateRequest` say what a client may send."""
    for name in _NO_EFFECT:
        del schema["properties"][name]
    nested = {name: deepcopy(schema["properties"][name]) for name in sorted(SETTINGS | {"stream"})}
    allowed = {"type": "object", "properties": nested, "additionalProperties": False}
    schema["properties"]["parameters"] = {"anyOf": [allowed, {"type": "null"}]}


class GenerateRequest(GenerationRequest):
    """POST generate and generate_stream. `parameters` may hold sampling parameters, as in Triton's vLLM backend."""

    model_config = ConfigDict(json_schema_extra=_describe_parameters)  # pydantic adds it to that of the base
    any_type: ClassVar[bool] = True  # Triton, too, does not look at it

    text_input: str
    id: str | None = None
    parameters: None = None  # merged into the other fields

    @model_validator(mode="before")
    @classmethod
    def _merge_parameters(cls, content: dict) -> dict:
        nested = {} if content.get("parameters") is None else content["parameters"]
        if not isinstance(nested, dict):
            raise APIError(f"parameters must be an object, not {shown(nested)}", param="parameters")
        for name in nested:
            if name not in SETTINGS | {"stream"}:
                raise unknown_field(name, "parameters")
            if name in content:
                raise APIError(f"{name} is given twice: leave it out of parameters", param=name)
        merged = {name: value for name, value in content.items() if name != "parameters"} | nested
        for name in _NO_EFFECT:
            if merged.get(name) not in (None, 1 if name == "n" else None):
                raise APIError(f"{name} is not supported by this endpoint: leave it out", param=name)
        return merged


class OutputRequest(BaseModel):
    """An output that a client asks for."""

    model_config = ConfigDict(strict=True, extra="forbid")
    name: str
    parameters: dict[str, Any] | None = None


class InferRequest(Body):
    """POST infer."""

    any_type: ClassVar[bool] = True
    takes_binary: ClassVar[bool] = True

    id: str | None = None
    inputs: Annotated[list[tensors.InputTensor], Field(min_length=1, max_length=len(INPUTS), fail_fast=True)]
    outputs: Annotated[list[OutputRequest], Field(max_length=1, fail_fast=True)] | None = None
    parameters: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_tensors(cls, content: dict) -> dict:
        for name, form in (("inputs", tensors.InputTensor), ("outputs", OutputRequest)):
            several = content.get(name)
            for i, each in enumerate(several[: len(INPUTS)] if isinstance(several, list) else ()):
                check_members(f"{name}.{i}", each, form)
        return content

    def read(self) -> tuple[list[str], GenerationRequest]:
        """Return the texts, and the sampling parameters that hold for all of them. Raises APIError."""
        elements = tensors.read(self.inputs, INPUTS, self.binary)
        texts = elements.pop(TEXT, [])
        if not texts:
            raise APIError(f"{TEXT} must have at least one text", param=TEXT)
        for name, values in elements.items():
            if name != "stop" and len(values) != 1:
                raise APIError(f"{name} must have one element, which all texts share, not {len(values)}", param=name)
        settings = {name: values if name == "stop" else values[0] for name, values in elements.items()}
        for name, value in (self.parameters or {}).items():
            if name == "binary_data_output":
                continue
            if name not in SETTINGS:
                raise unknown_field(name, "parameters")
            if name in settings:
                raise APIError(f"{name} is given twice: leave it out of parameters", param=name)
            settings[name] = value
        try:
            return texts, GenerationRequest.model_validate(settings)
        except ValidationError as error:
            raise malformed(error.errors(include_url=False, include_input=False)) from None

    def wants_binary(self) -> bool:
        """Return whether the output is to be sent in the binary form."""
        every = bool((self.parameters or {}).get("binary_data_output"))
        for each in self.outputs or ():
            if each.name != OUTPUT:
                raise APIError(f"{shown(each.name)} is not an output of this model: it has {OUTPUT}", param="outputs")
            return bool((each.parameters or {}).get(BINARY, every))
        return every


FORMS = (GenerateRequest, InferRequest)


def add_routes(app: FastAPI, models: Serving) -> None:
    """Add the routes under /v2 to the application."""

    def find(name: str, version: str) -> ServedModel:
        model = models.named(name)
        if version != VERSION:
            message = f"unknown version {version[:QUOTED]!a}: the model has version {VERSION}"
            raise APIError(message, status=404, param="version")
        return model

    async def ready_if(alive: Awaitable[bool]) -> Response:
        if not await alive:
            raise APIError("the engine is not running", status=503)
        return Response()

    async def ready() -> Response:
        """200 while the engine accepts requests, 503 once it is closed or gone."""
        return await ready_if(models.alive())

    @app.get("/v2")
    async def about() -> dict:
        extensions = ["generate", "model_configuration", "binary_tensor_data"]
        return {"name": "minillm", "version": __version__, "extensions": extensions}

    @app.get("/v2/health/live")
    async def live_v2() -> Response:
        return Response()

    app.get("/v2/health/ready")(ready)

    def for_model(method: Callable[..., Callable], action: str, endpoint: Callable, **more: Any) -> None:
        """Add a route of the model, with its version in the path or without."""
        for path in ("/v2/models/{name:path}/versions/{version}", "/v2/models/{name:path}"):
            method(path + action, **more)(endpoint)

    async def model_ready(name: str, version: str = VERSION) -> Response:
        return await ready_if(find(name, version).alive())

    async def config(name: str, version: str = VERSION) -> dict:
        return _config(find(name, version).engine.facts.name)

    async def metadata(name: str, version: str = VERSION) -> dict:
        if name.endswith(POSTED):  # a name may have slashes
            raise HTTPException(405)
        return _metadata(find(name, version).engine.facts.name)

    async def statistics(name: str, version: str = VERSION) -> None:
        find(name, version)
        raise APIError("this server keeps no statistics of a model: /metrics counts requests and times", status=404)

    async def infer(request: Request, name: str, version: str = VERSION) -> Response:
        async def endpoint(body: InferRequest) -> Response:
            model = find(name, version)
            (texts, settings), binary = body.read(), body.wants_binary()
            source = await start(model, texts, settings)
            done = await model.collect(source, len(texts))
            tensor, data = tensors.output(OUTPUT, [each.text for each in done], binary)
            answer = _answer(model, body.id) | {"outputs": [tensor]}
            if not binary:
                return JSONResponse(answer)
            head = json.dumps(answer).encode()
            return Response(head + data, 200, {JSON_LENGTH: str(len(head))}, "application/octet-stream")

        return await models.answer(request, InferRequest, endpoint)

    async def generate(request: Request, name: str, version: str = VERSION) -> Response:
        async def endpoint(body: GenerateRequest) -> Response:
            model = find(name, version)
            if body.stream:
                raise APIError("generate gives one response: send stream: true to generate_stream", param="stream")
            return JSONResponse(await whole(model, body))

        return await models.answer(request, GenerateRequest, endpoint)

    async def generate_stream(request: Request, name: str, version: str = VERSION) -> Response:
        async def endpoint(body: GenerateRequest) -> Response:
            model = find(name, version)
            source = await start(model, [body.text_input], body)
            if body.stream is False:
                (done,) = await model.collect(source, 1)
                return BareStream(_once(_answer(model, body.id) | {OUTPUT: done.text}), source)
            # Wait for the first delta here: an error before it can still set the HTTP status.
            first = await anext(source)
            return BareStream(_pieces(_answer(model, body.id), first, source), source)

        return await models.answer(request, GenerateRequest, endpoint)

    async def start(
        model: ServedModel, texts: list[str], settings: GenerationRequest
    ) -> AsyncGenerator[tuple[Choice, Delta]]:
        params, options = settings.sampling(), settings.options()
        return model.engine.stream(await model.prompts(texts, 1), params, 1, options)

    async def whole(model: ServedModel, body: GenerateRequest) -> dict:
        (done,) = await model.collect(await start(model, [body.text_input], body), 1)
        return _answer(model, body.id) | {OUTPUT: done.text}

    for_model(app.get, "/ready", model_ready)
    for_model(app.get, "/config", config)
    for_model(app.get, "/stats", statistics, include_in_schema=False)
    for_model(app.post, "/infer", infer, openapi_extra=takes(InferRequest))
    for_model(app.post, "/generate", generate, openapi_extra=takes(GenerateRequest))
    for_model(app.post, "/generate_stream", generate_stream, openapi_extra=takes(GenerateRequest))
    for_model(app.get, "", metadata)  # last: a name would match the others' paths, too


def _answer(model: ServedModel, request_id: str | None) -> dict:
    named = {} if request_id is None else {"id": request_id}
    return named | {"model_name": model.engine.facts.name, "model_version": VERSION}


async def _once(event: dict) -> AsyncGenerator[str]:
    yield dumps(event)


async def _pieces(
    envelope: dict, first: tuple[Choice, Delta], source: AsyncIterator[tuple[Choice, Delta]]
) -> AsyncGenerator[str]:
    """Yield an event for each delta with text, and for the last one."""
    item: tuple[Choice, Delta] | None = first
    while item is not None:
        _, delta = item
        if delta.text or delta.finish_reason:
            yield dumps(envelope | {OUTPUT: delta.text})
        item = await anext(source, None)


def _metadata(model: str) -> dict:
    inputs = [
        {"name": name, "datatype": datatype, "shape": [-1 if name in (TEXT, "stop") else 1]}
        for name, datatype in INPUTS.items()
    ]
    outputs = [{"name": OUTPUT, "datatype": "BYTES", "shape": [-1]}]
    return {"name": model, "versions": [VERSION], "platform": "minillm", "inputs": inputs, "outputs": outputs}


def _config(model: str) -> dict:
    """Return the model's configuration, with the names and types of Triton's config.pbtxt."""

    def form(tensor: dict) -> dict:
        kind = tensor["datatype"]
        return {"name": tensor["name"], "data_type": _CONFIG_TYPES.get(kind, f"TYPE_{kind}"), "dims": tensor["shape"]}

    facts = _metadata(model)
    inputs = [form(each) | {"optional": each["name"] != TEXT} for each in facts["inputs"]]
    outputs = [form(each) for each in facts["outputs"]]
    return {"name": model, "backend": "minillm", "max_batch_size": 0, "input": inputs, "output": outputs}
