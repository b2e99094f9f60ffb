"""/tokenize and /detokenize, as vLLM has them."""

import httpx
import pytest
import tokenizers

from minillm import Tokenizer
from minillm.server import running
from tests.server.test_tokenizers import Shouting
from tests.waiting import TIMEOUT

TEXT = "The river at Högg"
QUESTION = [{"role": "user", "content": "Where is the river?"}]


@pytest.fixture(scope="module")
def http(here):
    return here.client


def test_ids_of_a_text_and_the_text_of_ids(http, here):
    tokenizer = here.engine.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    for special in (True, False):
        found = http.post("/tokenize", json={"prompt": TEXT, "add_special_tokens": special}).json()
        ids = tokenizer.encode(TEXT, special)
        assert found == {"count": len(ids), "max_model_len": here.engine.max_model_len, "tokens": ids}
        assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": TEXT}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_the_strings_of_tokens_are_the_vocabularys_pieces(http, here, model_directory):
    body = {"prompt": TEXT, "return_token_strs": True, "model": here.model}
    strings = http.post("/tokenize", json=body).json()["token_strs"]
    library = tokenizers.Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    assert strings == library.encode(TEXT).tokens
    assert {"▁at", "<0xC3>"} <= set(strings) or {"▁at", "ö"} <= set(strings)


def test_ids_of_a_conversation_are_those_that_a_chat_has(http):
    found = http.post("/tokenize", json={"messages": QUESTION, "add_generation_prompt": True}).json()
    chat = {"messages": QUESTION, "max_tokens": 1, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json=chat).json()
    assert found["tokens"] == answer["prompt_token_ids"] and found["count"] == answer["usage"]["prompt_tokens"]
    twice = http.post("/tokenize", json={"messages": QUESTION, "add_special_tokens": True}).json()
    assert twice["tokens"] == [found["tokens"][0], *found["tokens"]]


def test_a_text_longer_than_the_context_is_counted(http, here):
    text = "river " * here.engine.max_model_len
    found = http.post("/tokenize", json={"prompt": text}).json()
    assert found["count"] > found["max_model_len"] == here.engine.max_model_len


@pytest.mark.parametrize(
    ("path", "body", "param", "reason"),
    [
        ("tokenize", {"prompt": 7}, "prompt", "valid string"),
        ("tokenize", {}, "prompt", "give a prompt or messages, and not both"),
        ("tokenize", {"prompt": "x" * 10_000_000}, None, "exceeds the limit"),
        ("tokenize", {"prompt": "x", "messages": []}, "prompt", "give a prompt or messages, and not both"),
        ("tokenize", {"messages": []}, "messages", "at least 1 item"),
        ("tokenize", {"messages": [{"role": "user", "text": "x"}]}, "messages", "messages.0.text is not a field"),
        ("tokenize", {"messages": [{"role": "system", "content": "x"}]}, "messages", "add a user message"),
        (
            "tokenize",
            {"messages": QUESTION, "add_generation_prompt": False},
            "add_generation_prompt",
            "/v1/completions",
        ),
        ("tokenize", {"prompt": "x", "model": "another"}, "model", "unknown model"),
        ("detokenize", {"tokens": ["a"]}, "tokens", "valid integer"),
        ("detokenize", {"tokens": [10**6]}, "tokens", "outside the vocabulary"),
        ("detokenize", {"tokens": [-1]}, "tokens", "outside the vocabulary"),
    ],
)
def test_wrong_bodies_are_refused_in_openais_form(http, path, body, param, reason):
    answer = http.post(f"/{path}", json=body)
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and reason in error["message"]


def test_a_tokenizer_that_only_the_engine_has_is_asked(model_directory):
    tokenizer = Shouting.from_pretrained(model_directory)
    with (
        running(model_directory, tokenizer=tokenizer, load_format="dummy", device="cpu") as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT) as client,
    ):
        found = client.post("/tokenize", json={"prompt": "the river", "return_token_strs": True}).json()
        assert found["tokens"] == tokenizer.encode("the river")
        assert found["token_strs"] == [tokenizer.token(each) for each in found["tokens"]]
        assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "THE RIVER"}
