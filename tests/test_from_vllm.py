"""Scripts written for vLLM run, or are told what to write instead."""

import asyncio
import copy
import dataclasses
import inspect
import json
import pickle
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from minillm import LLM, SamplingParams, from_vllm
from minillm.cli import from_vllm as commands
from minillm.config import EngineConfig
from minillm.engine.async_llm import AsyncLLM
from minillm.errors import ConfigError, InvalidRequest
from minillm.request import Delta, Logprob
from minillm.tokenizer.patterns import TokenizerError

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((Path(__file__).parent / "from_vllm").glob("*.py"))
PAGE = (ROOT / "docs" / "from_vllm.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_in_vllms_way_runs(script, monkeypatch):
    opened, make = [], LLM.__init__
    monkeypatch.setattr(LLM, "__init__", lambda self, *a, **o: (opened.append(self), make(self, *a, **o))[1])
    try:
        monkeypatch.chdir(ROOT)
        runpy.run_path(str(script), run_name="__main__")
    finally:
        for llm in opened:
            llm.close()


def test_there_are_ten_of_them():
    assert len(SCRIPTS) == 10


@pytest.fixture(scope="module")
def llm():
    with LLM(device="cpu") as llm:
        yield llm


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ({"tensor_parallel_size": 2}, "one engine for each"),
        ({"tensor_parallel_size": True}, "one engine for each"),
        ({"enable_lora": True}, "merge the adapter"),
        ({"revision": "abc"}, "directory of the revision"),
        ({"speculative_config": {"method": "ngram"}}, "by the model itself"),
        ({"enable_chunked_prefill": False}, "policy='whole'"),
    ],
    ids=str,
)
def test_an_engine_option_that_is_missing_says_what_to_do_instead(option, hint):
    with pytest.raises(ConfigError, match=f"{next(iter(option))}=.*: minillm has no such option; .*{hint}"):
        LLM(**option)


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ({"best_of": 4}, "use n"),
        ({"guided_decoding": "GuidedDecodingParams()"}, "json_schema"),
        ({"structured_outputs": {"json": {}}}, "regex"),
        ({"skip_special_tokens": False}, "token_ids"),
        ({"include_stop_str_in_output": True}, "stop_reason"),
        ({"bad_words": ["x"]}, "logit_bias"),
    ],
    ids=str,
)
def test_a_sampling_parameter_that_is_missing_says_what_to_do_instead(option, hint):
    with pytest.raises(InvalidRequest, match=f"{next(iter(option))}=.*: minillm has no such option; .*{hint}"):
        SamplingParams(**option)


def test_what_asks_for_nothing_is_accepted():
    for table, make in ((from_vllm.ENGINE, EngineConfig.of), (from_vllm.SAMPLING, SamplingParams)):
        for name, (nothing, _) in table.items():
            for value in nothing:
                assert make(**{name: "anything" if value is from_vllm.ANY else value}) == make(), (name, value)


def test_what_neither_has_is_still_an_error(llm):
    with pytest.raises(ConfigError, match="tensor_parallel: no such option"):
        LLM(tensor_parallel=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        SamplingParams(temprature=0)
    with pytest.raises(
        InvalidRequest, match="sampling_parms: no such argument; there are params, options and progress"
    ):
        llm.generate("a", sampling_parms=SamplingParams())
    with pytest.raises(InvalidRequest, match="the same: give one of them"):
        llm.generate("a", SamplingParams(), sampling_params=SamplingParams())
    with pytest.raises(InvalidRequest, match=r"lora_request=.* merge the adapter"):
        llm.chat([{"role": "user", "content": "a"}], lora_request=object())


@pytest.mark.parametrize(
    "prompt",
    [{}, {"text": "a"}, {"prompt": None}, {"prompt": "a", "multi_modal_data": {"image": 1}}, {"prompt": 5}],
    ids=str,
)
def test_other_dictionaries_are_no_prompts(llm, prompt):
    for given in (prompt, ["a", prompt]):
        with pytest.raises(InvalidRequest):
            llm.generate(given)


def test_parameters_keep_their_signature_and_can_be_copied():
    assert "temperature" in inspect.signature(SamplingParams).parameters
    assert dataclasses.replace(SamplingParams(n=2), top_p=0.5).n == 2


@pytest.mark.parametrize("wrong", [0, -1, 129, 1.5, True, None, "2"])
def test_n_is_a_number_of_choices(wrong):
    with pytest.raises(InvalidRequest, match="n must be a whole number from 1 to 128"):
        SamplingParams(n=wrong)


def test_choices_are_those_of_as_many_requests(llm):
    params = SamplingParams(n=np.int64(3), seed=11, max_tokens=6)
    found = llm.generate("The river", params)[0].outputs
    alone = [llm.generate("The river", SamplingParams(seed=seed, max_tokens=6))[0] for seed in (11, 12, 13)]
    assert [each.token_ids for each in found] == [each.token_ids for each in alone]
    assert [each.seed for each in params.choices(3)] == [11, 12, 13] and {each.n for each in params.choices(3)} == {1}


def test_minus_one_is_no_seed(llm):
    for given in (-1, np.int64(-1)):
        params = SamplingParams(seed=given, n=2)
        assert params == SamplingParams(n=2) and [each.seed for each in params.choices(2)] == [None, None]
    assert len({llm.engine.prepare([5], SamplingParams(seed=-1)).request.seed for _ in range(8)}) == 8
    assert [each.seed for each in SamplingParams(seed=-2, n=3).choices(3)] == [-2, -1, 0]


def test_a_stream_has_one_choice():
    engine = AsyncLLM(device="cpu")
    try:
        with pytest.raises(InvalidRequest, match="n is 2, but a stream has one choice"):
            engine.prepare("a", SamplingParams(n=2), None, 0)
    finally:
        engine.close()


def test_a_stream_takes_vllms_names(llm):
    params = SamplingParams(max_tokens=3, temperature=0)

    async def both() -> list[str]:
        engine = AsyncLLM(engine=llm)
        try:
            with pytest.raises(InvalidRequest, match="lora_request=.* merge the adapter"):
                await engine.generate("The river", lora_request=object())
            with pytest.raises(InvalidRequest, match=r"async for delta in engine\.stream\(prompt, params\)"):
                async for _ in engine.generate("The river", sampling_params=params):
                    raise AssertionError("nothing to iterate over")
            texts = [delta.text async for delta in engine.stream("The river", sampling_params=params)]
            return ["".join(texts), (await engine.generate("The river", sampling_params=params)).text]
        finally:
            engine.close()

    assert asyncio.run(both()) == [llm.generate("The river", params)[0].text] * 2


def test_an_abort_may_be_awaited(llm):
    async def aborted(wait: bool) -> str:
        engine = AsyncLLM(engine=llm)
        try:
            stream = engine.stream("The river", SamplingParams(max_tokens=None, ignore_eos=True), request_id="a")
            await anext(stream)
            with pytest.raises(InvalidRequest, match=r"abort takes one request's id, not \['a'\]: call it for each"):
                engine.abort(["a"])
            ended = engine.abort("a")
            if wait:
                assert await ended is None
            return [delta.finish_reason async for delta in stream][-1]
        finally:
            engine.close()

    assert [asyncio.run(aborted(wait)) for wait in (False, True)] == ["abort", "abort"]


def test_without_a_seed_engines_differ_and_with_one_they_do_not():
    assert EngineConfig.of(seed=None).seed != EngineConfig.of(seed=None).seed
    assert EngineConfig.of().seed == 0


def test_a_missing_attribute_or_name_says_what_to_do_instead(llm):
    done = llm.generate("The river", SamplingParams(max_tokens=2))[0]
    opened = AsyncLLM(engine=llm)
    opened.close()
    owners = {"LLM": llm, "AsyncLLM": opened, "Completion": done, "SamplingParams": SamplingParams()}
    owners |= {"Tokenizer": llm.get_tokenizer(), "Logprob": Logprob(-0.5), "Delta": Delta("a", [5])}
    for owner, found in owners.items():
        for name, instead in from_vllm.ATTRIBUTES[owner].items():
            with pytest.raises(AttributeError, match=re.escape(f"{owner} has no attribute {name!r}: {instead}")):
                getattr(found, name)
        with pytest.raises(AttributeError, match=f"{owner} has no attribute 'other'$"):
            _ = found.other
    for kind, name in ((LLM, "from_engine_args"), (AsyncLLM, "from_engine_args"), (SamplingParams, "from_optional")):
        with pytest.raises(
            AttributeError, match=f"{kind.__name__} has no attribute '{name}': (give|leave out) the options"
        ):
            getattr(kind, name)
    for name, instead in from_vllm.ATTRIBUTES["minillm"].items():
        with pytest.raises(ImportError, match=re.escape(f"minillm has no {name}: {instead}")):
            exec(f"from minillm import {name}")
    assert pickle.loads(pickle.dumps(copy.deepcopy(done))) == done


def test_options_that_both_have_take_vllms_values():
    for name, values in from_vllm.VALUES.items():
        for value, ours in values.items():
            assert EngineConfig.of(**{name: value}) == EngineConfig.of(**{name: ours}), (name, value)
    for name in from_vllm.NONE_IS_DEFAULT:
        assert EngineConfig.of(**{name: None}) == EngineConfig.of()
    assert EngineConfig.of(tensor_parallel_size=np.int64(1)) == EngineConfig.of()
    for name, others in from_vllm.OTHER_VALUES.items():
        for value, instead in others.items():
            with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}: {instead}")):
                LLM(**{name: value})
            for ours in re.findall("'(.*?)'", instead):
                EngineConfig.of(**{"quantization" if "quantization '" in instead else name: ours})


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


def test_a_log_probability_is_a_number_with_vllms_attribute(llm):
    params = SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=1)
    done = llm.generate("The river", params)[0]
    _, *scored = done.prompt_logprobs
    for entry in done.logprobs + scored:
        for each in entry.values():
            assert type(each.logprob) is float and each.logprob == each and isinstance(each, float)
            assert repr(each) == repr(each.logprob) == json.dumps(each)
            for copied in (pickle.loads(pickle.dumps(each)), copy.deepcopy(each)):
                assert copied == each and copied.logprob == each.logprob
    assert type(done.cumulative_logprob) is float and not hasattr(done.logprobs[0], "logprob")

    async def streamed() -> list:
        engine = AsyncLLM(engine=llm)
        try:
            return [entry async for delta in engine.stream("The river", params) for entry in delta.logprobs]
        finally:
            engine.close()

    assert all(isinstance(each, Logprob) for entry in asyncio.run(streamed()) for each in entry.values())


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
        llm.get_tokenizer().apply_chat_template([{"role": "user", "content": "a"}], tokenize=True)


def test_the_page_names_every_option():
    engine = {name.replace("_", "-") for name in from_vllm.ENGINE}
    server = {f"--{name}": each for name, each in commands.SERVE.items() if name not in engine}
    bench = {f"--{name}": each for name, each in commands.BENCH.items()}
    tables = (from_vllm.ENGINE, from_vllm.SAMPLING, from_vllm.GENERATE, from_vllm.PROMPT, from_vllm.FIELDS)
    for table in (*tables, from_vllm.TURN, server, bench):
        for name, (_, instead) in table.items():
            row = rf"^\| (`.*`, )?`{name}`(, `.*`)? \| {re.escape(instead)} \|$"
            assert re.search(row if instead else rf"^Without effect: [^|]*`{name}`", PAGE, re.MULTILINE), name
    for name, ours in (commands.SERVE_NAMES | commands.BENCH_NAMES).items():
        assert f"-{name}` | `--{ours}` |" in PAGE
    for name, others in from_vllm.OTHER_VALUES.items():
        for value, instead in others.items():
            assert re.search(rf"\| `{name}` \| .*`{value}`.* \| {re.escape(instead)} \|", PAGE), value
    for names in from_vllm.ATTRIBUTES.values():
        for name, instead in names.items():
            assert f"`{name}`" in PAGE and instead in PAGE, name


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
    for given in (tensor, tensor[None], list(tensor), {"prompt_token_ids": tensor}, np.array(ids), tuple(ids)):
        (done,) = llm.generate(given, params)
        assert done.prompt_token_ids == ids and done.token_ids == wanted


def test_a_table_is_no_list_of_prompts(llm):
    class Table(list):
        columns = ("prompt",)

    with pytest.raises(InvalidRequest, match=re.escape("one column of a table, as table['prompt'], not Table")):
        llm.generate(Table(["prompt"]))


def test_members_of_a_prompt_that_are_missing_say_what_to_do_instead(llm):
    for name, (nothing, instead) in from_vllm.PROMPT.items():
        for value in nothing:
            assert from_vllm.prompt({"prompt": "a", name: value}) == "a"
        with pytest.raises(InvalidRequest, match=f"{name}=.*: minillm has no such option; {re.escape(instead)}"):
            llm.generate({"prompt": "a", name: {"image": 1}})
    with pytest.raises(InvalidRequest, match="prompt_token_ids must be token ids, not '<bos>a'.*add_special_tokens"):
        llm.generate({"prompt_token_ids": "<bos>a"})


def test_old_and_positional_arguments_say_what_to_do_instead(llm):
    with pytest.raises(InvalidRequest, match="prompt_token_ids=.*: minillm has no such option; give prompts="):
        llm.generate(prompt_token_ids=[[2, 5]], sampling_params=SamplingParams())
    with pytest.raises(InvalidRequest, match="prompts must be a string"):
        llm.generate()
    for call, prompt in ((llm.generate, "a"), (llm.chat, [{"role": "user", "content": "a"}])):
        with pytest.raises(InvalidRequest, match="give the progress bar by name, as use_tqdm=False"):
            call(prompt, SamplingParams(), False)


def test_parameters_have_names():
    assert {each.kind for each in inspect.signature(SamplingParams).parameters.values()} == {
        inspect.Parameter.KEYWORD_ONLY
    }
    for values in ((2, 1, 0.0), ({"temperature": 0},)):
        with pytest.raises(
            InvalidRequest, match=r"by name only, as SamplingParams\(temperature=0.8, max_tokens=64\), not"
        ):
            SamplingParams(*values)


def test_a_schema_that_is_no_dictionary_says_how_to_make_one():
    class Isle(BaseModel):
        name: str

    schema = SamplingParams(json_schema=Isle.model_json_schema()).json_schema
    assert SamplingParams(json_schema=json.loads(json.dumps(schema))).json_schema == schema
    for wrong, hint in (
        (json.dumps(schema), "json.loads(...)"),
        (Isle, "Model.model_json_schema()"),
        (Isle(name="a"), "Model.model_json_schema()"),
        (5, "as {'type': 'object'}"),
    ):
        with pytest.raises(InvalidRequest, match=f"json_schema must be .*{re.escape(hint)}.*, not "):
            SamplingParams(json_schema=wrong)


def test_parameters_that_someone_changes_say_what_to_do_instead():
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError, match=re.escape("dataclasses.replace(params, max_tokens=...)")):
        params.max_tokens = 5
    assert params == SamplingParams() and pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params


def test_a_chats_prompt_is_what_the_template_made(llm):
    message = {"role": "user", "content": "Who are you?"}
    first, second = llm.chat([[message], [message | {"content": "a"}]], SamplingParams(n=2, max_tokens=2))
    text = llm.get_tokenizer().apply_chat_template([message])
    assert [each.prompt for each in first.outputs] == [text, text] and second.prompt == text.replace(
        "Who are you?", "a"
    )
    assert first.prompt_token_ids == llm.get_tokenizer().encode(text, add_special_tokens=False)


def test_a_tokenizer_that_is_called_says_what_to_do_instead(llm):
    with pytest.raises(TokenizerError, match=r"use encode\(text\)"):
        llm.get_tokenizer()("The river", return_tensors="pt")
