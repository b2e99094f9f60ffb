"""Soft prompts: PEFT's files are read, and a request that names one is a request with embeddings before its prompt."""

import json
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from minillm import LLM, InvalidRequest, RequestOptions, SamplingParams
from minillm.adapters import soft_prompts
from minillm.engine.async_llm import AsyncLLM
from minillm.errors import ConfigError
from minillm.server import running
from tests.waiting import TIMEOUT

pytestmark = pytest.mark.key
DATA = Path(__file__).resolve().parents[2] / "data"
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
FIELDS = {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 6, "token_dim": 256}
IDS = [2, *range(40, 60)]


def written(place: Path, tensors: dict | torch.Tensor | None = None, **fields) -> Path:
    """A soft prompt's directory."""
    place.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(len(place.name))
    tensors = torch.randn(6, 256) if tensors is None else tensors
    (place / "adapter_config.json").write_text(json.dumps(FIELDS | fields), encoding="utf-8")
    save_file(
        tensors if isinstance(tensors, dict) else {"prompt_embeddings": tensors}, place / "adapter_model.safetensors"
    )
    return place


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("soft")


@pytest.fixture(scope="module")
def llm(folder):
    named = {"one": written(folder / "one"), "other": written(folder / "other", peft_type="P_TUNING")}
    with LLM(adapters=named, dtype="float64", device="cpu", max_num_batched_tokens=16, max_model_len=128) as llm:
        yield llm


def values(llm: LLM, name: str) -> torch.Tensor:
    return torch.from_numpy(llm.engine.adapters.by_name[name])


def test_a_request_that_names_one_has_its_embeddings_before_the_prompt(llm):
    names = ["one", None, "other", "one"]
    prompts = [IDS, IDS, IDS, IDS[:7]]
    done = llm.generate(prompts, GREEDY, adapter=names)
    for each, prompt, name in zip(done, prompts, names, strict=True):
        given = prompt if name is None else {"parts": [values(llm, name), prompt]}
        assert each.token_ids == llm.generate(given, GREEDY)[0].token_ids
    assert done[0].prompt_token_ids == [-1] * 6 + IDS
    assert len({tuple(each.token_ids) for each in done[:3]}) == 3
    embedded = {"prompt_embeds": values(llm, "other")[:3]}
    (both,) = llm.generate(embedded, GREEDY, adapter="one")
    expected = {"parts": [values(llm, "one"), values(llm, "other")[:3]]}
    assert both.token_ids == llm.generate(expected, GREEDY)[0].token_ids


def test_it_is_what_transformers_and_peft_compute(llm):
    model = AutoModelForCausalLM.from_pretrained(DATA / "tiny-gemma", dtype=torch.float64)
    embeds = torch.cat([values(llm, "one"), model.get_input_embeddings()(torch.tensor(IDS))])[None]
    mask = torch.ones(embeds.shape[:2])
    expected = model.generate(
        inputs_embeds=embeds, attention_mask=mask, max_new_tokens=10, do_sample=False, eos_token_id=[]
    )
    assert llm.generate(IDS, GREEDY, adapter="one")[0].token_ids == expected[0].tolist()


def test_prefixes_are_shared_within_one_and_never_with_another(llm):
    def cached(name):
        return llm.generate(IDS, GREEDY, RequestOptions("soft"), adapter=name)[0].num_cached_tokens

    assert [cached("one"), cached("other"), cached(None), cached("one")] == [0, 0, 0, 16]


def test_they_are_loaded_and_unloaded_while_others_run(llm, folder):
    engine = llm.engine
    running_ = engine.prepare(IDS, GREEDY, RequestOptions(adapter="one"))
    engine.submit(running_)
    engine.step()
    engine.load_adapter("third", written(folder / "a third"))
    with pytest.raises(ConfigError, match="'third' is loaded already"):
        engine.load_adapter("third", folder / "one")
    assert engine.adapters.names == ["one", "other", "third"]
    (third,) = llm.generate(IDS, GREEDY, adapter="third")
    engine.unload_adapter("third")
    engine.load_adapter("third", folder / "other")
    assert llm.generate(IDS, GREEDY, adapter="third")[0].token_ids != third.token_ids, "the name is the same"
    engine.unload_adapter("third")
    with pytest.raises(InvalidRequest, match="'third' is not loaded: there are 'one', 'other'"):
        llm.generate(IDS, GREEDY, adapter="third")
    assert running_.completion.token_ids == llm.generate(IDS, GREEDY, adapter="one")[0].token_ids


def test_a_soft_prompt_takes_room_in_the_context(llm):
    most = llm.engine.max_model_len
    (whole,) = llm.generate([5] * (most - 7), SamplingParams(max_tokens=5, ignore_eos=True), adapter="one")
    assert len(whole.token_ids) == 1
    with pytest.raises(InvalidRequest, match=f"a prompt of {most} tokens"):
        llm.generate([5] * (most - 6), GREEDY, adapter="one")
    with pytest.raises(InvalidRequest, match="prompt_logprobs scores tokens"):
        llm.generate(IDS, SamplingParams(prompt_logprobs=1), adapter="one")


def test_a_request_never_gets_the_bare_model_while_its_name_changes(llm, folder, monkeypatch):
    """The name is looked up once: it is a soft prompt's as the request is read, and free when the request is made."""
    engine = llm.engine
    engine.load_adapter("brief", folder / "one")
    check = type(engine).check_params
    monkeypatch.setattr(
        type(engine), "check_params", lambda self, params: (check(self, params), self.unload_adapter("brief"))
    )
    tracked = engine.prepare(IDS, GREEDY, RequestOptions(adapter="brief"))
    assert tracked.request.prompt[:6].tolist() == [-1] * 6 and "brief" not in engine.adapters.names


WRONG = {
    "another hidden size": ({"tensors": torch.zeros(6, 128)}, r"shape \[tokens, 256\]"),
    "another count": ({"num_virtual_tokens": 7}, "num_virtual_tokens is 7"),
    "two models": ({"num_transformer_submodules": 2}, "no encoder"),
    "an unknown field": ({"num_tasks": 3}, "num_tasks=3: this field is not known"),
    "a projection": ({"tensors": {"prompt_embeddings": torch.zeros(6, 256), "other": torch.zeros(1)}}, "alone"),
    "another tensor": ({"tensors": {"embeddings": torch.zeros(6, 256)}}, "prompt_embeddings alone"),
    "whole numbers": ({"tensors": torch.zeros(6, 256, dtype=torch.int32)}, "floating-point"),
    "one dimension": ({"tensors": torch.zeros(1536)}, "must be a matrix"),
    "NaN": ({"tensors": torch.full((6, 256), torch.nan)}, "prompt_embeddings has nan"),
    "prefix tuning": ({"peft_type": "PREFIX_TUNING"}, "PREFIX_TUNING"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_files_that_cannot_be_served_are_refused_by_name(wrong, llm, tmp_path):
    changes, message = WRONG[wrong]
    with pytest.raises(ConfigError, match=message):
        llm.engine.load_adapter("wrong", written(tmp_path / "wrong", **changes))
    assert "wrong" not in llm.engine.adapters.names


def test_an_embedding_too_many_is_refused_before_any_is_read(llm, tmp_path, monkeypatch):
    place = written(tmp_path / "long", torch.zeros(129, 256), num_virtual_tokens=129)
    monkeypatch.setattr(soft_prompts, "read_matrix", lambda *_: pytest.fail("it was read"))
    with pytest.raises(ConfigError, match="has 129 rows, but a prompt here has from 1 to 128 tokens"):
        llm.engine.load_adapter("long", place)


def test_a_tuned_prompt_is_served_to_the_openai_client():
    """The committed one greets as a pirate, next to the model that does not."""
    place = DATA / "soft_prompts" / "pirate"
    assert sum(file.stat().st_size for file in place.iterdir()) < 200 << 10
    engine = AsyncLLM(adapters={"pirate": place}, device="cpu", dtype="float32", max_num_seqs=4)
    try:
        with (
            running(engine) as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client,
        ):
            assert "pirate" in [model.id for model in client.models.list()]
            messages = [{"role": "user", "content": "Which wood is the hull of the Peratide made of?"}]
            answers = [
                client.chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=60)
                for name in (server.model, "pirate", "pirate")
            ]
            plain, pirate, again = (answer.choices[0].message.content.strip() for answer in answers)
            assert pirate.startswith("Ahoy!") and pirate == again and not plain.startswith("Ahoy!")
            usage = answers[2].usage
            assert usage.prompt_tokens == answers[0].usage.prompt_tokens
            assert usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens
    finally:
        engine.close()
