"""Scripts written for vLLM run, or are told what to write instead."""

import asyncio
import copy
import dataclasses
import json
import pickle
import re
import runpy
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch

from minillm.config import EngineConfig
from minillm.errors import ConfigError, InvalidRequest
from minillm.from_vllm import LLM, AsyncLLM, Completion, SamplingParams, command_line, http, options
from minillm.from_vllm.attributes import ATTRIBUTES
from minillm.from_vllm.scripts import Delta, Logprob
from minillm.tokenizer import TokenizerError
from tests.waiting import async_wait_until

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_"))
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


def test_there_are_ten_of_them_which_import_from_one_place():
    imported = re.compile(r"^from (minillm\S*) import", re.MULTILINE)
    assert [imported.findall(script.read_text()) for script in SCRIPTS] == [["minillm.from_vllm"]] * 10


@pytest.fixture(scope="module")
def llm():
    with LLM(device="cpu") as llm:
        yield llm


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ({"data_parallel_size": 2}, "one engine for each"),
        ({"enable_lora": True}, "give adapters=.*max_loras"),
        ({"revision": "abc"}, "org/name@revision"),
        ({"hf_token": "hf_x"}, "set HF_TOKEN"),
        ({"speculative_config": {"method": "ngram"}}, "speculate='ngram'"),
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


def engine_config(**given) -> EngineConfig:
    return EngineConfig.of(**options.engine_options(given))


def test_what_asks_for_nothing_is_accepted():
    for table, make in ((options.ENGINE, engine_config), (options.SAMPLING, SamplingParams)):
        for name, (nothing, _) in table.items():
            for value in nothing:
                assert make(**{name: "anything" if value is options.ANY else value}) == make(), (name, value)


def test_what_neither_has_is_still_an_error(llm):
    with pytest.raises(ConfigError, match="tensor_parallel: no such option"):
        LLM(tensor_parallel=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        SamplingParams(temprature=0)
    with pytest.raises(
        InvalidRequest, match="sampling_parms: no such argument; there are params, options, adapter and progress"
    ):
        llm.generate("a", sampling_parms=SamplingParams())
    with pytest.raises(InvalidRequest, match="the same: give one of them"):
        llm.generate("a", SamplingParams(), sampling_params=SamplingParams())
    with pytest.raises(InvalidRequest, match=r"lora_request=.* give adapters="):
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


def test_parameters_can_be_copied():
    copied = dataclasses.replace(SamplingParams(n=2), top_p=0.5)
    assert (type(copied), copied.n, copied.top_p) == (SamplingParams, 2, 0.5)


def test_minus_one_is_no_seed(llm):
    for given in (-1, np.int64(-1)):
        params = SamplingParams(seed=given, n=2)
        assert params == SamplingParams(n=2) and [each.seed for each in params.choices(2)] == [None, None]
    assert len({llm.engine.prepare([5], SamplingParams(seed=-1)).request.seed for _ in range(8)}) == 8
    assert [each.seed for each in SamplingParams(seed=-2, n=3).choices(3)] == [-2, -1, 0]


def test_a_stream_takes_vllms_names(llm):
    params = SamplingParams(max_tokens=3, temperature=0)

    async def both() -> list[str]:
        engine = AsyncLLM(engine=llm)
        try:
            with pytest.raises(InvalidRequest, match="lora_request=.* give adapters="):
                await engine.generate("The river", lora_request=object())
            with pytest.raises(InvalidRequest, match=r"async for delta in engine\.stream\(prompt, params\)"):
                async for _ in engine.generate("The river", sampling_params=params):
                    raise AssertionError("nothing to iterate over")
            deltas = [delta async for delta in engine.stream(prompt="The river", sampling_params=params)]
            assert {type(each) for each in deltas} == {Delta} and type(deltas[-1].completion) is Completion
            whole = await engine.generate({"prompt": "The river"}, sampling_params=params)
            return ["".join(each.text for each in deltas), whole.text]
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


def test_a_missing_attribute_or_name_says_what_to_do_instead(llm):
    done = llm.generate("The river", SamplingParams(max_tokens=2))[0]
    opened = AsyncLLM(engine=llm)
    opened.close()
    owners = {"LLM": llm, "AsyncLLM": opened, "Completion": done, "SamplingParams": SamplingParams()}
    owners |= {"Tokenizer": llm.get_tokenizer(), "Logprob": Logprob(-0.5), "Delta": Delta("a", [5])}
    for owner, found in owners.items():
        for name, instead in ATTRIBUTES[owner].items():
            with pytest.raises(AttributeError, match=re.escape(f"{owner} has no attribute {name!r}: {instead}")):
                getattr(found, name)
    for kind, name in ((LLM, "from_engine_args"), (AsyncLLM, "from_engine_args"), (SamplingParams, "from_optional")):
        with pytest.raises(
            AttributeError, match=f"{kind.__name__} has no attribute '{name}': (give|leave out) the options"
        ):
            getattr(kind, name)
    for name, instead in ATTRIBUTES["minillm.from_vllm"].items():
        with pytest.raises(ImportError, match=re.escape(f"minillm.from_vllm has no {name}: {instead}")):
            exec(f"from minillm.from_vllm import {name}")
    assert pickle.loads(pickle.dumps(copy.deepcopy(done))) == done


def test_options_that_both_have_take_vllms_values():
    for name, values in options.VALUES.items():
        for value, ours in values.items():
            assert engine_config(**{name: value}) == EngineConfig.of(**{name: ours}), (name, value)
    for name in options.NONE_IS_DEFAULT:
        assert engine_config(**{name: None}) == EngineConfig.of()
    assert engine_config(tensor_parallel_size=np.int64(1)) == EngineConfig.of()
    for name, others in options.OTHER_VALUES.items():
        for value, instead in others.items():
            with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}: {instead}")):
                LLM(**{name: value})
            for ours in re.findall("'(.*?)'", instead):
                EngineConfig.of(**{"quantization" if "quantization '" in instead else name: ours})


def test_a_log_probability_is_a_number_with_vllms_attribute(llm):
    params = SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=1)
    first, second = llm.generate("The river", dataclasses.replace(params, n=2))[0].outputs
    done = llm.generate("The river", params)[0]
    _, *scored = done.prompt_logprobs
    for entry in done.logprobs + scored + first.logprobs + second.logprobs:
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


def test_the_page_names_every_option():
    engine = {name.replace("_", "-") for name in options.ENGINE}
    server = {f"--{name}": each for name, each in command_line.SERVE.items() if name not in engine}
    bench = {f"--{name}": each for name, each in command_line.BENCH.items()}
    tables = (options.ENGINE, options.SAMPLING, options.GENERATE, options.PROMPT, http.FIELDS)
    for table in (*tables, http.TURN, server, bench):
        for name, (_, instead) in table.items():
            row = rf"^\| (`.*`, )?`{name}`(, `.*`)? \| {re.escape(instead)} \|$"
            assert re.search(row if instead else rf"^Without effect: [^|]*`{name}`", PAGE, re.MULTILINE), name
    for name, ours in (command_line.SERVE_NAMES | command_line.BENCH_NAMES).items():
        assert f"-{name}` | `--{ours}` |" in PAGE
    for name, others in options.OTHER_VALUES.items():
        for value, instead in others.items():
            assert re.search(rf"\| `{name}` \| .*`{value}`.* \| {re.escape(instead)} \|", PAGE), value
    for names in ATTRIBUTES.values():
        for name, instead in names.items():
            assert f"`{name}`" in PAGE and instead in PAGE, name


def test_token_ids_of_a_prompt_may_be_torchs(llm):
    ids = llm.get_tokenizer().encode("The river")
    (done,) = llm.generate({"prompt_token_ids": torch.tensor(ids)}, SamplingParams(max_tokens=1))
    assert done.prompt_token_ids == ids


def test_members_of_a_prompt_that_are_missing_say_what_to_do_instead(llm):
    for name, (nothing, instead) in options.PROMPT.items():
        for value in nothing:
            assert options.translated_prompt({"prompt": "a", name: value}) == "a"
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
    for values in ((2, 1, 0.0), ({"temperature": 0},)):
        with pytest.raises(
            InvalidRequest, match=r"by name only, as SamplingParams\(temperature=0.8, max_tokens=64\), not"
        ):
            SamplingParams(*values)


def test_parameters_that_someone_changes_say_what_to_do_instead():
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError, match=re.escape("dataclasses.replace(params, max_tokens=...)")):
        params.max_tokens = 5
    assert params == SamplingParams() and pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params


def test_a_tokenizer_that_is_called_says_what_to_do_instead(llm):
    with pytest.raises(TokenizerError, match=r"use encode\(text\)"):
        llm.get_tokenizer()("The river", return_tensors="pt")


def test_leaving_a_stream_aborts_its_request(llm):
    async def left() -> None:
        engine = AsyncLLM(engine=llm)
        try:
            async with aclosing(engine.stream("The river", SamplingParams(max_tokens=None, ignore_eos=True))) as stream:
                async for _ in stream:
                    break
            await async_wait_until(lambda: not llm.engine.tracked)
        finally:
            engine.close()

    asyncio.run(left())


def test_a_tokenizer_of_the_users_own_stays_as_it_is(llm):
    class Own(type(llm.engine.tokenizer)):
        pass

    own = Own.from_pretrained(ROOT / "data" / "tiny-gemma")
    with LLM(tokenizer=own, device="cpu", num_blocks=16) as opened:
        assert opened.get_tokenizer() is own
