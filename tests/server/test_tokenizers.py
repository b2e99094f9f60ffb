"""User-supplied tokenizers can be served: workers then leave text to the engine process."""

import dataclasses
import json

import httpx
import pytest

import minillm
from minillm import LLM, SamplingParams, Tokenizer
from minillm.server import running
from tests.waiting import TIMEOUT

BODY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


class Shouting(Tokenizer):
    """Encodes and decodes everything in capitals."""

    def encode(self, text, add_special_tokens=True):
        return super().encode(text.upper(), add_special_tokens)

    def decode(self, ids, skip_special_tokens=True):
        return super().decode(ids, skip_special_tokens).upper()

    def visible_tokens(self, ids, skip_special_tokens):
        return (token.upper() for token in super().visible_tokens(ids, skip_special_tokens))

    def apply_chat_template(self, messages, add_generation_prompt=True):
        if messages[0]["content"] == "nothing":
            raise KeyError("I do not hear that")
        return "<bos>" + " ".join(message["content"] for message in messages)


@pytest.fixture(scope="module")
def llm(model_directory):
    tokenizer = Shouting.from_pretrained(model_directory)
    with LLM(model_directory, tokenizer, load_format="dummy", device="cpu", max_num_seqs=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def ask(llm):
    """A function that returns the first choice and the usage from a server with a user-supplied tokenizer."""
    with running(llm) as server, httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:

        def ask(path="completions", **more):
            return _answer(client, path, BODY | more)

        yield ask


def _answer(client, path, body):
    response = client.post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        answer = response.json()
        return answer["choices"][0], answer["usage"]
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    pieces = [event["choices"][0] for event in events if event["choices"]]
    whole = {"text": "".join(piece["text"] for piece in pieces)}
    whole["token_ids"] = [token for piece in pieces for token in piece["token_ids"]]
    return whole, events[-1].get("usage")


def streamed(body):
    return body | {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_user_supplied_tokenizer_encodes_and_decodes(ask, llm, stream):
    expected = llm.generate("The river", PARAMS)[0]
    body = {"prompt": "The river"}
    choice, usage = ask(**(streamed(body) if stream else body))
    assert choice["text"] == expected.text == expected.text.upper()
    assert choice["token_ids"] == expected.token_ids
    assert usage["prompt_tokens"] == len(llm.tokenizer.encode("The river"))
    assert usage["completion_tokens"] == 12


def test_a_user_supplied_tokenizer_renders_chats(ask, llm):
    messages = [{"role": "user", "content": "Where is the river?"}]
    choice, usage = ask("chat/completions", messages=messages)
    prompt = llm.tokenizer.encode("<bos>Where is the river?", add_special_tokens=False)
    assert usage["prompt_tokens"] == len(prompt)
    assert choice["message"]["content"] == llm.generate(prompt, PARAMS)[0].text
    choice, usage = ask("chat/completions", messages=messages, max_tokens=None)
    assert usage["total_tokens"] == llm.engine.max_model_len


def test_stop_strings_echo_and_logprobs_use_the_user_supplied_tokenizer(ask, llm):
    whole = llm.generate("The river", PARAMS)[0].text
    stop = whole[5:8]
    expected = llm.generate("The river", dataclasses.replace(PARAMS, stop=stop))[0]
    for body in ({"prompt": "The river", "stop": stop}, streamed({"prompt": "The river", "stop": stop})):
        choice, usage = ask(**body)
        assert choice["text"] == whole[: whole.index(stop)]
        assert choice["token_ids"] == expected.token_ids
        assert usage["completion_tokens"] == len(expected.token_ids) < 12
    ids = llm.tokenizer.encode("The river")
    choice, _ = ask(prompt=ids, echo=True, logprobs=1)
    assert choice["text"] == "THE RIVER" + whole
    names = choice["logprobs"]["tokens"]
    assert names[0] == "<BOS>" and not [name for name in names if name.startswith("token_id:")]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[0] == offsets[1] == 0 and offsets[len(ids)] == len("THE RIVER")
    for name, offset in zip(names[1:], offsets[1:], strict=True):
        assert name.startswith("bytes:") or choice["text"].startswith(name, offset)
    choice, _ = ask(prompt="The river", echo=True)
    assert choice["text"] == "The river" + whole


def test_an_error_of_a_user_supplied_tokenizer_rejects_the_request(llm):
    with running(llm) as server:
        for path, body in (
            ("completions", {"prompt": "word " * 1000}),
            ("chat/completions", {"messages": [{"role": "user", "content": "nothing"}]}),
        ):
            response = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=TIMEOUT)
            assert response.status_code == 400, response.text
        assert "I do not hear that" in response.json()["error"]["message"]


def test_user_supplied_merges_serve_http_requests(server, engine):
    with httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:

        def ask(path, **more):
            return _answer(client, path, BODY | more)

        def prompts():
            chat = {"messages": [{"role": "user", "content": "Where is the river?"}]}
            return [
                ask("completions", prompt="The river")[1]["prompt_tokens"],
                ask("completions", prompt=["The river", "A stone"], n=2)[1]["prompt_tokens"],
                ask("completions", **streamed({"prompt": "The river"}))[1]["prompt_tokens"],
                ask("chat/completions", **chat)[1]["prompt_tokens"],
            ]

        before = prompts()
        with minillm.using(bpe_merge=lambda symbols, ranks: symbols) as used:
            letters = engine.tokenizer.encode("The river")
            during = prompts()
            whole = ask("completions", prompt="The river", echo=True, logprobs=0)[0]["logprobs"]["tokens"]
            assert len(whole) == len(letters) + 12
        assert used.calls["bpe_merge"] > 0
        assert during[0] == during[2] == len(letters)
        assert all(d > b for d, b in zip(during, before, strict=True))
        assert prompts() == before


def test_failing_merges_give_500_and_the_server_keeps_running(server):
    def broken(symbols, ranks):
        raise ValueError("my merges are wrong")

    with httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:
        with minillm.using(bpe_merge=broken):
            response = client.post("/v1/completions", json=BODY | {"prompt": "The river"})
        assert response.status_code == 500
        assert "my merges are wrong" in response.json()["error"]["message"]
        assert client.post("/v1/completions", json=BODY | {"prompt": "The river"}).status_code == 200


def test_a_model_without_a_tokenizer_serves_token_ids(tmp_path, model_directory):
    (tmp_path / "config.json").write_bytes((model_directory / "config.json").read_bytes())
    with (
        running(tmp_path, load_format="dummy", device="cpu", max_num_seqs=4) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT) as client,
    ):
        choice, _ = _answer(client, "completions", BODY | {"prompt": [5, 6, 7], "logprobs": 1, "echo": True})
        assert choice["text"] == "" and len(choice["token_ids"]) == 12
        assert choice["logprobs"]["tokens"][:3] == ["token_id:5", "token_id:6", "token_id:7"]
        chat = {"messages": [{"role": "user", "content": "a"}]}
        for path, body in (("completions", {"prompt": "a"}), ("chat/completions", chat)):
            response = client.post(f"/v1/{path}", json=body)
            assert response.status_code == 400 and "no tokenizer" in response.json()["error"]["message"]
