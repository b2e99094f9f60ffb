"""Loading: every checkpoint layout gives the same model, memory overhead is small, and errors are clear."""

import dataclasses
import json
import subprocess
import sys
import types

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm.errors import ConfigError
from minillm.model import checkpoint, loader
from minillm.model.config import PRESETS
from minillm.model.families import ARCHITECTURES
from minillm.model.loader import load_model
from minillm.quantization import Recipe
from tests import models
from tests.proofs import only_in_proofs


@pytest.fixture(scope="module")
def trained():
    return models.make("llama-biases")


@pytest.fixture
def saved(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    return tmp_path


def parameters(model):
    """A dense model's parameters under their checkpoint names, each as a slice."""
    config = model.config
    query, kv, inner = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
        config.intermediate_size,
    )
    found = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.final_norm}
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = model.head.weight
    for index, layer in enumerate(model.layers):
        parts = {
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): (layer.qkv, (query, kv, kv)),
            ("self_attn.o_proj",): (layer.attention_out, (config.hidden_size,)),
            ("mlp.gate_proj", "mlp.up_proj"): (layer.gate_up, (inner, inner)),
            ("mlp.down_proj",): (layer.down, (config.hidden_size,)),
        }
        found |= {
            f"model.layers.{index}.{name}.{kind}": tensor
            for names, (weight, rows) in parts.items()
            for kind in ("weight", "bias")
            if getattr(weight, kind) is not None
            for name, tensor in zip(names, getattr(weight, kind).split(rows), strict=True)
        }
        for norm, name in ARCHITECTURES[config.architecture].norms.items():
            found[f"model.layers.{index}.{name}.weight"] = getattr(layer, norm)
    return found


def assert_same(model, other):
    ours, theirs = model.tensors(), other.tensors()
    assert len(ours) == len(theirs)
    assert all(mine.equal(yours) for mine, yours in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "name",
    [
        "gemma-multi-query",
        "gemma-multi-head-untied",
        "gemma2-multi-query",
        "gemma3-multi-head-untied",
        "llama-biases",
        "llama3-tied-head-dim",
        "mistral-grouped",
        "qwen2-grouped",
        "qwen3-sliding-tied",
    ],
)
def test_every_tensor_is_loaded_into_its_parameter(name, tmp_path):
    theirs = models.make(name)
    theirs.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    state, offset = theirs.state_dict(), model.config.norm_offset
    ours = parameters(model)
    assert ours.keys() == loader.destinations(model).keys()
    for key, tensor in ours.items():
        expected = state[key] + offset if tensor.dim() == 1 and "norm" in key else state[key]
        assert tensor.equal(expected), key
    assert (model.embedding is model.head) == model.config.tie_word_embeddings
    assert model.num_parameters == sum(p.numel() for p in theirs.parameters())


def test_shards_load_like_a_single_file(saved, trained, tmp_path_factory):
    sharded = tmp_path_factory.mktemp("sharded")
    trained.save_pretrained(sharded, max_shard_size="60KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    assert_same(load_model(sharded), load_model(saved))


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("wanted", ["float64", "float32", "bfloat16", "float16"])
def test_any_stored_dtype_is_converted_to_the_requested_one(trained, tmp_path, stored, wanted):
    models.make("llama-biases").to(getattr(torch, stored)).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=wanted)
    assert model.config.dtype == stored
    original = trained.state_dict()["lm_head.weight"].to(getattr(torch, stored))
    assert model.head.weight.equal(original.to(getattr(torch, wanted)))
    norm = model.layers[0].mlp_norm
    assert norm.dtype == (torch.float64 if wanted == "float64" else torch.float32)


def test_auto_is_float32_on_a_cpu(trained, tmp_path):
    models.make("llama-biases").bfloat16().save_pretrained(tmp_path)
    assert load_model(tmp_path).dtype == torch.float32


def test_tensors_larger_than_the_buffer_are_read_in_pieces(saved, monkeypatch):
    whole = load_model(saved)
    for size in (1, 1000):
        monkeypatch.setattr(checkpoint, "BUFFER_BYTES", size)
        assert_same(load_model(saved), whole)


def test_redundant_tensors_are_skipped(tmp_path):
    models.make("llama3-tied-head-dim").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    before = load_model(tmp_path)
    save_file(tensors, file)
    assert_same(load_model(tmp_path), before)


MEASURE = """
import re, sys, torch
from minillm.model.loader import load_model
torch.set_num_threads(1)
torch.empty(8).normal_()
load_model(sys.argv[2], dtype=sys.argv[3])          # a small one: whatever is set up once is set up now
def peak(): return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
start = peak()
model = load_model(sys.argv[1], dtype=sys.argv[3])
print((peak() - start) / model.nbytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory as Linux reports it")
@pytest.mark.parametrize("stored, wanted", [("bfloat16", "bfloat16"), *only_in_proofs(("bfloat16", "float32"))])
def test_loading_needs_little_more_memory_than_the_model(saved, tmp_path_factory, stored, wanted):
    # Large enough that Linux's uncounted memory, about 128 KB per CPU, and fragmentation are negligible.
    large = tmp_path_factory.mktemp("large")
    config = dataclasses.replace(
        PRESETS["gemma-2b"],
        vocab_size=160_000,
        hidden_size=512,
        intermediate_size=2048,
        num_layers=4,
        max_model_len=512,
    )
    model = loader.Model(config, dtype=getattr(torch, stored), device="cpu", max_model_len=16)
    tensors = {name: torch.ones(place.shape, dtype=model.dtype) for name, place in loader.destinations(model).items()}
    save_file(tensors, large / "model.safetensors")
    (large / "config.json").write_text(json.dumps(as_json(config)))
    del model, tensors
    command = [sys.executable, "-c", MEASURE, str(large), str(saved), wanted]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0.9 < float(result.stdout) < 1.1


def as_json(config):
    return {
        "architectures": [config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_model_len,
        "dtype": config.dtype,
    }


def test_dummy_weights_need_no_files_and_keep_activations_bounded(tmp_path):
    config = dataclasses.replace(
        PRESETS["gemma-2b"], vocab_size=500, hidden_size=64, intermediate_size=96, num_layers=8
    )
    (tmp_path / "config.json").write_text(json.dumps(as_json(config)))
    model = load_model(tmp_path, load_format="dummy", seed=3)
    assert_same(model, load_model(tmp_path, load_format="dummy", seed=3))
    assert not model.head.weight.equal(load_model(tmp_path, load_format="dummy", seed=4).head.weight)
    from tests.model.test_decoder import Paged, prompts

    paged = Paged(model)
    logits = paged.forward({}, {paged.admit(): prompts(50)[0]}, every=True)
    assert 0.3 < logits.std() < 3
    assert len(logits.argmax(-1).unique()) > 10


def test_a_preset_with_dummy_weights_needs_no_directory(monkeypatch):
    tiny = dataclasses.replace(PRESETS["gemma-2b"], vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=1)
    monkeypatch.setitem(PRESETS, "gemma-2b", tiny)
    model = load_model("gemma-2b", load_format="dummy", max_model_len=100)
    assert model.config is tiny and model.rotary.shape[0] == model.max_model_len == 100
    with pytest.raises(ConfigError, match='shape without weights: pass load_format="dummy"'):
        load_model("gemma-2b")


def test_the_embedded_model_is_the_default(saved, monkeypatch):
    monkeypatch.setattr(loader, "EMBEDDED", saved)
    assert loader.resolve(None) == saved
    monkeypatch.setattr(loader, "EMBEDDED", saved / "absent")
    with pytest.raises(ConfigError, match="embedded model is not at .*absent: reinstall minillm, or name"):
        load_model()


def test_a_missing_directory_is_named():
    with pytest.raises(ConfigError, match="no such model directory: /nowhere/at-all.*minillm models.*gemma-2b"):
        load_model("/nowhere/at-all")


def test_a_directory_without_a_config_is_named(tmp_path):
    with pytest.raises(ConfigError, match="has no config.json"):
        load_model(tmp_path)


def test_a_damaged_config_is_named(saved):
    (saved / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json.* is not JSON"):
        load_model(saved)


def test_an_unsupported_architecture_error_lists_the_supported_ones(saved):
    config = json.loads((saved / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="'GPT2LMHeadModel' is not supported.*GemmaForCausalLM, .*Qwen3ForCausalLM"):
        load_model(saved)


def test_a_directory_without_weights_is_named(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r'no \*.safetensors; load_format="dummy"'):
        load_model(saved)


def test_a_missing_shard_is_named(trained, tmp_path):
    trained.save_pretrained(tmp_path, max_shard_size="60KB")
    second = sorted(tmp_path.glob("model-*.safetensors"))[1]
    second.unlink()
    with pytest.raises(ConfigError, match=f"names {second.name}, which is missing"):
        load_model(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 500, -1])
def test_a_truncated_file_is_named(saved, keep):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ConfigError, match="model.safetensors is truncated"):
        load_model(saved)


def test_a_file_that_is_not_safetensors_is_named(saved):
    (saved / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 not a header... ")
    with pytest.raises(ConfigError, match="not a safetensors file"):
        load_model(saved)


def change(directory, edit):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def test_a_wrong_shape_is_named_with_both_shapes(saved):
    name = "model.layers.1.self_attn.k_proj.weight"
    change(saved, lambda tensors: tensors.update({name: torch.zeros(12, 48)}))
    with pytest.raises(ConfigError, match=rf"{name} has shape \[12, 48\], but config.json makes it \[24, 48\]"):
        load_model(saved)


def test_missing_and_unexpected_tensors_are_named(saved):
    def edit(tensors):
        tensors["model.layers.0.mlp.extra.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")

    change(saved, edit)
    with pytest.raises(
        ConfigError,
        match=r"1 missing: model.layers.0.mlp.up_proj.weight; 1 that do not belong .*: model.layers.0.mlp.extra.weight",
    ):
        load_model(saved)


def test_integer_tensors_are_rejected_as_weights(saved):
    change(saved, lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=torch.int32)}))
    with pytest.raises(ConfigError, match="model.norm.weight is I32; supported are F64, F32, BF16, F16"):
        load_model(saved)


def test_a_context_longer_than_the_models_is_rejected(saved):
    with pytest.raises(ConfigError, match="max_model_len=257 is more than this model's 256 tokens"):
        load_model(saved, max_model_len=257)


def test_a_tokenizer_of_another_model_is_rejected(saved):
    config = load_model(saved).config
    loader.check_tokenizer(types.SimpleNamespace(vocab_size=96), config)
    with pytest.raises(ConfigError, match="tokenizer has 97 tokens but the model only 96"):
        loader.check_tokenizer(types.SimpleNamespace(vocab_size=97), config)


@pytest.mark.parametrize("placed", [{"model.norm.weight": ["a", "b"]}, {"model.norm.weight": 5}, ["a"], 5, None])
def test_an_index_of_the_wrong_form_is_named(saved, placed):
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(ConfigError, match="index.json: weight_map must give each tensor's file by its name"):
        load_model(saved)


@pytest.mark.parametrize("text", ["[]", "5", "{"])
def test_an_index_that_is_not_an_object_is_named(saved, text):
    (saved / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match="index.json (must hold an object|is not JSON)"):
        load_model(saved)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": ["F32"]},
        {"dtype": 5},
        {"shape": 5},
        {"shape": [48.0]},
        {"shape": [[48]]},
        {"shape": [-48]},
        {"data_offsets": [-8, 184]},
        {"data_offsets": [0.0, 192.0]},
        {"data_offsets": [192, 0]},
        {"data_offsets": [0]},
        {"data_offsets": {"begin": 0}},
    ],
    ids=str,
)
def test_a_damaged_header_is_named(saved, change):
    file = saved / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["model.norm.weight"] |= change
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(ConfigError, match="model.safetensors"):
        load_model(saved)


@pytest.mark.parametrize("more", [-4, 4])
def test_a_tensor_with_too_few_or_too_many_bytes_is_named(saved, more):
    file = saved / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = max(header.keys() - {"__metadata__"}, key=lambda each: header[each]["data_offsets"][1])  # the last one
    header[name]["data_offsets"][1] += more
    text = json.dumps(header).encode()
    stored = (data[8 + size :] + bytes(4))[: len(data) - 8 - size + more]
    file.write_bytes(len(text).to_bytes(8, "little") + text + stored)
    with pytest.raises(ConfigError, match=rf"model.safetensors: tensor {name} has \d+ bytes, which do not match"):
        load_model(saved)


def test_the_message_about_full_memory_gives_the_size_in_the_recipes_formats(saved, monkeypatch):
    real, sizes = loader.Model, {}
    for recipe in (Recipe(), Recipe({"*": "int8"})):
        sizes[recipe.format("head").name] = real(
            loader.read_config(saved), dtype=torch.float32, device="cpu", max_model_len=8, recipe=recipe
        ).nbytes

    def full(*given, **options):
        if options["device"] == "cpu":
            raise torch.OutOfMemoryError
        return real(*given, **options)

    monkeypatch.setattr(loader, "Model", full)
    monkeypatch.setattr(loader, "GB", 1e3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    for name, recipe in (("dense", None), ("int8", Recipe({"*": "int8"}))):
        with pytest.raises(ConfigError, match=rf"are {sizes[name] / 1e3:.1f} GB, and cpu has 0.0 GB free"):
            load_model(saved, recipe=recipe)


@pytest.fixture
def gpu(monkeypatch):
    """Makes torch report a GPU of this compute capability."""

    def made(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")

    return made


@pytest.mark.parametrize(("name", "other"), [("qwen3-0.6b", "float16"), ("gemma-2b", "float32")])
def test_a_gpu_without_bfloat16_runs_a_model_in_another_dtype_and_says_so(name, other, gpu, caplog):
    config = PRESETS[name]
    gpu((8, 0))
    assert (
        loader.resolve_dtype("auto", config, "cuda") == loader.resolve_dtype("bfloat16", config, "cuda") == "bfloat16"
    )
    gpu((7, 5))
    assert loader.resolve_dtype("float32", config, "cuda") == loader.resolve_dtype("auto", config, "cpu") == "float32"
    assert not caplog.text
    assert loader.resolve_dtype("auto", config, "cuda") == other
    assert f"Tesla T4 has no bfloat16, which needs compute capability 8.0, so the model runs in {other}" in caplog.text
    with pytest.raises(ConfigError, match=f"has no bfloat16.*use dtype={other}, or dtype=auto"):
        loader.resolve_dtype("bfloat16", config, "cuda")


def test_a_gpu_without_fp8_simulates_fp8_products_and_says_so(saved, gpu):
    fp8 = load_model(saved, recipe=Recipe({"layers.*": {"format": "fp8", "activations": "fp8"}}))
    plain = load_model(saved, recipe=Recipe({"layers.*": "fp8"}))
    gpu((8, 6))
    assert not loader.without_fp8(fp8)  # on a CPU
    for model in (fp8, plain):
        model.device = torch.device("cuda")
    assert "FP8 products are simulated: Tesla T4 multiplies no FP8 numbers" in loader.without_fp8(fp8)
    assert not loader.without_fp8(plain)
    gpu((8, 9))
    assert not loader.without_fp8(fp8)
