"""What a client gets if the model's logits for one of its prompts are not numbers."""

import json

import pytest

from minillm.engine.async_llm import AsyncLLM
from minillm.request import NOT_NUMBERS
from tests.damaged import BAD, damaged_tiny_gemma
from tests.server.conftest import served_here
from tests.waiting import TIMEOUT

pytestmark = pytest.mark.timeout(TIMEOUT)  # a client of this process has none of its own

GOOD, DAMAGED = [5, 6, 7], [5, BAD]
ASK = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    place = damaged_tiny_gemma(tmp_path_factory.mktemp("damaged"))
    engine = AsyncLLM(place, device="cpu", num_blocks=64, max_num_seqs=8)
    with served_here(engine) as server:
        yield server
    engine.close()


def post(server, path="/v1/completions", **body):
    return server.client.post(path, json=body)


def events(answer):
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.fixture(scope="module")
def alone(server):
    answer = post(server, prompt=GOOD, **ASK).json()
    return answer["choices"][0]["token_ids"]


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"n": 2}, {"temperature": 1, "top_p": 0.5}], ids=str)
def test_a_prompt_without_numbers_is_an_error_of_the_server_with_the_reason(more, server):
    answer = post(server, prompt=DAMAGED, **(ASK | more))
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert (error["message"], error["type"], error["code"]) == (NOT_NUMBERS, "server_error", "logits_not_numbers")


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"logprobs": 1, "echo": True}], ids=str)
def test_the_other_prompts_of_the_request_are_answered(more, server, alone):
    answer = post(server, prompt=[GOOD, DAMAGED, GOOD], **(ASK | more))
    assert answer.status_code == 200
    first, bad, last = answer.json()["choices"]
    assert [first["token_ids"][-6:], last["token_ids"][-6:]] == [alone, alone]
    assert (bad["finish_reason"], bad["stop_reason"]) == ("abort", NOT_NUMBERS)
    assert {first["finish_reason"], last["finish_reason"]} == {"length"}


def test_a_stream_that_fails_before_its_first_event_has_the_errors_status(server):
    answer = post(server, prompt=DAMAGED, stream=True, **ASK)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "logits_not_numbers"


def test_a_stream_that_fails_later_ends_with_an_error_event(server):
    likely = {"logit_bias": {str(BAD): 100}}  # the damaged token is the first one, and the second has no numbers
    found = events(post(server, prompt=GOOD, stream=True, **ASK, **likely))
    assert found[0]["choices"][0]["token_ids"] == [BAD]
    assert found[-1]["error"]["code"] == "logits_not_numbers" and found[-1]["error"]["message"] == NOT_NUMBERS


def test_a_streams_other_choices_go_on(server, alone):
    tokens, reasons = {0: [], 1: []}, {}
    for event in events(post(server, prompt=[DAMAGED, GOOD], stream=True, **ASK)):
        for choice in event["choices"]:
            tokens[choice["index"]] += choice["token_ids"]
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"], choice["stop_reason"]
    assert tokens == {0: [], 1: alone}
    assert reasons == {0: ("abort", NOT_NUMBERS), 1: ("length", None)}


def test_triton_clients_get_an_error_for_the_whole_request(server):
    """Its answers have texts alone: one of them could not say that it failed."""
    tokenizer = server.engine.tokenizer
    text = tokenizer.decode([BAD])
    assert BAD in tokenizer.encode(text)
    inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [2], "data": ["the", text]}]
    answer = post(server, f"/v2/models/{server.model}/infer", inputs=inputs)
    assert (answer.status_code, answer.json()) == (500, {"error": NOT_NUMBERS})


def test_failed_requests_are_counted(server):
    def counted():
        text = server.client.get("/metrics").text
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        label = f'model_name="{server.model}"'
        return [
            float(lines[name])
            for name in (f"vllm:corrupted_requests_total{{{label}}}", "minillm_engine_corrupted_total")
        ]

    before = counted()
    post(server, prompt=[GOOD, DAMAGED, DAMAGED], **ASK)
    assert counted() == [count + 2 for count in before]
