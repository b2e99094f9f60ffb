"""`LLM` and its engine around a request: prompts, seeds, the lock."""

import pytest

from minillm import LLM, RequestOptions, SamplingParams
from minillm.engine.llm import chat_prompt

OPTIONS = {"device": "cpu", "num_blocks": 64, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def llm():
    with LLM(**OPTIONS) as llm:
        yield llm


def test_a_chat_prompt_has_exactly_one_bos_token(llm):
    ids = chat_prompt(llm.tokenizer, [{"role": "user", "content": "Where is Fenwick?"}])
    assert ids[0] == llm.tokenizer.bos_token_id and ids.count(ids[0]) == 1


@pytest.mark.parametrize("seed", [0, 7, -2])
def test_a_request_keeps_its_seed_even_if_0_or_negative(llm, seed):
    asked = SamplingParams(seed=seed)
    assert [llm.engine.prepare([5], asked).request.seed for _ in range(2)] == [seed, seed]
    unseeded = {llm.engine.prepare([5], SamplingParams()).request.seed for _ in range(8)}
    assert len(unseeded) == 8


@pytest.mark.parametrize("call", ["submit", "abort", "step"])
def test_calls_that_change_the_engine_hold_its_lock(llm, call, monkeypatch):
    engine, scheduler = llm.engine, llm.engine.scheduler
    held = []
    for name in ("submit", "finish", "schedule"):
        own = getattr(scheduler, name)

        def noting(*args, own=own):
            held.append(engine.lock._is_owned())
            return own(*args)

        monkeypatch.setattr(scheduler, name, noting)
    tracked = engine.prepare([5, 6], SamplingParams(max_tokens=2))
    engine.submit(tracked)
    if call == "step":
        engine.step()
    engine.abort(tracked.request.request_id)
    while engine.has_work:
        engine.step()
    assert len(held) > 1 and all(held)


def test_a_completion_says_how_many_tokens_of_its_prompt_were_cached(llm):
    block, options = llm.engine.config.block_size, RequestOptions(cache_salt="counted")
    prompt = [7 + i for i in range(2 * block + 3)]
    done = [llm.generate([prompt], SamplingParams(max_tokens=2), options=options)[0] for _ in range(2)]
    assert [each.num_cached_tokens for each in done] == [0, 2 * block]


def test_what_a_generation_has_submitted_ends_with_it(llm, monkeypatch):
    own, submitted = llm.engine.submit, []

    def failing(tracked):
        if submitted:
            raise LookupError("the second cannot be queued")
        submitted.append(tracked)
        own(tracked)

    monkeypatch.setattr(llm.engine, "submit", failing)
    with pytest.raises(LookupError, match="the second"):
        llm.generate([[5], [6]], SamplingParams(max_tokens=4))
    assert submitted[0].completion.finish_reason == "abort" and not llm.engine.has_work
