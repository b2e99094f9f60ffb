"""`LLM` and its engine around a request: prompts, seeds, the lock."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from minillm import LLM, ConfigError, InvalidRequest, RequestOptions, SamplingParams
from minillm.engine.inputs import chat_prompt
from minillm.tokenizer import TokenizerError

ROOT = Path(__file__).resolve().parents[2]
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


def test_choices_are_those_of_as_many_requests(llm):
    params = SamplingParams(n=np.int64(3), seed=11, max_tokens=6)
    found = llm.generate("The river", params)[0].outputs
    alone = [llm.generate("The river", SamplingParams(seed=seed, max_tokens=6))[0] for seed in (11, 12, 13)]
    assert [each.token_ids for each in found] == [each.token_ids for each in alone]
    assert [each.seed for each in params.choices(3)] == [11, 12, 13] and {each.n for each in params.choices(3)} == {1}


def test_choices_can_be_written_as_dictionaries(llm):
    (done,) = llm.generate("The river", SamplingParams(n=3, seed=1, max_tokens=2))
    assert [each.index for each in done.outputs] == [0, 1, 2]
    written = dataclasses.asdict(done)
    assert [each["token_ids"] for each in written["others"]] == [each.token_ids for each in done.outputs[1:]]
    assert dataclasses.asdict(done.outputs[2])["others"] == [] and done.outputs[2].outputs == [done.outputs[2]]


def test_no_prompts_have_no_completions(llm):
    assert llm.generate([]) == []


def test_another_librarys_tokenizer_is_refused_when_the_engine_is_made():
    class Other:
        vocab_size = 4096
        encode = decode = None

    with pytest.raises(ConfigError, match=r"has no new_decoder, visible_tokens: give the directory with its tokenizer"):
        LLM(tokenizer=Other())


def test_advice_for_sampling_that_no_request_gets_is_logged(tmp_path, caplog):
    for file in (ROOT / "data" / "tiny-gemma").iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = tmp_path / "generation_config.json"
    told = json.loads(config.read_text()) | {"temperature": 0.6, "top_k": 50, "top_p": 1.0, "min_p": None}
    config.unlink()
    config.write_text(json.dumps(told))
    LLM(device="cpu").close()
    assert "advises" not in caplog.text
    LLM(tmp_path, device="cpu").close()
    assert "generation_config.json advises temperature=0.6, which no request gets unless it asks for it" in caplog.text


def test_the_sum_of_log_probabilities_is_that_of_the_tokens(llm):
    scored = llm.generate("The river", SamplingParams(max_tokens=3, logprobs=2, temperature=0))[0]
    wanted = sum(each[token] for token, each in zip(scored.token_ids, scored.logprobs, strict=True))
    assert scored.outputs[0].cumulative_logprob == wanted < 0
    assert llm.generate("The river", SamplingParams(max_tokens=3))[0].cumulative_logprob is None


def test_a_message_may_come_in_parts_of_text(llm):
    params = SamplingParams(max_tokens=4, temperature=0)
    parts = [{"type": "text", "text": "Who "}, {"type": "text", "text": "are you?"}]
    (whole,) = llm.chat([{"role": "user", "content": "Who \nare you?"}], params)
    (joined,) = llm.chat([{"role": "user", "content": parts}], params)
    assert joined.prompt_token_ids == whole.prompt_token_ids and joined.text == whole.text
    for wrong in ([], [{"type": "image_url", "image_url": "x"}], [{"type": "text"}], ["text"], None):
        with pytest.raises(InvalidRequest, match=r"messages\[0\] must have 'content' as a string or a list of"):
            llm.chat([{"role": "user", "content": wrong}], params)
    with pytest.raises(TokenizerError, match="tokenize=True: encode the text yourself"):
        llm.tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=True)


def test_numbers_and_token_ids_may_be_torchs(llm):
    params = SamplingParams(max_tokens=torch.tensor(3), temperature=np.array(0.0), ignore_eos=np.True_)
    assert params == SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    assert (type(params.max_tokens), type(params.temperature), type(params.ignore_eos)) == (int, float, bool)
    assert SamplingParams(stop_token_ids=torch.tensor([3, 4])).stop_token_ids == (3, 4)
    for wrong in (torch.tensor(3.0), torch.tensor([3]), torch.tensor(True)):
        with pytest.raises(InvalidRequest, match="max_tokens must be a whole number from 0 to 2147483647, not tensor"):
            SamplingParams(max_tokens=wrong)
    ids = llm.tokenizer.encode("The river")
    wanted = llm.generate(ids, params)[0].token_ids
    tensor = torch.tensor(ids)
    for given in (tensor, tensor[None], list(tensor), np.array(ids), tuple(ids)):
        (done,) = llm.generate(given, params)
        assert done.prompt_token_ids == ids and done.token_ids == wanted


def test_a_table_is_no_list_of_prompts(llm):
    class Table(list):
        columns = ("prompt",)

    with pytest.raises(InvalidRequest, match=re.escape("one column of a table, as table['prompt'], not Table")):
        llm.generate(Table(["prompt"]))


def test_a_chats_prompt_is_what_the_template_made(llm):
    message = {"role": "user", "content": "Who are you?"}
    first, second = llm.chat([[message], [message | {"content": "a"}]], SamplingParams(n=2, max_tokens=2))
    text = llm.tokenizer.apply_chat_template([message])
    assert [each.prompt for each in first.outputs] == [text, text] and second.prompt == text.replace(
        "Who are you?", "a"
    )
    assert first.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
