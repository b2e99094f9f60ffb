"""Embeddings as a prompt, over HTTP: vLLM's form, its limits, and requests that mean harm."""

import base64
import io
import random

import openai
import pytest
import torch

from minillm.prompts import EMBEDDED
from minillm.prompts.saved_tensor import saved_length
from minillm.server import running
from tests.chance import SEED
from tests.prompts import attacks
from tests.server.conftest import MAX_MODEL_LEN, served_here
from tests.waiting import TIMEOUT

pytestmark = [pytest.mark.key, pytest.mark.timeout(TIMEOUT)]
HIDDEN = 32
IDS = [2, *range(40, 75)]
BODY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}


def encoded(value: object) -> str:
    file = io.BytesIO()
    torch.save(value, file)
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def known(engine) -> torch.Tensor:
    """The embeddings of IDS, as the model reads them."""
    model = engine.engine.model
    return model.ops.embedding(torch.tensor(IDS), model.embedding, model.embedding_scale)


@pytest.fixture(scope="module")
def here(engine):
    with served_here(engine, enable_prompt_embeds=True) as here:
        yield here


@pytest.fixture(scope="module")
def post(here):
    def send(**fields):
        return here.client.post("/v1/completions", json={"model": here.model} | BODY | fields)

    return send


def tokens(answer) -> list[list[int]]:
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def refused(answer, param="prompt_embeds") -> str:
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    return answer.json()["error"]["message"]


def test_embeddings_of_tokens_give_their_answer(post, known):
    (expected,) = tokens(post(prompt=IDS))
    for dtype in (torch.float32, torch.float64):
        answer = post(prompt_embeds=encoded(known.to(dtype)))
        assert tokens(answer) == [expected]
        usage = answer.json()["usage"]
        assert usage["prompt_tokens"] == len(IDS) and usage["completion_tokens"] == 8
        assert answer.json()["choices"][0]["prompt_token_ids"] == [EMBEDDED] * len(IDS)


def test_several_go_before_the_prompts_that_are_text(post, known):
    first, second = tokens(post(prompt=[IDS, IDS[:9]]))
    assert tokens(post(prompt=[IDS[:9]], prompt_embeds=[encoded(known), encoded(known[:9].clone())])) == [
        first,
        second,
        second,
    ]
    assert tokens(post(prompt="", prompt_embeds=encoded(known))) == [first]
    assert tokens(post(prompt_embeds=encoded(known), n=2)) == [first, first]


def test_streams_stops_scores_and_salts(post, here, known):
    sent = encoded(known)
    (expected,) = tokens(post(prompt=IDS))
    scored = [post(logprobs=1, **prompt).json()["choices"][0] for prompt in ({"prompt": IDS}, {"prompt_embeds": sent})]
    assert scored[0]["logprobs"]["tokens"] == scored[1]["logprobs"]["tokens"]
    assert scored[0]["logprobs"]["text_offset"] == scored[1]["logprobs"]["text_offset"]
    assert (
        tokens(post(prompt_embeds=sent, stop_token_ids=[expected[3]]))[0] == expected[: expected.index(expected[3]) + 1]
    )
    streamed = here.client.post("/v1/completions", json={"stream": True, "prompt_embeds": sent} | BODY)
    assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n")

    def cached(salt):
        usage = post(prompt_embeds=sent, cache_salt=salt).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached("ann"), cached("bob"), cached("ann") > 0] == [0, 0, True]


def test_it_is_off_unless_enabled_and_then_nothing_is_decoded(engine, known):
    with served_here(engine) as here:
        for sent in (encoded(known), "no base64!"):
            answer = here.client.post("/v1/completions", json={"prompt_embeds": sent} | BODY)
            assert "--enable-prompt-embeds" in refused(answer)


def test_what_needs_tokens_is_refused_by_name(post, here, known):
    assert "echo" in refused(post(prompt_embeds=encoded(known), echo=True), "echo")
    chat = {"messages": [{"role": "user", "content": "hi"}], "prompt_embeds": encoded(known)}
    assert "use /v1/completions" in refused(here.client.post("/v1/chat/completions", json=chat))


def test_limits_are_checked_before_anything_is_decoded(post, known, monkeypatch):
    monkeypatch.setattr("minillm.server.worker.app.read_saved", None)  # decoding would fail
    most = saved_length(MAX_MODEL_LEN, HIDDEN)
    assert f"the longest prompt needs {most:,}" in refused(post(prompt_embeds="A" * (most + 1)))
    assert "at most 2,048" in refused(post(prompt_embeds=["A"] * 2049))
    for wrong in (5, [5], {"data": "A"}, [["A"]], True):
        assert post(prompt_embeds=wrong).status_code == 400
    assert refused(post(prompt_embeds=[]), "prompt")
    assert "base64" in refused(post(prompt_embeds="A" * 9))


def test_more_rows_than_a_prompt_may_have_are_refused(post):
    longest = torch.zeros(MAX_MODEL_LEN - 8, HIDDEN, dtype=torch.float64)
    tokens(post(prompt_embeds=encoded(longest)))
    assert "256 rows" in refused(post(prompt_embeds=encoded(torch.zeros(MAX_MODEL_LEN, HIDDEN))))


@pytest.mark.parametrize("attack", attacks.ATTACKS)
def test_an_attack_is_refused(attack, post):
    data, _ = attacks.ATTACKS[attack]
    assert refused(post(prompt_embeds=base64.b64encode(data).decode()))
    assert not attacks.RAN


def test_one_bad_request_never_harms_another(post, here, known):
    """A batch of good requests, bad ones among them: the good have their answers, and the server its health."""
    rng, good = random.Random(SEED), {"prompt_embeds": encoded(known)}
    (expected,) = tokens(post(prompt=IDS))
    bad = [base64.b64encode(data).decode() for data, _ in attacks.ATTACKS.values()]
    bad += [encoded(torch.full((9, HIDDEN), torch.nan)), encoded(torch.zeros(9, HIDDEN + 1)), "é"]
    for sent in rng.sample(bad, 12):
        assert post(prompt_embeds=sent).status_code == 400
        assert post(prompt_embeds=[good["prompt_embeds"], sent]).status_code == 400, "one of several is bad"
        assert tokens(post(**good)) == [expected]
    huge = torch.full((9, HIDDEN), 3e38)
    huge[::2] *= -1
    assert post(prompt_embeds=encoded(huge)).status_code in (200, 500)  # its own logits may be no numbers
    assert tokens(post(prompt=IDS)) == tokens(post(**good)) == [expected]
    assert here.client.get("/health").status_code == 200


def test_the_openai_client_sends_embeddings_to_the_servers_processes(engine, known):
    """As vLLM documents it: `prompt` is empty, and extra_body has the tensor."""
    with (
        running(engine, enable_prompt_embeds=True) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client,
    ):
        more = {"ignore_eos": True, "return_token_ids": True}
        ask = client.completions.create
        expected = ask(model=server.model, prompt=IDS, temperature=0, max_tokens=8, extra_body=more)
        embeds = more | {"prompt_embeds": encoded(known)}
        answer = ask(model=server.model, prompt="", temperature=0, max_tokens=8, extra_body=embeds)
        assert answer.choices[0].token_ids == expected.choices[0].token_ids
        with pytest.raises(openai.BadRequestError, match="finite"):
            embeds = more | {"prompt_embeds": encoded(known * torch.nan)}
            ask(model=server.model, prompt="", extra_body=embeds)
