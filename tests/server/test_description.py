"""/openapi.json, as generators of clients and tests read it."""

import re
from collections.abc import Iterator

import httpx
import jsonschema
import pytest

from tests.waiting import TIMEOUT

PLACE = "#/components/schemas/"
TURNS = [{"role": "user", "content": "hi"}]
MODEL = "/v2/models/{name}"
TEXTS = [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}]
BODIES = {  # a body that each path answers with 200
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 1, "temperature": 0.5, "stop": ["x"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/ping": None,
    f"{MODEL}/infer": {"inputs": TEXTS},
    f"{MODEL}/generate": {"text_input": "a", "parameters": {"max_tokens": 1}},
    f"{MODEL}/generate_stream": {"text_input": "a", "max_tokens": 1},
}


@pytest.fixture(scope="module")
def http(here):
    return here.client


@pytest.fixture(scope="module")
def described(http):
    return http.get("/openapi.json").json()


def inside(value) -> Iterator[tuple[str, object]]:
    """Every member of every object in a JSON document."""
    if isinstance(value, dict):
        yield from value.items()
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from inside(each)


def operations(described) -> Iterator[tuple[str, str, dict]]:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def test_every_reference_leads_to_a_component(described):
    schemas = described["components"]["schemas"]
    references = [value for name, value in inside(described) if name == "$ref"]
    assert len(references) > 100
    for reference in references:
        assert reference.startswith(PLACE) and reference.removeprefix(PLACE) in schemas, reference
    assert not [name for name, _ in inside(described) if name in ("$id", "$defs")]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_default_is_a_valid_value(described):
    """Strict readers of OpenAPI refuse the whole document otherwise."""
    fields = [each for _, each in inside(described["components"]["schemas"]) if isinstance(each, dict)]
    defaults = [each for each in fields if "default" in each]
    assert len(defaults) > 50
    for each in defaults:
        validator(described, each).validate(each["default"])


def test_every_operation_has_a_name_of_its_own_and_path_parameters_only(described):
    names = [operation["operationId"] for *_, operation in operations(described)]
    assert len(names) == len(set(names)) == 30
    for path, _, operation in operations(described):
        given = [(each["name"], each["in"]) for each in operation.get("parameters", ())]
        assert given == [(name, "path") for name in re.findall(r"\{(\w+)\}", path)]


def validator(described, schema) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema | {"components": described["components"]})


def check(described, operation, answer) -> None:
    """Check an answer against the description: its status, media type and content."""
    status = str(answer.status_code)
    assert status in operation["responses"], answer.text
    content = operation["responses"][status].get("content", {})
    kind = answer.headers.get("content-type", "").split(";")[0]
    assert kind in content if answer.content else not content or kind in content
    if kind == "application/json":
        validator(described, content[kind]["schema"]).validate(answer.json())


def filled(path: str) -> str:
    return path.replace("{name}", "small-random").replace("{version}", "1")


def test_answers_are_as_described(http, described):
    for path, method, operation in operations(described):
        body = BODIES.get(path.replace("/versions/{version}", "")) if method == "post" else None
        answer = http.request(method, filled(path), json=body)
        assert answer.status_code == 200, (path, answer.text)
        check(described, operation, answer)
        if body is not None:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            validator(described, schema).validate(body)
    for path in ("/v1/completions", "/v1/chat/completions"):
        streamed = http.post(path, json=BODIES[path] | {"stream": True})
        check(described, described["paths"][path]["post"], streamed)


WRONG = {  # what makes each status of a refusal before any work
    400: {"content": "{", "headers": {"content-type": "application/json"}},
    403: {"content": "{}", "headers": {"content-type": "application/json", "origin": "http://a.example"}},
    413: {"content": b" " * (1 << 25), "headers": {"content-type": "application/json"}},
    415: {"content": "{}", "headers": {"content-encoding": "gzip", "content-type": "application/json"}},
    421: {"content": "{}", "headers": {"host": "a.example"}},
}
TOO_LARGE = {"x": "a" * (1 << 17)}  # headers that are refused as they are read from the socket


@pytest.mark.parametrize("status", WRONG)
def test_refusals_are_as_described(http, described, status):
    for path, method, operation in operations(described):
        if method != "post" or path == "/ping" and status != 403:
            continue
        answer = http.post(filled(path), **WRONG[status])
        assert answer.status_code == status, (path, answer.text)
        check(described, operation, answer)
        assert str(status) in operation["responses"]
    for path, _, operation in operations(described):
        if "{name}" in path:
            answer = http.get(path.replace("{name}", "none").replace("{version}", "1"))
            assert answer.status_code in (404, 405)
            if answer.status_code == 404:
                check(described, operation, answer)


def test_headers_that_are_too_large_are_refused_before_the_path_is_known(server, described):
    for path, method, operation in operations(described):
        assert httpx.request(method, server.url + filled(path), headers=TOO_LARGE, timeout=TIMEOUT).status_code == 431
        assert "431" in operation["responses"]


def test_every_path_documents_what_any_server_may_answer(described):
    for path, method, operation in operations(described):
        found = set(map(int, operation["responses"]))
        assert found >= {200, 400, 408, 421, 431}, path
        if method == "post" and path != "/ping":
            assert found >= {401, 403, 404, 413, 415, 429, 500, 501, 503, 504}, path
        if "{name}" in path:
            assert 404 in found, path
    assert "401" not in described["paths"]["/health"]["get"]["responses"]
    assert "401" in described["paths"]["/v1/models"]["get"]["responses"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": -1},
        {"temperature": -1},
        {"top_k": -2},
        {"logprobs": 21},
        {"stop": ["a"] * 17},
        {"stop": ""},
        {"stop": ["a" * 257]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [4096]},
        {"top_p": 0},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"05": 1}},
        {"logit_bias": {"5": 101}},
        {"seed": 2**63},
        {"n": 0},
        {"prompt": []},
        {"prompt": [["a"]]},
        {"prompt": [-1]},
        {"prompt": [[5], [4096]]},
        {"prompt": 5},
        {"temprature": 1},
    ],
    ids=str,
)
def test_the_schema_refuses_what_the_server_refuses(http, described, wrong):
    body = BODIES["/v1/completions"] | wrong
    schema = described["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert not validator(described, schema).is_valid(body)
    assert http.post("/v1/completions", json=body).status_code == 400


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("/detokenize", {"tokens": [4096]}),
        ("/detokenize", {"tokens": [-1]}),
        (f"{MODEL}/generate", {"parameters": {"top_q": 1}}),
        (f"{MODEL}/generate", {"parameters": {"n": 1}}),
        (f"{MODEL}/generate", {"parameters": {"temperature": -1}}),
        (f"{MODEL}/generate", {"parameters": False}),
        (f"{MODEL}/generate", {"stop": [""]}),
    ],
    ids=str,
)
def test_the_schemas_of_other_paths_refuse_what_the_server_refuses(http, described, path, wrong):
    schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert validator(described, schema).is_valid(BODIES[path])
    assert not validator(described, schema).is_valid(BODIES[path] | wrong)
    assert http.post(filled(path), json=BODIES[path] | wrong).status_code == 400


def test_the_schema_accepts_what_the_server_accepts(http, described):
    body = {"prompt": [[4095, 0]], "stop": ["a" * 256], "stop_token_ids": [4095], "logit_bias": {"0": -100, "9": 0.5}}
    schema = described["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for more in ({}, dict.fromkeys(("stop", "stop_token_ids", "logit_bias", "top_p")), {"stop": []}):
        validator(described, schema).validate(body | more)
        assert http.post("/v1/completions", json=body | {"max_tokens": 1} | more).status_code == 200
