"""Describe the API in /openapi.json, from which tools make clients, tests and catalogs.  Lesson 99.

FastAPI lists the paths; here they get the bodies that they take and all answers that they give. Every schema is in
`components/schemas`, and every reference is to there: many tools resolve no other.
"""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from minillm.request_values import RANGES, WHOLE

from ..limits import MAX_STOP_LENGTH
from .gate import HEALTH, OPEN
from .protocol import SIZES, Body

PLACE = "#/components/schemas/"
TEXT, BINARY = {"type": "string"}, {"type": "string", "format": "binary"}
STREAM = {"description": "server-sent events, whose data are JSON objects, and [DONE] at the end of OpenAI's"}


def _object(required: str = "", **properties: Any) -> dict:
    """Return the schema of an object with at least these members, of which the first ones are always there."""
    return {"type": "object", "required": required.split(), "properties": properties, "additionalProperties": True}


def _list(items: dict) -> dict:
    return {"type": "array", "items": items}


STRING, NUMBER, INTEGER = {"type": "string"}, {"type": "number"}, {"type": "integer"}
STOP = {"minLength": 1, "maxLength": MAX_STOP_LENGTH}
TOKEN_ID = {"pattern": "^(0|[1-9][0-9]{0,9})$"}
BIAS = {"minimum": -100, "maximum": 100}
MAYBE = {"anyOf": [STRING, {"type": "null"}]}
CHOICES = _list(_object("index finish_reason", index=INTEGER, finish_reason=MAYBE, text=STRING, message=_object()))
TENSOR = _object("name datatype shape", name=STRING, datatype=STRING, shape=_list(INTEGER))
SCHEMAS: dict[str, dict] = {
    "Error": _object("error", error=_object("message type", message=STRING, type=STRING, param=MAYBE, code=MAYBE)),
    "TritonError": _object("error", error=STRING),
    "Status": _object("status", status=STRING),
    "Version": _object("version", version=STRING),
    "State": _object(),
    "Model": _object("id object created owned_by", id=STRING, object=STRING, created=INTEGER, owned_by=STRING),
    "Models": _object("object data", object=STRING, data=_list({"$ref": PLACE + "Model"})),
    "Answer": _object(
        "id object created model choices usage",
        id=STRING,
        object=STRING,
        created=INTEGER,
        model=STRING,
        choices=CHOICES,
        usage=_object(
            "prompt_tokens completion_tokens total_tokens",
            prompt_tokens=INTEGER,
            completion_tokens=INTEGER,
            total_tokens=INTEGER,
        ),
    ),
    "Tokens": _object("count max_model_len tokens", count=INTEGER, max_model_len=INTEGER, tokens=_list(INTEGER)),
    "Text": _object("prompt", prompt=STRING),
    "Server": _object("name version extensions", name=STRING, version=STRING, extensions=_list(STRING)),
    "Metadata": _object("name versions platform inputs outputs", name=STRING, versions=_list(STRING)),
    "Configuration": _object("name backend input output", name=STRING, backend=STRING),
    "Tensors": _object("model_name model_version outputs", model_name=STRING, outputs=_list(TENSOR)),
    "Generated": _object("model_name model_version text_output", model_name=STRING, text_output=STRING),
}


JSON, EVENTS = "application/json", "text/event-stream"
Content = dict[str, str | dict]  # an answer by media type: a schema, or the name of one


def _same(content: Content, *ends: str) -> list[tuple[str, Content]]:
    return [(end, content) for end in ends]


ANSWERS: tuple[tuple[str, Content], ...] = (  # the end of a path, and its answer; the first end that fits counts
    ("/chat/completions", {JSON: "Answer", EVENTS: STREAM}),
    ("/completions", {JSON: "Answer", EVENTS: STREAM}),
    ("/detokenize", {JSON: "Text"}),
    ("/tokenize", {JSON: "Tokens"}),
    ("/metrics", {"text/plain": TEXT}),
    ("/engine/state", {JSON: "State"}),
    ("/version", {JSON: "Version"}),
    ("/v1/models", {JSON: "Models"}),
    ("/v1/models/{name}", {JSON: "Model"}),
    ("/infer", {JSON: "Tensors", "application/octet-stream": BINARY}),
    ("/generate_stream", {EVENTS: STREAM}),
    ("/generate", {JSON: "Generated"}),
    ("/config", {JSON: "Configuration"}),
    ("/v2", {JSON: "Server"}),
    *_same({JSON: "Status"}, "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *_same({}, "/v2/health/live", "/v2/health/ready", "}/ready"),
    *_same({JSON: "Status"}, *HEALTH),
    ("", {JSON: "Metadata"}),
)
ANY = {  # what any path may answer, before the application sees the request
    400: "the request is not valid",
    408: "the request did not arrive in time",
    421: "the server takes no requests for this host",
    431: "the headers are too large",
    501: "the transfer coding is not supported, or a package is not installed",
}
LOCKED = {401: "the API key is missing or wrong"}
NAMED = {404: "there is no such model"}
ASKS = {  # the engine's process
    500: "the engine failed",
    503: "the engine is not there: it stops, or another one starts",
}
STARTS = {
    403: "the server takes no requests from web pages of this origin",
    404: "there is no such model",
    413: "the body is too large",
    415: "the body is compressed, or not Unicode",
    429: "the server is busy: Retry-After says when to try again",
    504: "the request was aborted at a deadline",
}
NO_ENGINE = ("/version", "/v1/health/live", "/v2", "/v2/health/live")  # paths that do not ask it


def describe(app: FastAPI, forms: Sequence[type[Body]], vocab_size: int) -> None:
    """Let the application describe itself.

    forms: of the bodies that its paths take, as `body.takes` names them. vocab_size: token ids end below it.
    """
    made: list[dict] = []

    def openapi() -> dict:
        if not made:
            made.append(_described(app, forms, vocab_size))
        return made[0]

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to replace it


def _described(app: FastAPI, forms: Sequence[type[Body]], vocab_size: int) -> dict:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, schemas = models_json_schema([(form, "validation") for form in forms], ref_template=PLACE + "{model}")
    for form in forms:
        _bound(schemas["$defs"][form.__name__]["properties"], vocab_size)
    document["components"] = {
        "schemas": schemas["$defs"] | SCHEMAS,
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "if the server has a key"}},
    }
    document["security"] = [{}, {"key": []}]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            operation["responses"] = _answers(path, method)
            in_path = [each for each in operation.pop("parameters", ()) if each["in"] == "path"]
            if in_path:
                operation["parameters"] = in_path
    return document


def _bound(properties: dict[str, dict], vocab_size: int) -> None:
    """Add the limits of sampling parameters and token ids, which are not checked by pydantic."""
    for name, schema in properties.items():
        kinds = schema.get("anyOf", [schema])
        if schema.get("default", 0) is None and {"type": "null"} not in kinds:
            del schema["default"]  # it stands for a missing value, and is none that may be sent
        for kind in kinds:
            match kind.get("type"):
                case "integer" if name in WHOLE:
                    kind |= {"minimum": WHOLE[name][0], "maximum": WHOLE[name][1] - 1}
                case "number" if name in RANGES:
                    kind |= {"minimum": RANGES[name][0], "maximum": RANGES[name][1]}
                case "string" if name == "stop":
                    kind |= STOP
                case "array" | "object" if name in SIZES:
                    kind |= {"maxItems" if kind["type"] == "array" else "maxProperties": SIZES[name][0]}
                case "object" if "properties" in kind:
                    _bound(kind["properties"], vocab_size)
            match name:
                case "top_p" if "minimum" in kind:
                    kind["exclusiveMinimum"] = kind.pop("minimum")
                case "stop" if "items" in kind:
                    kind["items"] |= STOP
                case "logit_bias" if "maxProperties" in kind:
                    kind |= {"propertyNames": TOKEN_ID, "additionalProperties": NUMBER | BIAS}
                case "prompt" | "tokens" | "stop_token_ids":
                    _bound_ids(kind, vocab_size)


def _bound_ids(schema: dict, vocab_size: int) -> None:
    """Bound the token ids in lists of them, or in lists of such lists."""
    if schema.get("type") == "integer":
        schema |= {"minimum": 0, "maximum": vocab_size - 1}
    elif "items" in schema:
        _bound_ids(schema["items"], vocab_size)


def _answers(path: str, method: str) -> dict[str, dict]:
    """Return every answer of a path, by status."""
    content = next(answers for end, answers in ANSWERS if path.endswith(end))
    statuses = dict(ANY)
    if path not in OPEN:
        statuses |= LOCKED
    if "{name}" in path:
        statuses |= NAMED
    if path not in NO_ENGINE:
        statuses |= ASKS
    if method == "post":
        statuses |= STARTS if not path.endswith("/ping") else {403: STARTS[403]}
    error = "TritonError" if path.startswith("/v2") else "Error"
    by_status = {"200": _answer("the answer", {kind: _reference(schema) for kind, schema in content.items()})}
    for status, words in sorted(statuses.items()):
        schemas: list[dict] = [_reference(error)]
        if status == 503 and path in HEALTH and not path.startswith("/v2"):
            schemas.append(_reference("Status"))
        if status == 400 and error == "TritonError":  # what is not HTTP has no path
            schemas.append(_reference("Error"))
        by_status[str(status)] = _answer(words, {JSON: schemas[0] if len(schemas) == 1 else {"anyOf": schemas}})
    return by_status


def _answer(words: str, content: dict[str, dict]) -> dict:
    kinds = {kind: {"schema": schema} for kind, schema in content.items()}
    return {"description": words} | ({"content": kinds} if kinds else {})


def _reference(schema: str | dict) -> dict:
    return {"$ref": PLACE + schema} if isinstance(schema, str) else schema
