"""A GGUF file becomes a directory with the same numbers, once."""

import json
import logging
import os

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from transformers import AutoTokenizer

from minillm import LLM, ConfigError, Tokenizer
from minillm.model import load_model
from minillm.model.checkpoint import read_header
from minillm.model.families import ARCHITECTURES
from minillm.model.loader import resolve
from minillm.pretrained import gguf_file, origin
from tests.pretrained import small_gguf

GEMMAS = ("gemma2-multi-query", "gemma3-multi-query")
IDS = torch.tensor([[1, 40, 90, 17, 230, 262, 3, 3, 128, 77]])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(the file, the model that it holds, its directory)"""
    folder = tmp_path_factory.mktemp("gguf")
    file = folder / "Small-Q4_1.gguf"
    twin = small_gguf.write(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINILLM_CACHE", str(folder / "cache"))
        return file, twin, gguf_file.directory(file)


def logits(directory, ids=IDS) -> torch.Tensor:
    from minillm.calibration.forward import hidden_states

    model = load_model(directory, dtype="float64")
    return model.logits(hidden_states(model, ids))


def expected(twin, ids=IDS) -> torch.Tensor:
    with torch.inference_mode():
        return twin.double()(ids).logits[0]


def test_the_model_has_the_logits_of_the_weights_that_the_file_holds(small):
    _, twin, directory = small
    torch.testing.assert_close(logits(directory), expected(twin), rtol=0, atol=1e-6)  # the file has eps in float32


@pytest.mark.parametrize("name", ["llama3-tied-head-dim", "qwen2-grouped", "qwen3-grouped", *GEMMAS])
def test_every_supported_family_has_the_logits_of_its_model(tmp_path, name):
    twin = small_gguf.write_family(tmp_path / "file.gguf", name)
    with torch.inference_mode():
        wanted = twin(IDS).logits[0]
    found = logits(gguf_file.directory(tmp_path / "file.gguf"))
    assert wanted.std() > 0.3
    torch.testing.assert_close(found.float(), wanted, rtol=1e-3, atol=1e-3)


def test_heads_of_another_size_than_transformers_assumes_are_refused(tmp_path):
    small_gguf.write_family(tmp_path / "file.gguf", "qwen3-grouped", head_dim=64)
    with pytest.raises(ConfigError, match="heads of 64 numbers are not supported in GGUF files of qwen3, only of 128"):
        resolve(tmp_path / "file.gguf")


@pytest.mark.parametrize(
    ("kind", "table", "stored", "rounded"),
    [
        (Kind.F32, Kind.F32, {"F32", "BF16"}, ""),
        (Kind.F16, Kind.F16, {"F16", "BF16"}, ""),
        (Kind.BF16, Kind.BF16, {"BF16"}, ""),
        (Kind.Q8_0, Kind.F32, {"F32", "BF16"}, "Q8_0"),
        (Kind.Q4_1, Kind.Q8_0, {"F32", "BF16"}, "Q4_1, Q8_0"),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else "",
)
def test_every_value_is_stored_exactly_and_in_16_bits_where_that_is_exact(tmp_path, kind, table, stored, rounded):
    twin = small_gguf.write(tmp_path / "file.gguf", kind, table)
    directory = gguf_file.directory(tmp_path / "file.gguf")
    tensors = load_file(directory / "model.safetensors")
    wanted = dict(twin.named_parameters())
    assert tensors.keys() == wanted.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor.float(), wanted[name]), name
    assert {entry.dtype for entry in read_header(directory / "model.safetensors").values()} == stored
    assert origin(directory).rounded == rounded


def test_texts_become_the_tokens_of_the_tokenizer_that_the_file_describes(small):
    reference, own = small_gguf.tokenizer(digits=True), Tokenizer.from_pretrained(small[2])
    theirs = AutoTokenizer.from_pretrained(small[2])
    for text in small_gguf.TEXTS:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert own.encode(text) == ids, text
        assert theirs.encode(text) == ids, text
        assert own.decode(ids, skip_special_tokens=False) == text


def test_a_file_split_as_gpt_2_splits_keeps_digits_together(tmp_path):
    small_gguf.write(tmp_path / "file.gguf", split="gpt-2")
    own, reference = Tokenizer.from_pretrained(gguf_file.directory(tmp_path / "file.gguf")), small_gguf.tokenizer(False)
    assert own.encode("12 ½") == reference.encode("12 ½").ids != small_gguf.tokenizer(True).encode("12 ½").ids


def test_the_chat_template_and_the_end_of_a_turn_come_along(small):
    directory = small[2]
    with LLM(directory, device="cpu") as llm:
        turn = [{"role": "user", "content": "the tin"}]
        theirs = AutoTokenizer.from_pretrained(directory)
        wanted = theirs.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        assert wanted.endswith("<|im_start|>assistant\n")
        assert llm.engine.tokenizer.apply_chat_template(turn) == wanted
        assert llm.engine.model_config.eos_token_ids == (2,)
        assert llm.engine.name == "Small-Q4_1"


def test_a_file_is_converted_once_wherever_it_lies(tmp_path, cache, caplog):
    file = tmp_path / "one.gguf"
    small_gguf.write(file)
    with caplog.at_level(logging.INFO, "minillm"):
        first = resolve(file)
    assert str(first) in caplog.text
    marker = first / "config.json"
    before = marker.stat().st_mtime_ns
    assert resolve(str(file)) == first and marker.stat().st_mtime_ns == before
    (tmp_path / "elsewhere").mkdir()
    assert resolve(file.rename(tmp_path / "elsewhere" / "one.gguf")) == first
    assert marker.stat().st_mtime_ns == before


def test_another_file_of_the_same_name_is_converted_again(tmp_path):
    file = tmp_path / "one.gguf"
    small_gguf.write(file)
    first = resolve(file)
    small_gguf.write(file, Kind.F16, Kind.F16)
    second = resolve(file)
    assert second != first and second.name == first.name
    assert origin(first).rounded == "Q4_1, Q8_0" and origin(second).rounded == ""


def test_the_hash_of_a_file_is_computed_again_only_after_a_change(tmp_path):
    file = tmp_path / "one.gguf"
    small_gguf.write(file)
    first, before = resolve(file), file.stat().st_mtime_ns
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)  # the same size and inode
    os.utime(file, ns=(before, before))
    assert resolve(file) == first
    os.utime(file, ns=(before + 1, before + 1))
    assert resolve(file) != first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, "the architecture 'mamba' is not supported; supported in GGUF files are llama"),
        ({"tensors": {"rope_freqs.weight": [1.0] * 8}}, "the tensor 'rope_freqs.weight' is of a kind"),
        ({"tensors": {"blk.0.ffn_gate_exps.weight": [[1.0]]}}, "the tensor 'blk.0.ffn_gate_exps.weight' is of a kind"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, r"rope scaling \('yarn'\)"),
        ({"tokenizer": "bert"}, "the tokenizer 'bert' is not supported"),
        ({"split": "deepseek-llm"}, "splits text in a way, 'deepseek-llm', that is not supported"),
        ({"tensors": {"blk.0.attn_q.bias": [1.0] * 64}}, "has 21 tensors, and its kind of model has 20"),
        ({"without": "blk.1.ffn_up.weight"}, r"layers\.1\.mlp\.up_proj.* is missing"),
    ],
    ids=["architecture", "llama 3's frequencies", "experts", "yarn", "tokenizer", "split", "biases", "missing"],
)
def test_what_cannot_be_read_is_refused_by_name_and_leaves_nothing(tmp_path, cache, changes, message):
    file = tmp_path / "file.gguf"
    small_gguf.write(file, **changes)
    with pytest.raises(ConfigError, match=message):
        resolve(file)
    assert not [path for path in cache.rglob("*") if path.name == "config.json"]


def test_a_damaged_file_is_refused_before_anything_is_converted(tmp_path, monkeypatch):
    file = tmp_path / "file.gguf"
    small_gguf.write(file)
    file.write_bytes(file.read_bytes()[:-1000])
    monkeypatch.setattr(gguf_file, "convert_into", None)
    with pytest.raises(ConfigError, match="file.gguf"):
        resolve(file)


def test_a_path_that_names_no_file_is_said_to(tmp_path):
    with pytest.raises(ConfigError, match="no such file: .*nothing.gguf"):
        resolve(tmp_path / "nothing.gguf")


def test_without_the_gguf_package_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    small_gguf.write(tmp_path / "file.gguf")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ImportError, match="read with `gguf`.*make setup|minillm.models"):
        resolve(tmp_path / "file.gguf")


def test_a_disk_that_is_too_small_is_refused_first(tmp_path, monkeypatch):
    small_gguf.write(tmp_path / "file.gguf")
    monkeypatch.setattr("minillm.pretrained.cache.free_bytes", lambda place: 10_000_000)
    with pytest.raises(ConfigError, match="10 MB free, and .* MB are needed: free some space, or set MINILLM_CACHE"):
        resolve(tmp_path / "file.gguf")


def test_the_supported_architectures_are_the_engines():
    assert {each for names in gguf_file.ARCHITECTURES.values() for each in names} <= set(ARCHITECTURES)


def test_a_model_that_is_quantized_again_still_says_what_it_was_made_of(small, tmp_path):
    from minillm.calibration.methods import Method, MethodRecipe
    from minillm.calibration.quantize import quantize

    quantize(small[2], MethodRecipe.of(Method("int8"), None), tmp_path / "out", rows=1, length=8, device="cpu")
    assert origin(tmp_path / "out") == origin(small[2])
    assert json.loads((tmp_path / "out" / "minillm_origin.json").read_text())["rounded"] == "Q4_1, Q8_0"
