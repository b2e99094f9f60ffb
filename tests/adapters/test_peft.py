"""Which of PEFT's adapters are read, and what a refused one is told."""

import json
import random
import re
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import LLM, InvalidRequest, RequestOptions, SamplingParams
from minillm.adapters import peft
from minillm.adapters.patterns import read_patterns
from minillm.adapters.peft import read_adapter
from minillm.errors import ConfigError
from minillm.model.loader import read_config
from tests import models, peft_files

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    models.make("llama3-grouped").save_pretrained(place)
    return place


@pytest.fixture
def written(directory, tmp_path):
    """Write an adapter with these fields, and read it."""

    def write(**fields):
        return read_adapter(peft_files.write(tmp_path / "adapter", directory, **fields), read_config(directory))

    return write


def test_factors_are_named_after_the_models_modules_and_scaled(written, tmp_path):
    adapter = written(rank=4, lora_alpha=6)
    raw = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    a, b = adapter.parts["model.layers.1.mlp.down_proj"].read()
    named = "base_model.model.model.layers.1.mlp.down_proj.lora_{}.weight"
    assert a.equal(raw[named.format("A")]) and b.equal(raw[named.format("B")] * 1.5)
    assert adapter.rank == 4 and len(adapter.parts) == 3 * 7


def test_a_fused_module_changes_each_of_its_parts_with_the_same_a(written, tmp_path):
    adapter = written(targets=("qkv_proj",), rank=2, lora_alpha=2)
    raw = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    parts = [adapter.parts[f"model.layers.0.self_attn.{name}_proj"].read() for name in "qkv"]
    assert all(a.equal(parts[0][0]) for a, _ in parts)
    assert torch.cat([b for _, b in parts]).equal(
        raw["base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight"]
    )


def test_bfloat16_files_and_names_with_another_prefix_are_read(written, directory, tmp_path):
    expected = written()
    place = tmp_path / "adapter" / "adapter_model.safetensors"
    renamed = {name.replace("model.layers", "model.language_model.layers"): each.bfloat16() for name, each in
               load_file(place).items()}  # fmt: skip
    save_file(renamed, place)
    found = read_adapter(tmp_path / "adapter", read_config(directory))
    assert found.parts.keys() == expected.parts.keys()
    a, b = found.parts["model.layers.0.self_attn.q_proj"].read()
    assert a.dtype == b.dtype == torch.float32


REFUSED = [
    ({"use_dora": True}, "use_dora=True: DoRA"),
    ({"bias": "all"}, "bias='all': biases"),
    ({"lora_bias": True}, "lora_bias=True"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save=.*whole modules"),
    ({"trainable_token_indices": [1]}, "rows of the embedding"),
    ({"layer_replication": [[0, 2]]}, "number of layers"),
    ({"init_lora_weights": "pissa_niter_4"}, "also changed the base weights"),
    ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens=.* not known here"),
    ({"peft_type": "PROMPT_TUNING"}, 'peft_type is .PROMPT_TUNING., and only "LORA"'),
    ({"lora_alpha": None}, "lora_alpha must be a number, not None"),
    ({"rank_pattern": {r"([\w.]|[\w.])+!": 4}}, "rank_pattern has the key .* only names with dots"),
    ({"alpha_pattern": {r"layers\.\d+\.q_proj": 4}}, "alpha_pattern has the key .* only names with dots"),
    ({"alpha_pattern": [3]}, "alpha_pattern must be an object"),
    ({"rank_pattern": dict.fromkeys(map(str, range(1025)), 4)}, "rank_pattern has 1025 keys, and at most 1024"),
    ({"rank_pattern": {"x" * 1025: 4}}, "a key has 1025 characters"),
    ({"auto_mapping": "x" * (1 << 20)}, "and PEFT writes some thousands"),
]


@pytest.mark.parametrize("fields, message", REFUSED, ids=lambda each: str(each)[:40])
def test_what_changes_more_than_products_of_factors_is_refused_by_name(fields, message, written, directory, tmp_path):
    written()
    place = tmp_path / "adapter" / "adapter_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | fields))
    with pytest.raises(ConfigError, match=rf"adapter.* .*{message}"):
        read_adapter(tmp_path / "adapter", read_config(directory))


NAMES = ("model.layers.1.self_attn.q_proj", "model.layers.11.mlp.down_proj", "layers.1.q_proj", "q_proj", "a.b.a.b.c")
KEYS = (
    *("q_proj", "proj", "self_attn.q_proj", r"self_attn\.q_proj", "1.self_attn.q_proj", "11.mlp.down_proj", "q.proj"),
    *("q_proj.", ".q_proj", r"layers\.1\..*", "layers.1.*", ".*", ".*.*", "..*", ".*proj", "layers.*attn.*", "^q_proj"),
    *("^model.layers.*_proj", "^layers.1.*", "a.b", "a.*b.*c", ".*a.*a.*", ".*a.*a.*a.*", "b.*.b.c", "", "^", "c.*c"),
    *("a.b.c", "a.*b.c", "model.*l.*1.*q_proj", ".*layers.*11.*"),
)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_a_pattern_matches_what_peft_matches(key):
    ((pattern, _),) = read_patterns({key: 1}, "rank_pattern")
    assert [pattern.matches(name) for name in NAMES] == [bool(re.match(rf"(.*\.)?({key})$", name)) for name in NAMES]


def test_random_keys_match_what_peft_matches():
    rng, found = random.Random(0), set()
    for _ in range(3000):
        key = "".join(rng.choices(["a", "b", ".", r"\.", ".*"], k=rng.randrange(7)))
        name = "".join(rng.choices("ab.", k=rng.randrange(9)))
        ((pattern, _),) = read_patterns({key: 1}, "rank_pattern")
        assert pattern.matches(name) == bool(re.match(rf"(.*\.)?({key})$", name)), (key, name)
        found.add(pattern.matches(name))
    assert found == {False, True}


def test_fields_that_only_say_how_it_was_trained_are_accepted(written):
    trained = {"lora_dropout": 0.1, "init_lora_weights": "gaussian", "layers_to_transform": [0, 1], "new": False}
    written(base_model_name_or_path="elsewhere", peft_version="0.18.0", **trained)


@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("model.embed_tokens.lora_embedding_A", (4, 96), "embeddings and heads are not supported"),
        ("lm_head.lora_A.weight", (4, 48), "lm_head has lora_A alone"),
        ("model.layers.0.mlp.up_proj.lora_magnitude_vector", (80,), "DoRA"),
        ("model.layers.0.mlp.up_proj.lora_B.bias", (80,), "its factors have biases"),
        ("score.weight", (2, 48), "whole modules"),
    ],
)
def test_a_tensor_that_is_no_factor_is_refused_by_name(name, shape, message, written, directory, tmp_path):
    written()
    place = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(load_file(place) | {f"base_model.model.{name}": torch.zeros(shape)}, place)
    with pytest.raises(ConfigError, match=message):
        read_adapter(tmp_path / "adapter", read_config(directory))


def change(directory, tmp_path, **changes):
    """Change tensors of the first layer's q_proj, and read the adapter."""
    place = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(place)
    for name, value in changes.items():
        key = f"base_model.model.model.layers.0.self_attn.q_proj.lora_{name}.weight"
        tensors[key] = value(tensors[key]).contiguous()
    save_file(tensors, place)
    return [part.read() for part in read_adapter(tmp_path / "adapter", read_config(directory)).parts.values()]


def test_factors_of_other_shapes_or_with_nan_are_refused(written, directory, tmp_path):
    written()
    with pytest.raises(ConfigError, match=r"q_proj has factors \[3, 48\] and \[48, 4\], and its rank is 4"):
        change(directory, tmp_path, A=lambda a: a[:3])
    written()
    with pytest.raises(ConfigError, match="q_proj is a matrix of 48 x 48 here.* trained on another model"):
        change(directory, tmp_path, A=lambda a: a[:, :40])
    written()
    with pytest.raises(ConfigError, match="adapter .* not all numbers: it is damaged"):
        change(directory, tmp_path, B=lambda b: b * torch.nan)


def test_files_that_are_missing_or_cut_are_named(written, directory, tmp_path):
    with pytest.raises(ConfigError, match=r"has no adapter_config.json: give the directory"):
        read_adapter(tmp_path, read_config(directory))
    written()
    place = tmp_path / "adapter" / "adapter_model.safetensors"
    place.write_bytes(place.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="truncated"):
        read_adapter(tmp_path / "adapter", read_config(directory))
    place.unlink()
    with pytest.raises(ConfigError, match="has no adapter_model.safetensors: save it as safetensors"):
        read_adapter(tmp_path / "adapter", read_config(directory))


def rename(directory, tmp_path, old, new):
    """Rename modules of an adapter, keep the old ones too if `new` begins with "+", and read it."""
    place = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(place)
    renamed = {name.replace(old, new.removeprefix("+")): each.clone() for name, each in tensors.items()}
    save_file(tensors | renamed if new.startswith("+") else renamed, place)
    return read_adapter(tmp_path / "adapter", read_config(directory))


@pytest.mark.parametrize("prefix", ["vision_tower.vision_model.encoder", "model.visual", "audio.layers.0"])
def test_layers_of_another_part_of_a_model_are_not_taken_for_the_text_models(prefix, written, directory, tmp_path):
    written()
    with pytest.raises(ConfigError, match=f"it changes {prefix}.* has no such linear layer"):
        rename(directory, tmp_path, "model.model.layers", f"model.{prefix}.layers")


def test_a_module_that_is_changed_twice_is_refused(written, directory, tmp_path):
    written()
    with pytest.raises(ConfigError, match=r"changes model.layers.0.* twice, the second time as .*model"):
        rename(directory, tmp_path, "model.model.layers", "+model.model.language_model.layers")
    written(targets=("q_proj", "k_proj", "v_proj"))
    place = tmp_path / "adapter" / "adapter_model.safetensors"
    alone = load_file(place)
    written(targets=("qkv_proj",))
    save_file(alone | load_file(place), place)
    with pytest.raises(ConfigError, match=r"twice, the second time as model.layers.0.self_attn"):
        read_adapter(tmp_path / "adapter", read_config(directory))


def test_a_header_that_is_too_large_is_not_read(written, directory, tmp_path):
    written()
    place = tmp_path / "adapter" / "adapter_model.safetensors"
    with place.open("wb") as stream:
        stream.write(struct.pack("<Q", 1 << 40))
        stream.truncate((1 << 40) + 9)  # sparse: it takes no room
    with pytest.raises(ConfigError, match=r"the header of adapter_model.safetensors has 1,099,511,627,776 bytes"):
        read_adapter(tmp_path / "adapter", read_config(directory))


# ---- what an engine says of adapters


def test_no_factor_is_read_before_its_rank_has_room(directory, tmp_path, monkeypatch):
    small, large = (peft_files.write(tmp_path / str(rank), directory, rank=rank) for rank in (4, 6))
    with LLM(directory, adapters={"small": small}) as llm, LLM(directory) as without:
        monkeypatch.setattr(peft, "read_matrix", lambda *_: pytest.fail("it was read"))
        with pytest.raises(ConfigError, match="has rank 6, and max_lora_rank=4: raise it"):
            llm.engine.load_adapter("large", large)
        with pytest.raises(ConfigError, match="no room for adapters"):
            without.engine.load_adapter("large", large)


def test_options_that_cannot_work_are_refused(directory, tmp_path):
    adapter = peft_files.write(tmp_path / "a", directory, rank=6)
    with pytest.raises(ConfigError, match="has rank 6, and max_lora_rank=4: raise it"):
        LLM(directory, adapters={"a": adapter}, max_lora_rank=4)
    for wrong in ({"": adapter}, ["no directory"], 3, {"a": 4}):
        with pytest.raises(ConfigError, match=r"adapter is a name and a directory|adapters must be names"):
            LLM(directory, adapters=wrong)
    with pytest.raises(ConfigError, match="'a' is given twice"):
        LLM(directory, adapters=[f"a={adapter}", f"a={adapter}"])


def test_an_unknown_adapter_is_refused_before_anything_runs(directory, tmp_path):
    adapter = peft_files.write(tmp_path / "a", directory)
    with LLM(directory, adapters={"a": adapter}) as llm:
        with pytest.raises(InvalidRequest, match="adapter 'b' is not loaded: there are 'a'"):
            llm.generate([1, 2], adapter="b")
        with pytest.raises(InvalidRequest, match="a name or None for each of 1 prompts"):
            llm.generate([1, 2], adapter=["a", "a"])
        with pytest.raises(ConfigError, match="'a' is loaded already: unload it first"):
            llm.engine.load_adapter("a", adapter)
        waiting = llm.engine.prepare([1, 2], options=RequestOptions(adapter="a"))
        llm.engine.unload_adapter("a")
        with pytest.raises(InvalidRequest, match="was unloaded just now"):
            llm.engine.submit(waiting)
    with LLM(directory) as llm:
        with pytest.raises(InvalidRequest, match="this engine has no adapters"):
            llm.generate([1, 2], adapter="a")
        with pytest.raises(ConfigError, match="no room for adapters: start it with max_loras"):
            llm.engine.load_adapter("a", adapter)


def test_a_request_has_the_adapter_that_its_name_had_at_one_moment(directory, tmp_path, monkeypatch):
    """LoRA is replaced by a soft prompt while a request is prepared: the bare model must not answer."""
    adapter = peft_files.write(tmp_path / "a", directory)
    with LLM(directory, adapters={"a": adapter}) as llm:
        check = type(llm.engine).check_params

        def replaced(self, params):
            check(self, params)
            self.unload_adapter("a")
            self.adapters.by_name["a"] = torch.zeros(2, 48).numpy()

        monkeypatch.setattr(type(llm.engine), "check_params", replaced)
        tracked = llm.engine.prepare([1, 2], options=RequestOptions(adapter="a"))
        assert (tracked.request.load, tracked.request.prompt.tolist()) == (1, [1, 2])
        with pytest.raises(InvalidRequest, match="was unloaded just now"):
            llm.engine.submit(tracked)


def test_two_loads_of_one_name_are_one(directory, tmp_path, monkeypatch):
    adapter = peft_files.write(tmp_path / "a", directory)
    with LLM(directory, max_loras=2) as llm:
        engine, load, loads = llm.engine, llm.engine.executor.load_adapter, []

        def meanwhile(number, read):
            loads.append(number)
            with pytest.raises(ConfigError, match="'a' is loaded already"):
                engine.load_adapter("a", adapter)
            for use in (engine.unload_adapter, lambda name: llm.generate([1], adapter=name)):
                with pytest.raises(InvalidRequest, match="'a' is not loaded"):
                    use("a")
            load(number, read)

        monkeypatch.setattr(engine.executor, "load_adapter", meanwhile)
        engine.load_adapter("a", adapter)
        assert loads == [1] == list(engine.executor.runner.state.adapters._ready) and engine.adapters.names == ["a"]


def test_a_load_that_fails_leaves_its_name_free(directory, tmp_path):
    adapter = peft_files.write(tmp_path / "a", directory)
    with LLM(directory, max_loras=2, max_lora_rank=4) as llm:
        for wrong in (tmp_path / "missing", peft_files.write(tmp_path / "b", directory, rank=6), 5, "x" * 1000):
            with pytest.raises(ConfigError):
                llm.engine.load_adapter("a", wrong)
        llm.engine.load_adapter("a", adapter)
        for wrong in (None, 5, []):
            with pytest.raises(InvalidRequest, match="name must be a string"):
                llm.engine.unload_adapter(wrong)


def test_requests_that_run_keep_their_adapter_when_it_is_unloaded(directory, tmp_path):
    adapter = peft_files.write(tmp_path / "a", directory)
    with LLM(directory, adapters={"a": adapter}) as llm:
        engine = llm.engine
        (expected,) = llm.generate([1, 2], GREEDY, adapter="a")
        running = engine.prepare([1, 2], GREEDY, RequestOptions(adapter="a"))
        engine.submit(running)
        engine.unload_adapter("a")
        assert engine.adapters.retired == {1}
        while engine.has_work:
            engine.step()
        assert running.completion.token_ids == expected.token_ids
        assert not engine.adapters.retired and not engine.executor.runner.state.adapters._ready
