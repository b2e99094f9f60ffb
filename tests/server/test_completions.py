"""/v1/completions through the real openai client."""

import asyncio
import math

import openai
import pytest

from minillm.request import SamplingParams
from tests.waiting import TIMEOUT

pytestmark = pytest.mark.key

GREEDY = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


@pytest.fixture(scope="module")
def client(here):
    return openai.OpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=here.client)


@pytest.fixture(scope="module")
def complete(client, here):
    def ask(prompt, **more):
        return client.completions.create(model=here.model, prompt=prompt, **(GREEDY | more))

    return ask


def test_the_served_model_is_listed_under_its_directory_name(client, here):
    assert [model.id for model in client.models.list()] == ["small-random"] == [here.model]
    assert client.models.retrieve("small-random").owned_by == "minillm"


def test_a_completion_equals_the_engines_output(complete, engine):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = asyncio.run(engine.generate("The river", params))
    answer = complete("The river")
    assert answer.choices[0].token_ids == expected.token_ids
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


@pytest.mark.parametrize("stop", [None, "e"], ids=["to the end", "to a stop string"])
def test_usage_counts_the_prompts_cached_tokens(complete, engine, stop):
    block = engine.config.block_size
    prompt = [7 + i % 50 for i in range(3 * block + 2)]
    options = {"extra_body": {"cache_salt": f"usage {stop}"}, "n": 2, "max_tokens": 8, "stop": stop}

    def cached(stream=False):
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = complete(prompt, **options, **more)
        return (list(answer)[-1] if stream else answer).usage.prompt_tokens_details.cached_tokens

    assert cached() == 0, "the second choice shares the first one's prefix, which was not cached before"
    assert [cached(), cached(stream=True)] == [3 * block, 3 * block]


def test_a_prompt_as_text_or_as_token_ids_gives_the_same_completion(complete, engine):
    ids = engine.tokenizer.encode("The river")
    assert complete(ids).choices[0].text == complete("The river").choices[0].text


def test_each_prompt_of_a_list_gets_its_own_answer_in_order(complete, engine):
    prompts = ["The river", "A stone", "Once"]
    alone = [complete(prompt).choices[0].text for prompt in prompts]
    assert len(set(alone)) > 1, "different prompts must give different answers, or their order cannot be checked"
    together = complete(prompts)
    assert [choice.text for choice in together.choices] == alone
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    ids = [engine.tokenizer.encode(prompt) for prompt in prompts]
    assert [choice.text for choice in complete(ids).choices] == alone
    assert together.usage.prompt_tokens == sum(map(len, ids))


def test_n_choices_per_prompt_are_grouped_by_prompt_and_differ(complete):
    answer = complete(["The river", "A stone"], n=3, temperature=1, seed=5, max_tokens=12)
    texts = [choice.text for choice in answer.choices]
    assert len(texts) == 6
    assert len(set(texts[:3])) == 3
    again = complete("A stone", n=3, temperature=1, seed=5, max_tokens=12)
    assert [choice.text for choice in again.choices] == texts[3:]
    assert answer.usage.completion_tokens == 72
    assert answer.usage.prompt_tokens == complete(["The river", "A stone"]).usage.prompt_tokens, (
        "each prompt counts once"
    )


def test_the_same_seed_repeats_the_text_and_another_seed_changes_it(complete):
    first, again, other = (complete("Once", temperature=1, seed=seed).choices[0].text for seed in (1, 1, 2))
    assert first == again != other


def test_the_text_ends_before_a_stop_string(complete):
    whole = complete("The river", max_tokens=16).choices[0].text
    stop = whole[5:8]
    choice = complete("The river", max_tokens=16, stop=stop).choices[0]
    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("last", [False, True], ids=["early", "at max_tokens"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_is_reported_but_not_shown(complete, engine, stream, last):
    body = {"temperature": 1, "seed": 2, "max_tokens": 16}
    whole = complete("The river", **body).choices[0]
    stop = whole.token_ids[7]
    if last:
        body["max_tokens"] = whole.token_ids.index(stop) + 1
    params = SamplingParams(**body, ignore_eos=True, stop_token_ids=[stop])
    expected = asyncio.run(engine.generate("The river", params))
    extra = GREEDY["extra_body"] | {"stop_token_ids": [stop]}
    answer = complete("The river", **body, stream=stream, extra_body=extra)
    pieces = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    assert "".join(piece.text for piece in pieces) == expected.text != whole.text
    assert [token for piece in pieces for token in piece.token_ids] == expected.token_ids
    assert expected.token_ids[-1] == stop and pieces[-1].finish_reason == "stop"


def test_echo_puts_the_prompt_first(complete, engine):
    said = complete("The river").choices[0].text
    assert complete("The river", echo=True).choices[0].text == "The river" + said
    ids = engine.tokenizer.encode("The river")
    assert complete(ids, echo=True).choices[0].text == "The river" + said


def test_logit_bias_changes_the_chosen_token(complete):
    choice = complete("The river", logit_bias={"77": 100}).choices[0]
    assert choice.token_ids == [77] * 8


def test_logprobs_rank_the_greedy_token_first(complete):
    # Some prompts would not work: a byte token is written as bytes:\xNN, while the text has a replacement character.
    choice = complete("Once upon a time", logprobs=3).choices[0]
    form = choice.logprobs
    assert len(form.tokens) == len(form.token_logprobs) == len(form.top_logprobs) == len(form.text_offset) == 8
    assert "".join(form.tokens) == choice.text
    for token, logprob, top in zip(form.tokens, form.token_logprobs, form.top_logprobs, strict=True):
        assert max(top, key=top.get) == token
        assert len(top) <= 3
        assert logprob == top[token] < 0
    assert form.text_offset == [sum(map(len, form.tokens[:i])) for i in range(8)]


def test_echo_with_max_tokens_0_returns_logprobs_of_the_prompt_only(complete, engine):
    ids = engine.tokenizer.encode("The river runs")
    choice = complete(ids, echo=True, logprobs=1, max_tokens=0).choices[0]
    assert choice.text == "The river runs"
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.token_logprobs) == len(ids)
    scored = asyncio.run(engine.generate(ids, SamplingParams(max_tokens=1, prompt_logprobs=1)))
    expected = [entry[token] for entry, token in zip(scored.prompt_logprobs[1:], ids[1:], strict=True)]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    with_one = complete(ids, echo=True, logprobs=1, max_tokens=1).choices[0]
    assert len(with_one.logprobs.token_logprobs) == len(ids) + 1
    assert all(math.isfinite(value) for value in with_one.logprobs.token_logprobs[1:])


def test_a_stream_delivers_the_same_text_in_chunks(complete):
    whole = complete("The river", max_tokens=24)
    chunks = list(complete("The river", max_tokens=24, stream=True))
    pieces = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(piece.text for piece in pieces) == whole.choices[0].text
    assert [t for piece in pieces for t in piece.token_ids] == whole.choices[0].token_ids
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(getattr(chunk, "usage", None) is None for chunk in chunks)
    assert len(pieces) > 3, "the text came in a single chunk"


def test_streamed_usage_comes_last_and_counts_everything(complete):
    whole = complete(["The river", "A stone"], n=2)
    chunks = list(complete(["The river", "A stone"], n=2, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    texts = [""] * 4
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


@pytest.mark.parametrize("last", [True, False], ids=["and in the end", "alone"])
def test_continuous_usage_counts_the_tokens_so_far_in_every_chunk(complete, last):
    options = {"include_usage": last, "continuous_usage_stats": True}
    whole = complete(["The river", "A stone is a stone"], n=2)
    chunks = list(complete(["The river", "A stone is a stone"], n=2, stream=True, stream_options=options))
    usages = [chunk.usage for chunk in chunks]
    counted = [sum(len(c.token_ids) for chunk in chunks[: i + 1] for c in chunk.choices) for i in range(len(chunks))]
    assert [usage.completion_tokens for usage in usages] == counted
    assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in usages)
    prompts = [usage.prompt_tokens for usage in usages]
    assert 0 < prompts[0] < prompts[-1] and prompts == sorted(prompts), "a prompt is counted once it has been read"
    assert usages[-1] == whole.usage
    assert (chunks[-1].choices == []) == last


@pytest.mark.parametrize("value", [True, False, None])
def test_include_obfuscation_does_not_change_the_stream(complete, value):
    def chunks(**more):
        return [chunk.choices for chunk in complete("The river", stream=True, **more)]

    assert chunks(stream_options={"include_obfuscation": value}) == chunks()


def test_streams_support_echo_and_logprobs(complete):
    text = "".join(c.text for chunk in complete("The river", stream=True, echo=True) for c in chunk.choices)
    assert text == complete("The river", echo=True).choices[0].text
    whole = complete("The river", logprobs=2).choices[0].logprobs
    forms = [c.logprobs for chunk in complete("The river", stream=True, logprobs=2) for c in chunk.choices]
    for field in ("tokens", "token_logprobs", "text_offset"):
        assert [value for form in forms for value in getattr(form, field)] == pytest.approx(getattr(whole, field))


@pytest.mark.parametrize("max_tokens", [0, 1, 8])
def test_a_streamed_echo_includes_the_prompts_logprobs(complete, max_tokens):
    body = {"echo": True, "logprobs": 2, "n": 2, "max_tokens": max_tokens}
    prompts = ["The river", "Once upon a time"]
    whole = complete(prompts, **body)
    chunks = list(complete(prompts, stream=True, stream_options={"include_usage": True}, **body))
    for choice in whole.choices:
        pieces = [piece for chunk in chunks for piece in chunk.choices if piece.index == choice.index]
        assert "".join(piece.text for piece in pieces) == choice.text
        for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
            together = [value for piece in pieces for value in getattr(piece.logprobs, name)]
            assert together == getattr(choice.logprobs, name)
        assert pieces[-1].finish_reason == choice.finish_reason == "length"
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 4 * max_tokens


def test_a_hundred_concurrent_clients_get_the_same_answers_as_one(server, complete):
    prompts = [f"Story {i}: the" for i in range(20)]
    alone = [complete(prompt).choices[0].text for prompt in prompts]

    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=TIMEOUT) as client:

            async def one(prompt):
                stream = await client.completions.create(model=server.model, prompt=prompt, stream=True, **GREEDY)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(prompt) for prompt in prompts * 5))

    assert asyncio.run(all_at_once()) == alone * 5
