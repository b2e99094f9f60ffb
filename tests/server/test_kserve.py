"""Triton's /v2: KServe's inference protocol, and the generate endpoints."""

import asyncio
import json
import struct

import httpx
import pytest

from minillm.request import SamplingParams
from minillm.server import running
from tests.waiting import TIMEOUT

PROMPTS = ["The river", "A stone at Högg"]
TOKENS = 8
MODEL = "/v2/models/small-random"
SETTINGS = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
TYPES = {"max_tokens": "INT32", "temperature": "FP32", "ignore_eos": "BOOL", "seed": "INT64", "text_input": "BYTES"}


@pytest.fixture(scope="module")
def http(here):
    return here.client


@pytest.fixture(scope="module")
def expected(engine):
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    texts = [asyncio.run(engine.generate(prompt, params)).text for prompt in PROMPTS]
    assert len(set(texts)) > 1, "different prompts must give different answers, or their order cannot be checked"
    return texts


def tensor(name, values, **more):
    return {"name": name, "datatype": TYPES[name], "shape": [len(values)], "data": values} | more


def inputs(texts, **settings):
    return [tensor("text_input", texts), *(tensor(name, [value]) for name, value in (SETTINGS | settings).items())]


def binary_body(tensors, **more):
    """The request's bytes and its headers, with all tensors in the binary form."""
    data, described = b"", []
    forms = {"INT32": "<i", "FP32": "<f", "BOOL": "<?", "INT64": "<q"}
    for each in tensors:
        kind = each["datatype"]
        if kind == "BYTES":
            texts = map(str.encode, each["data"])
            part = b"".join(struct.pack("<I", len(text)) + text for text in texts)
        else:
            part = b"".join(struct.pack(forms[kind], value) for value in each["data"])
        named = {name: value for name, value in each.items() if name != "data"}
        described.append(named | {"parameters": {"binary_data_size": len(part)}})
        data += part
    head = json.dumps({"inputs": described} | more).encode()
    return head + data, {"inference-header-content-length": str(len(head))}


def events(response):
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]


def test_health_and_metadata_name_the_model_and_its_tensors(http):
    for path in ("/v2/health/live", "/v2/health/ready", f"{MODEL}/ready", f"{MODEL}/versions/1/ready"):
        assert http.get(path).status_code == 200, path
    assert http.get("/v2").json()["name"] == "minillm"
    facts = http.get(MODEL).json()
    assert facts == http.get(f"{MODEL}/versions/1").json()
    assert facts["name"] == "small-random" and facts["versions"] == ["1"]
    assert {each["name"]: each["datatype"] for each in facts["inputs"]}.items() >= TYPES.items()
    assert facts["outputs"] == [{"name": "text_output", "datatype": "BYTES", "shape": [-1]}]
    config = http.get(f"{MODEL}/config").json()
    kinds = {each["name"]: (each["data_type"], each["optional"]) for each in config["input"]}
    assert kinds["text_input"] == ("TYPE_STRING", False) and kinds["max_tokens"] == ("TYPE_INT32", True)


def test_infer_answers_each_text_with_the_engines_output(http, expected):
    body = {"id": "7", "inputs": inputs(PROMPTS)}
    for path in (f"{MODEL}/infer", f"{MODEL}/versions/1/infer"):
        assert http.post(path, json=body).json() == {
            "id": "7",
            "model_name": "small-random",
            "model_version": "1",
            "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [2], "data": expected}],
        }


def test_nested_data_and_parameters_of_the_request_are_read(http, expected):
    texts = tensor("text_input", [[text] for text in PROMPTS], shape=[2, 1])
    body = {"inputs": [texts], "parameters": SETTINGS | {"binary_data_output": False}}
    assert http.post(f"{MODEL}/infer", json=body).json()["outputs"][0]["data"] == expected


def test_binary_tensors_are_read_and_sent(http, expected):
    content, headers = binary_body(inputs(PROMPTS), parameters={"binary_data_output": True})
    answer = http.post(f"{MODEL}/infer", content=content, headers=headers)
    length = int(answer.headers["inference-header-content-length"])
    (output,) = json.loads(answer.content[:length])["outputs"]
    data = b"".join(struct.pack("<I", len(text)) + text for text in map(str.encode, expected))
    assert output == {
        "name": "text_output",
        "datatype": "BYTES",
        "shape": [2],
        "parameters": {"binary_data_size": len(data)},
    }
    assert answer.content[length:] == data


def test_an_output_says_itself_whether_it_is_binary(http, expected):
    outputs = [{"name": "text_output", "parameters": {"binary_data": False}}]
    content, headers = binary_body(inputs(PROMPTS), parameters={"binary_data_output": True}, outputs=outputs)
    answer = http.post(f"{MODEL}/infer", content=content, headers=headers)
    assert answer.json()["outputs"][0]["data"] == expected


@pytest.mark.parametrize("nested", [False, True])
def test_generate_answers_in_one_object(http, expected, nested):
    settings = {"parameters": SETTINGS | {"stream": False}} if nested else SETTINGS
    answer = http.post(f"{MODEL}/generate", json={"text_input": PROMPTS[0], "id": "a"} | settings)
    named = {"id": "a", "model_name": "small-random", "model_version": "1"}
    assert answer.json() == named | {"text_output": expected[0]}


def test_generate_stream_sends_the_text_in_pieces(http, expected):
    body = {"text_input": PROMPTS[1]} | SETTINGS
    streamed = events(http.post(f"{MODEL}/generate_stream", json=body | {"stream": True}))
    assert len(streamed) > 2 and "".join(each["text_output"] for each in streamed) == expected[1]
    assert {each["model_name"] for each in streamed} == {"small-random"}
    (whole,) = events(http.post(f"{MODEL}/generate_stream", json=body | {"stream": False}))
    assert whole["text_output"] == expected[1]


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain", "application/octet-stream"])
def test_the_content_type_makes_no_difference_as_it_makes_none_to_triton(http, expected, kind):
    """curl -d says application/x-www-form-urlencoded, and Triton's own tests say nothing."""

    def post(action, body):
        headers = {} if kind is None else {"content-type": kind}
        return http.post(f"{MODEL}/{action}", content=json.dumps(body), headers=headers)

    text = {"text_input": PROMPTS[0]} | SETTINGS
    assert post("generate", text).json()["text_output"] == expected[0]
    assert "".join(each["text_output"] for each in events(post("generate_stream", text))) == expected[0]
    assert post("infer", {"inputs": inputs(PROMPTS)}).json()["outputs"][0]["data"] == expected


def test_statistics_are_said_to_be_missing(http):
    for path in (f"{MODEL}/stats", f"{MODEL}/versions/1/stats"):
        answer = http.get(path)
        assert answer.status_code == 404 and "keeps no statistics" in answer.json()["error"]
    assert "unknown model 'x'" in http.get("/v2/models/x/stats").json()["error"]


def test_a_seed_makes_samples_repeatable(http):
    def sample(seed):
        body = {"inputs": inputs(PROMPTS[:1], temperature=2.0, seed=seed)}
        return http.post(f"{MODEL}/infer", json=body).json()["outputs"][0]["data"]

    assert sample(5) == sample(5) != sample(6)


TEXTS = tensor("text_input", PROMPTS)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ([], "inputs"),
        ([tensor("max_tokens", [3])], "at least one text"),
        ([TEXTS, TEXTS], "twice"),
        ([TEXTS | {"name": "text"}], "is not an input"),
        ([TEXTS | {"datatype": "FP32"}], "must have the datatype BYTES"),
        ([TEXTS | {"shape": [3]}], "has 2 elements, but its shape [3] holds 3"),
        ([TEXTS | {"shape": [2**30, 2**30]}], "elements, but at most"),
        ([TEXTS | {"shape": [-2]}], "greater than or equal to 0"),
        ([TEXTS | {"data": ["a", 1]}], "type BYTES, but has 1"),
        ([TEXTS | {"data": None}], "neither data nor binary_data_size"),
        ([TEXTS | {"extra": 1}], "inputs.0.extra is not a field"),
        ([TEXTS | {"parameters": {"binary_data_size": 4}}], "both data and"),
        ([TEXTS, tensor("max_tokens", [3, 4])], "one element"),
        ([TEXTS, tensor("max_tokens", [True])], "type INT32, but has True"),
        ([TEXTS, tensor("max_tokens", [0])], "max_tokens"),
        ([TEXTS, tensor("max_tokens", [2**40])], "type INT32, from -2147483648 to 2147483647, but has 1099511627776"),
        ([TEXTS, tensor("seed", [2**63])], "type INT64, from -9223372036854775808 to 9223372036854775807"),
        ([TEXTS, tensor("temperature", [-1.0])], "temperature"),
        ([tensor("text_input", ["river " * 300])], "prompt has"),
    ],
)
def test_wrong_tensors_are_refused_in_tritons_form(http, tensors, reason):
    answer = http.post(f"{MODEL}/infer", json={"inputs": tensors})
    assert answer.status_code == 400 and list(answer.json()) == ["error"] and reason in answer.json()["error"]


def test_wrong_bytes_are_refused(http):
    content, headers = binary_body([TEXTS])
    number, _ = binary_body([tensor("max_tokens", [3])])
    name = "inference-header-content-length"
    for sent, more, reason in (
        (content[:-1], headers, "bytes are left for it"),
        (content + b"x", headers, "belong to no input"),
        (content, headers | {name: "99999"}, "but the body has"),
        (content, headers | {name: "-1"}, "must be a number of bytes"),
        (content.replace(b"\x00\x00\x00A", b"\x09\x00\x00A"), headers, "in the middle of a string"),
        (content.replace(b"\xc3\xb6", b"\xff\xff"), headers, "is not UTF-8 in its string 1"),
        (number + b"0", {name: str(len(number) - 4)}, "belong to no input"),
    ):
        answer = http.post(f"{MODEL}/infer", content=sent, headers=more)
        assert answer.status_code == 400 and reason in answer.json()["error"], answer.text


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/generate", {"text_input": "a", "stream": True}, 400, "generate_stream"),
        ("/generate", {"text_input": "a", "top": 1}, 400, "top is not a field"),
        ("/generate", {"text_input": "a", "parameters": {"top": 1}}, 400, "parameters.top is not a field"),
        ("/generate", {"text_input": "a", "seed": 1, "parameters": {"seed": 1}}, 400, "seed is given twice"),
        ("/generate", {"text_input": "a", "parameters": [1]}, 400, "must be an object"),
        ("/generate", {"text_input": "a", "parameters": False}, 400, "must be an object"),
        ("/generate", {"text_input": "a", "parameters": ""}, 400, "must be an object"),
        ("/generate", {"text_input": "a", "n": 2}, 400, "n is not supported"),
        ("/generate", {"text_input": ["a"]}, 400, "text_input"),
        ("/generate_stream", {"text_input": "river " * 300}, 400, "prompt has"),
        ("/versions/2/generate", {"text_input": "a"}, 404, "unknown version '2'"),
        ("x/generate", {"text_input": "a"}, 404, "unknown model"),
        ("/nothing", {}, 405, "Method Not Allowed"),
        ("/infer", {"inputs": [TEXTS], "outputs": [{"name": "ids"}]}, 400, "not an output"),
        ("/infer", {"inputs": [TEXTS], "parameters": {"n": 3}}, 400, "parameters.n is not a field"),
        ("/infer", {"inputs": [TEXTS], "parameters": {"seed": "x"}}, 400, "seed"),
    ],
)
def test_wrong_requests_are_refused_in_tritons_form(http, path, body, status, reason):
    answer = http.post(MODEL + path, json=body)
    assert answer.status_code == status and list(answer.json()) == ["error"], answer.text
    assert reason in answer.json()["error"]


def test_a_key_is_asked_for_in_tritons_form(model_directory):
    with running(model_directory, api_key="a-long-key", load_format="dummy", device="cpu") as server:
        assert httpx.get(f"{server.url}/v2/health/ready", timeout=TIMEOUT).status_code == 200
        refused = httpx.get(f"{server.url}/v2", timeout=TIMEOUT)
        assert refused.status_code == 401 and "API key" in refused.json()["error"]
        key = {"authorization": "Bearer a-long-key"}
        assert httpx.get(f"{server.url}/v2", headers=key, timeout=TIMEOUT).status_code == 200
