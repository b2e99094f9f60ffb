"""A GGUF file becomes a directory with the same numbers, once."""

import errno
import json
import logging
import os
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from transformers import AutoTokenizer

from minillm import LLM, ConfigError, Tokenizer
from minillm.model import load_model
from minillm.model.checkpoint import read_header
from minillm.model.families import ARCHITECTURES
from minillm.model.loader import EMBEDDED, resolve
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


@pytest.mark.parametrize(("stated", "begins"), [(None, [1]), (False, []), (True, [1])])
def test_a_file_split_as_llama_3_splits_begins_texts_unless_it_says_otherwise(tmp_path, stated, begins):
    """As llama.cpp does: files of Llama 3 do not say so."""
    small_gguf.write(tmp_path / "file.gguf", split="llama-bpe", fields={"tokenizer.ggml.add_bos_token": stated})
    own = Tokenizer.from_pretrained(gguf_file.directory(tmp_path / "file.gguf"))
    assert own.encode("the") == [*begins, *own.encode("the", add_special_tokens=False)]


def test_who_may_read_the_configuration_may_read_the_weights(small):
    assert (small[2] / "model.safetensors").stat().st_mode == (small[2] / "config.json").stat().st_mode


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
        ({"fields": {"llama.rope.scaling.factor": 4.0}}, r"rope scaling \('linear'\)"),
        ({"fields": {"llama.rope.scale_linear": 4.0}}, r"rope scaling \('linear'\)"),
        ({"tokenizer": "llama", "fields": {"tokenizer.ggml.add_space_prefix": False}}, "no space before a text"),
        ({"tokenizer": "bert"}, "the tokenizer 'bert' is not supported"),
        ({"split": "deepseek-llm"}, "splits text in a way, 'deepseek-llm', that is not supported"),
        ({"tensors": {"blk.0.attn_q.bias": [1.0] * 64}}, "has 21 tensors, and its kind of model has 20"),
        ({"without": "blk.1.ffn_up.weight"}, r"layers\.1\.mlp\.up_proj.* is missing"),
    ],
    ids=[
        "architecture",
        "llama 3's frequencies",
        "experts",
        "yarn",
        "a factor",
        "an older factor",
        "no prefix",
        "tokenizer",
        "split",
        "biases",
        "missing",
    ],
)
def test_what_cannot_be_read_is_refused_by_name_and_leaves_nothing(tmp_path, cache, changes, message):
    file = tmp_path / "file.gguf"
    small_gguf.write(file, **changes)
    with pytest.raises(ConfigError, match=message):
        resolve(file)
    assert not [path for path in cache.rglob("*") if path.name == "config.json"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", 2**31 - 1, "it has tensors of 2 layers, and llama.block_count is 2147483647"),
        ("block_count", 2.0, "llama.block_count must be a whole number above 0, not 2.0"),
        ("block_count", "2", "llama.block_count must be a whole number above 0, not '2'"),
        ("embedding_length", 2**31 - 1, r"the tensor token_embd.weight has the shape \(2147483647, 266\), and it has"),
        ("vocab_size", 10, r"the tensor token_embd.weight has the shape \(64, 10\), and it has \(64, 266\)"),
        ("feed_forward_length", 48, r"the tensor blk.0.ffn_up.weight has the shape \(64, 48\)"),
        ("attention.head_count", 0, "llama.attention.head_count must be a whole number above 0, not 0"),
        ("attention.head_count", [4, 4], r"llama.attention.head_count must be .* not \(4, 4\)"),
        ("attention.head_count_kv", 3, r"the tensor blk.0.attn_k.weight has the shape \(64, 48\)"),
        ("rope.dimension_count", 8, r"the tensor blk.0.attn_q.weight has the shape \(64, 32\)"),
        ("rope.freq_base", float("nan"), "llama.rope.freq_base must be a number above 0, not nan"),
        ("attention.layer_norm_rms_epsilon", "x", "layer_norm_rms_epsilon must be a number above 0, not 'x'"),
        ("bos_token_id", 266, "tokenizer.ggml.bos_token_id must be the id of a token, not 266"),
        ("eos_token_id", "x", "tokenizer.ggml.eos_token_id must be the id of a token, not 'x'"),
        ("tokens", ["a", "b"], "cannot be converted .*: it is damaged, or of a kind that is not supported"),
        ("merges", ["a b c"], "cannot be converted .*: it is damaged, or of a kind that is not supported"),
    ],
)
def test_metadata_that_do_not_fit_the_tensors_are_refused_at_little_cost(tmp_path, cache, key, value, message):
    kind = "tokenizer.ggml" if key.endswith(("_id", "tokens", "merges")) else "llama"
    small_gguf.write(tmp_path / "file.gguf", fields={f"{kind}.{key}": value})
    with pytest.raises(ConfigError, match=f"file.gguf .*{message}") as caught:
        resolve(tmp_path / "file.gguf")
    assert "\n" not in str(caught.value) and not list(cache.rglob("config.json"))


def test_what_lies_beside_a_file_is_neither_read_nor_executed(small, tmp_path):
    """The Hub's directories often hold files of the original model, too."""
    file, _, expected = small
    folder = tmp_path / "beside"
    folder.mkdir()
    copy = folder / file.name
    copy.write_bytes(file.read_bytes() + b"\0")  # another content, or the conversion of the first would be found
    for path in EMBEDDED.iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
    own = {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "tokenizer_class": "Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    (folder / "tokenizer.model").write_bytes(b"not a model")
    (folder / "own.py").write_text("raise SystemExit('it was executed')")
    found = resolve(copy)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        assert (found / name).read_text() == (expected / name).read_text()
    assert {path.name for path in found.iterdir()} == {path.name for path in expected.iterdir()}


def test_the_end_of_a_turn_ends_an_answer_even_if_the_file_states_another_end(tmp_path):
    """As the `generation_config.json` of the original models has both."""
    file = tmp_path / "file.gguf"
    small_gguf.write(file, fields={"tokenizer.ggml.eos_token_id": 0})
    with LLM(resolve(file), device="cpu") as llm:
        assert llm.engine.model_config.eos_token_ids == (0, 2)  # <|im_end|>
    small_gguf.write(file, fields={"tokenizer.ggml.eot_token_id": 0})
    with LLM(resolve(file), device="cpu") as llm:
        assert llm.engine.model_config.eos_token_ids == (2, 0)


@pytest.mark.parametrize("name", ["...gguf", "..gguf", "x" * 250 + ".gguf", os.fsdecode(b"caf\xe9.gguf")], ids=ascii)
def test_a_strange_name_of_a_file_leads_to_no_other_place(small, tmp_path, cache, name, caplog):
    other = cache / "gguf" / "other" / "config.json"
    other.parent.mkdir(parents=True)
    other.touch()
    file = tmp_path / name
    try:
        file.write_bytes(small[0].read_bytes())
    except OSError:
        pytest.skip("the file system has no such names")
    found = resolve(file)
    assert other.exists() and found.parent.parent == cache / "gguf" and found == resolve(file)
    assert 0 < len(found.name) <= 200 and found.name.isprintable() and not found.name.startswith(".")
    assert (caplog.text + origin(found).source).encode(), "both can be printed"


def test_a_link_gives_the_model_its_name(small, tmp_path):
    """The Hub's cache has links to files that are named by their hashes."""
    (tmp_path / "0123abcd").write_bytes(small[0].read_bytes())
    (tmp_path / "Named.gguf").symlink_to("0123abcd")
    assert resolve(tmp_path / "Named.gguf").name == "Named"


def test_a_cache_that_is_read_only_may_hold_the_model(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "one.gguf"
    small_gguf.write(file)
    first, moved = resolve(file), file.rename(tmp_path / "elsewhere" / "one.gguf")

    def denied(self, *arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", denied)
        assert resolve(moved) == first


def test_a_damaged_note_of_a_hash_is_made_again(tmp_path, cache):
    file = tmp_path / "one.gguf"
    small_gguf.write(file)
    first = resolve(file)
    (note,) = (cache / "gguf").glob("*.json")
    note.write_text("")
    assert resolve(file) == first and "sha256" in note.read_text()


def test_a_file_that_changes_while_it_is_converted_is_not_kept(tmp_path, cache, monkeypatch):
    file = tmp_path / "one.gguf"
    small_gguf.write(file)
    own = gguf_file.convert_into

    def meanwhile(*arguments):
        small_gguf.write(file, Kind.F16, Kind.F16)
        return own(*arguments)

    monkeypatch.setattr(gguf_file, "convert_into", meanwhile)
    with pytest.raises(ConfigError, match="one.gguf changed while it was converted: wait until it is complete"):
        resolve(file)
    assert not list(cache.rglob("config.json"))


@pytest.mark.parametrize("error", [OSError(28, "No space left"), RuntimeError("I/O error: No space (os error 28)")])
def test_a_disk_that_fills_up_is_no_damage_of_the_file(tmp_path, monkeypatch, error):
    """Libraries in Rust, such as safetensors, have exceptions of their own."""

    def full(*arguments, **options):
        raise error

    small_gguf.write(tmp_path / "file.gguf")
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ConfigError, match="the cache of models, .* cannot be written: No space left"):
        resolve(tmp_path / "file.gguf")


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
