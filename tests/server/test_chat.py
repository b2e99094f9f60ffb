"""/v1/chat/completions through the real openai client."""

import asyncio

import openai
import pytest

from minillm.engine.inputs import chat_prompt
from minillm.request import SamplingParams
from tests.waiting import TIMEOUT

QUESTION = [{"role": "user", "content": "Where is the river?"}]


@pytest.fixture(scope="module")
def ask(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client:

        def ask(messages=QUESTION, **more):
            fixed = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
            return client.chat.completions.create(model=server.model, messages=messages, **(fixed | more))

        yield ask


def test_a_chat_equals_the_completion_of_its_rendered_template(ask, engine, server):
    prompt = chat_prompt(engine.tokenizer, QUESTION)
    answer = ask()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        plain = client.completions.create(
            model=server.model, prompt=prompt, temperature=0, max_tokens=8, extra_body={"ignore_eos": True}
        )
    assert answer.choices[0].message.content == plain.choices[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.object == "chat.completion"


def test_the_asynchronous_client_streams_chats_and_has_the_same_errors(ask, server):
    whole = ask().choices[0].message.content

    async def everything():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            fixed = {"messages": QUESTION, "temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
            stream = await client.chat.completions.create(model=server.model, **fixed, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="another", **fixed)
            with pytest.raises(openai.BadRequestError, match="temperature"):
                await client.chat.completions.create(model=server.model, **fixed | {"temperature": -1})
            return text

    assert asyncio.run(everything()) == whole != ""


def test_without_max_tokens_the_answer_may_fill_the_context(ask, engine):
    prompt = chat_prompt(engine.tokenizer, QUESTION)
    answer = ask(max_tokens=None)
    assert answer.usage.total_tokens == engine.max_model_len
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(prompt)
    assert ask(max_tokens=None, max_completion_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_an_end_token_at_the_length_limit_is_still_the_finish_reason(ask, engine, stream):
    always = {str(engine.tokenizer.eos_token_id): 100}
    answer = ask(max_tokens=1, logit_bias=always, stream=stream, extra_body={"ignore_eos": False})
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    assert choices[-1].finish_reason == "stop"


def test_a_streamed_chat_sends_its_role_and_then_the_same_text(ask):
    whole = ask(n=2, temperature=1, seed=3)
    chunks = list(ask(n=2, temperature=1, seed=3, stream=True, stream_options={"include_usage": True}))
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    texts = ["", ""]
    for chunk in chunks:
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert chunks[-1].usage == whole.usage


def test_chat_logprobs_list_each_token_its_bytes_and_its_alternatives(ask):
    choice = ask(logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert len(content) == 8
    assert b"".join(bytes(token.bytes) for token in content).decode(errors="replace") == choice.message.content
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token
        assert token.logprob == token.top_logprobs[0].logprob
    streamed = [c.logprobs for chunk in ask(logprobs=True, top_logprobs=3, stream=True) for c in chunk.choices]
    tokens = [entry.token for form in streamed if form for entry in form.content]
    assert tokens == [token.token for token in content]
    assert [token.top_logprobs for token in ask(logprobs=True).choices[0].logprobs.content] == [[]] * 8


def test_continuous_usage_starts_with_the_prompt_tokens(ask):
    options = {"include_usage": True, "continuous_usage_stats": True}
    usages = [chunk.usage for chunk in ask(stream=True, stream_options=options)]
    whole = ask().usage
    assert {usage.prompt_tokens for usage in usages} == {whole.prompt_tokens}
    assert usages[0].completion_tokens == 0 and usages[-1] == whole
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts) and len(set(counts)) > 3, "the text came in a single chunk"


def test_content_parts_equal_plain_string_content(ask):
    parts = [{"type": "text", "text": "Where is"}, {"type": "text", "text": "the river?"}]
    lines = ask([{"role": "user", "content": "Where is\nthe river?"}])
    assert ask([{"role": "user", "content": parts}]).choices == lines.choices


def test_a_conversation_continues_over_several_turns(ask, engine):
    turns = [*QUESTION, {"role": "assistant", "content": "In the north."}, {"role": "user", "content": "How wide?"}]
    assert ask(turns).usage.prompt_tokens == len(chat_prompt(engine.tokenizer, turns))


def test_a_response_message_can_be_sent_back_unchanged(ask, engine):
    said = ask().choices[0].message
    assert {"refusal", "annotations", "tool_calls", "audio"} <= said.model_dump().keys()
    more = {"role": "user", "content": "How wide?", "name": "Ada"}
    turns = [*QUESTION, {"role": "assistant", "content": said.content}, {"role": "user", "content": "How wide?"}]
    for back in (said, said.model_dump(), said.model_dump() | {"annotations": [], "tool_calls": []}):
        assert ask([*QUESTION, back, more]).usage.prompt_tokens == len(chat_prompt(engine.tokenizer, turns))


def test_a_chat_request_uses_its_sampling_parameters(ask, engine):
    params = SamplingParams(max_tokens=8, temperature=0.7, top_p=0.9, seed=11, ignore_eos=True)
    answer = ask(temperature=0.7, top_p=0.9, seed=11)
    import asyncio

    expected = asyncio.run(engine.generate(chat_prompt(engine.tokenizer, QUESTION), params))
    assert answer.choices[0].message.content == expected.text
