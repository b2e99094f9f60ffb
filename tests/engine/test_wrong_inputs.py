"""What a caller gives wrongly is refused with an error of ours that names it, and nothing else is harmed."""

import asyncio
import multiprocessing
import re

import numpy as np
import pytest

from minillm import LLM, AsyncLLM, ConfigError, InvalidRequest, MinillmError, RequestOptions, SamplingParams
from minillm.errors import EngineClosed

TWO = SamplingParams(max_tokens=2, temperature=0)
PATIENCE = 120


@pytest.fixture(scope="module")
def llm():
    with LLM(max_model_len=64, max_num_seqs=4) as llm:
        yield llm


@pytest.mark.parametrize(
    "prompts",
    [
        {"prompt_ids": [5, 6]},
        [{"text": "a"}],
        b"abc",
        [b"abc"],
        bytearray(b"abc"),
        [bytearray(b"abc")],
        [memoryview(b"abc")],
        {5, 6},
        None,
        5,
        [None],
        [5.0, 6.0],
        [True, False],
        [5, "a"],
        ["a", 5],
        [10**30],
    ],
    ids=lambda prompts: re.sub(" at 0x[0-9a-f]+", "", repr(prompts)),  # parallel processes must agree on the names
)
def test_a_prompt_that_is_neither_text_nor_token_ids_is_named(llm, prompts):
    before = llm.stats()["steps"]
    with pytest.raises(InvalidRequest, match="must be a string"):
        llm.generate(prompts, TWO)
    assert llm.stats()["steps"] == before


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["a", 5], "prompt 1: a prompt must be a string"),
        ([[5], [5] * 64], "prompt 1: a prompt of 64 tokens leaves no room"),
        ([[5], [6], []], "prompt 2: the prompt is empty"),
        ([[5], [5, 10**6]], "prompt 1: token id 1000000 is outside"),
        (["a", {"prompt_ids": [5]}], "prompt 1: a prompt must be a string or a list of token ids"),
        (["a", "half a pair \ud800"], "prompt 1: "),
        ({"prompt_ids": [5]}, "a prompt must be a string or a list of token ids"),
    ],
    ids=ascii,
)
def test_a_refusal_says_which_of_several_prompts_is_meant(llm, prompts, message):
    with pytest.raises(MinillmError) as refused:
        llm.generate(prompts, TWO)
    assert str(refused.value).startswith(message)


def test_a_refusal_says_which_of_several_conversations_is_meant(llm):
    turn = {"role": "user", "content": "hi"}
    for wrong in ([turn, turn], [{"role": "user"}]):
        with pytest.raises(MinillmError, match="^conversation 1: "):
            llm.chat([[turn], wrong], TWO)


def test_a_prompt_that_is_only_scored_may_fill_the_context(llm):
    params = SamplingParams(max_tokens=0, prompt_logprobs=2, logprobs=1, stop="a", seed=3)
    prompt = [2, *range(10, 73)]
    shorter, whole = llm.generate([prompt[:-1], prompt], params)
    for done, ids in ((shorter, prompt[:-1]), (whole, prompt)):
        assert (done.token_ids, done.text, done.logprobs, done.finish_reason) == ([], "", [], "length")
        assert len(done.prompt_logprobs) == len(ids)
    (longer,) = llm.generate([prompt[:-1]], SamplingParams(max_tokens=1, prompt_logprobs=2))
    for found, wanted in zip(shorter.prompt_logprobs[1:], longer.prompt_logprobs[1:], strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)
    llm.engine.scheduler.check()
    with pytest.raises(InvalidRequest, match="a prompt of 65 tokens does not fit: .* max_model_len = 64"):
        llm.generate([prompt + [5]], params)
    with pytest.raises(InvalidRequest, match="a prompt of 64 tokens leaves no room for output"):
        llm.generate([prompt], SamplingParams(max_tokens=1))


def test_the_end_token_after_a_scored_prompt_does_not_count(llm):
    (end,) = llm.model_config.eos_token_ids[:1]
    params = SamplingParams(max_tokens=0, logit_bias={end: 100}, stop_token_ids=[end])
    (done,) = llm.generate([[5, 6]], params)
    assert (done.token_ids, done.finish_reason, done.stop_reason) == ([], "length", None)


def test_a_prompt_in_a_numpy_array_is_the_same_as_in_a_list(llm):
    (alone,), both = llm.generate([5, 6], TWO), llm.generate(np.array([[5, 6], [7, 8]]), TWO)
    assert llm.generate(np.array([5, 6]), TWO)[0].token_ids == alone.token_ids == both[0].token_ids


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ({"max_tokens": 3}, None, "SamplingParams"),
        ([{"max_tokens": 3}], None, "SamplingParams"),
        (5, None, "SamplingParams"),
        (RequestOptions(), None, "SamplingParams"),
        (TWO, {"priority": 1}, "RequestOptions"),
        (TWO, [TWO], "RequestOptions"),
        (TWO, {}, "RequestOptions"),
    ],
)
def test_params_and_options_of_another_kind_are_named(llm, params, options, message):
    with pytest.raises(InvalidRequest, match=message):
        llm.generate("a", params, options)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "hi",
        b"hi",
        [],
        [[]],
        [5],
        {"role": "user", "content": "a"},
        [{"role": "user", "content": None}],
        [{"role": "user"}],
        [{"content": "a"}],
        [{"role": 5, "content": "a"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}],
        [[{"role": "user", "content": "a"}], 5],
    ],
    ids=repr,
)
def test_messages_that_are_no_conversation_are_named(llm, messages):
    with pytest.raises(InvalidRequest, match="message|conversation"):
        llm.chat(messages, TWO)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"model": 5}, "model"),
        ({"model": b"a"}, "model"),
        ({"tokenizer": 5}, "tokenizer"),
        ({"max_num_seqs": 10**9}, "max_num_seqs"),
        ({"num_blocks": 10**12}, "num_blocks"),
        ({"block_size": 10**12}, "block"),
    ],
)
def test_an_argument_that_cannot_work_is_named(arguments, name):
    with pytest.raises(ConfigError, match=name):
        LLM(**arguments)


def test_a_closed_llm_serves_nothing_else():
    llm = LLM(max_model_len=64)
    engine = llm.engine
    llm.close()
    for call in (
        lambda: llm.generate("a"),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        llm.stats,
        llm.warm_up,
        lambda: AsyncLLM(engine=llm),
        lambda: engine.prepare("a"),
    ):
        with pytest.raises(EngineClosed, match="is closed; make a new one"):
            call()


def test_an_engine_that_is_there_takes_no_options(llm):
    with pytest.raises(ConfigError, match="engine= is loaded already"):
        AsyncLLM(engine=llm, max_num_seqs=3)
    with pytest.raises(ConfigError, match="engine must be an LLM"):
        AsyncLLM(engine="tiny-gemma")


def test_a_refused_duplicate_that_is_cancelled_leaves_the_original_alone(llm):
    """Also when it is cancelled before it hears that its id is taken."""

    async def work():
        engine = AsyncLLM(engine=llm)
        long = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        try:
            original = asyncio.create_task(engine.generate([5, 6], long, "mine"))
            while "mine" not in llm.engine.tracked:
                await asyncio.sleep(0)
            with llm.engine.lock:  # the refusal cannot come before the cancellation
                duplicate = asyncio.create_task(engine.generate([7, 8], long, "mine"))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                duplicate.cancel()
                await asyncio.gather(duplicate, return_exceptions=True)
            return await original
        finally:
            engine.close()

    assert asyncio.run(work()).finish_reason == "length"


def _in_child(llm: LLM, found) -> None:
    try:
        llm.generate([5, 6], TWO)
    except MinillmError as error:
        found.put(str(error))
    llm.close()


def test_a_forked_child_is_told_that_the_engine_is_not_its_own(llm):
    (expected,) = llm.generate([5, 6], TWO)
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    child = context.Process(target=_in_child, args=(llm, found))
    child.start()
    try:
        assert "before the process was forked" in found.get(timeout=PATIENCE)
        child.join(PATIENCE)
        assert child.exitcode == 0
    finally:
        child.kill()
    assert llm.generate([5, 6], TWO)[0].token_ids == expected.token_ids
