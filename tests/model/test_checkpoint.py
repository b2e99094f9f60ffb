"""A model's files: which tensors are its head and its embedding, and tensors in several files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from minillm.errors import ConfigError
from minillm.model import checkpoint
from minillm.model.loader import load_model
from minillm.model.saver import save_model
from tests import models

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = ("llama3-tied-head-dim", "gemma-multi-query")


def edited(directory, edit, **config):
    """Rewrite a model's tensors and fields of its config.json; None removes a field."""
    file, path = directory / "model.safetensors", directory / "config.json"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    fields = json.loads(path.read_text()) | config
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def assert_as_in_transformers(directory, dtype="float32"):
    """The same head and embedding; returns whether they are one matrix."""
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    ours = load_model(directory, dtype=dtype)
    assert ours.embedding.weight.equal(theirs.get_input_embeddings().weight)
    assert ours.head.weight.equal(theirs.get_output_embeddings().weight)
    assert (ours.head is ours.embedding) == (
        theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    )
    return ours.head is ours.embedding


def last_row_changed(tensors):
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][-1, -1] += 1


def rounded(tensors):
    """Another dtype, which does not have all numbers of the embedding."""
    tensors[HEAD] = tensors[EMBEDDING].bfloat16()


def negative(tensors):
    tensors[HEAD] = -tensors[EMBEDDING]


@pytest.mark.parametrize("edit", [last_row_changed, rounded, negative])
@pytest.mark.parametrize("name", TIED)
def test_a_head_of_its_own_is_used_even_if_the_configuration_ties_it(name, edit, tmp_path, caplog, monkeypatch):
    models.make(name).save_pretrained(tmp_path)
    gemma = name.startswith("gemma")  # whose class ties the head if config.json does not say
    edited(tmp_path, edit, tie_word_embeddings=None if gemma else True)
    monkeypatch.setattr(checkpoint, "BUFFER_BYTES", 1000)
    assert not assert_as_in_transformers(tmp_path)
    assert "model.safetensors has another head, which is used" in caplog.text


@pytest.mark.parametrize("stored", [torch.float32, torch.float64])
def test_a_copy_of_the_embedding_takes_no_memory_of_its_own(stored, tmp_path, caplog):
    models.make(TIED[0]).save_pretrained(tmp_path)
    before = load_model(tmp_path).nbytes
    edited(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].to(stored, copy=True)}))
    assert assert_as_in_transformers(tmp_path)
    assert load_model(tmp_path).nbytes == before
    assert not caplog.text


def test_a_tied_matrix_that_is_stored_as_the_head_is_read(tmp_path):
    models.make(TIED[0]).save_pretrained(tmp_path)
    edited(tmp_path, lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}))
    assert assert_as_in_transformers(tmp_path)


def test_heads_that_differ_are_compared_no_further_than_to_the_first_difference(tmp_path, monkeypatch):
    models.make(TIED[0]).save_pretrained(tmp_path)
    edited(tmp_path, negative)
    monkeypatch.setattr(checkpoint, "BUFFER_BYTES", 1000)
    entries, read = checkpoint.read_headers(tmp_path), []
    own = checkpoint.Pieces.__iter__

    def counted(self):
        for piece in own(self):
            read.append(len(piece))
            yield piece

    monkeypatch.setattr(checkpoint.Pieces, "__iter__", counted)
    assert not checkpoint.are_equal(entries[EMBEDDING], entries[HEAD])
    assert len(read) == 2
    assert checkpoint.are_equal(entries[EMBEDDING], entries[EMBEDDING])
    assert sum(read[2:]) == 2 * entries[EMBEDDING].shape[0]


def test_a_head_in_another_file_than_the_embedding_is_used(tmp_path):
    theirs = models.make("llama-biases")
    theirs.config.tie_word_embeddings = True
    theirs.save_pretrained(tmp_path, state_dict=theirs.state_dict(), max_shard_size="60KB")
    placed = json.loads((tmp_path / checkpoint.INDEX).read_text())["weight_map"]
    assert placed[HEAD] != placed[EMBEDDING]
    assert not assert_as_in_transformers(tmp_path)


def test_a_missing_head_of_an_untied_model_is_refused_with_the_way_out(tmp_path):
    models.make(TIED[0]).save_pretrained(tmp_path)
    edited(tmp_path, lambda tensors: None, tie_word_embeddings=False)
    message = "1 missing: lm_head.weight; if the head is the embedding, set tie_word_embeddings there to true"
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("language_model.lm_head.weight", (96, 48)),  # under a prefix
        ("lm_head.bias", (96,)),
        ("model.layers.0.self_attn.q_proj.bias", (128,)),
        ("model.layers.0.self_attn.q_norm.weight", (32,)),
        ("model.layers.3.input_layernorm.weight", (48,)),
        ("model.embed_tokens.weight_scale", (96, 1)),
    ],
)
def test_what_would_change_results_and_the_model_does_not_use_is_refused_by_name(name, shape, tmp_path):
    models.make(TIED[0]).save_pretrained(tmp_path)
    edited(tmp_path, lambda tensors: tensors.update({name: torch.ones(shape)}))
    with pytest.raises(ConfigError, match=f"1 that do not belong to its config.json: {name}"):
        load_model(tmp_path)


def test_a_model_whose_head_was_not_tied_after_all_is_saved_as_untied(tmp_path):
    models.make(TIED[0]).save_pretrained(tmp_path / "source")
    edited(tmp_path / "source", negative)
    save_model(load_model(tmp_path / "source"), tmp_path / "source", tmp_path / "saved")
    assert not json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"]
    assert not assert_as_in_transformers(tmp_path / "saved")


# Files


def in_two_files(directory, placed=None):
    """Store a norm in a second file too, with other numbers. placed: the file that the index names for it, if any."""
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    tensors = load_file(directory / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"] + 1}, directory / "b.safetensors")
    if placed:
        index = dict.fromkeys(tensors, "a.safetensors") | {"b": "b.safetensors", "model.norm.weight": placed}
        (directory / checkpoint.INDEX).write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize("file", ["a.safetensors", "b.safetensors"])
def test_the_index_chooses_among_files_that_have_the_same_tensor(file, tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    norm = load_model(tmp_path).final_norm
    in_two_files(tmp_path, file)
    assert load_model(tmp_path).final_norm.equal(norm + (file == "b.safetensors"))


def test_a_tensor_in_two_files_is_refused_without_an_index(tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    in_two_files(tmp_path)
    with pytest.raises(ConfigError, match=r"tensor model.norm.weight is in .*a.safetensors and in .*b.safetensors"):
        load_model(tmp_path)


def edit_header(directory, edit):
    file = directory / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    edit(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :] + bytes(8))


@pytest.mark.parametrize("change", [-4, 4])
def test_a_tensor_with_more_or_fewer_bytes_than_its_shape_takes_is_refused(change, tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)

    def longer(header):
        header[HEAD]["data_offsets"][1] += change

    edit_header(tmp_path, longer)
    with pytest.raises(ConfigError, match=r"tensor lm_head.weight has \d+ bytes, which do not match its shape"):
        load_model(tmp_path)


@pytest.mark.parametrize("shift", [0, 4])
def test_tensors_that_share_bytes_are_refused_by_name(shift, tmp_path):
    """safetensors refuses the file: "invalid offset"."""
    models.make("llama-biases").save_pretrained(tmp_path)
    one, other = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv")

    def move(header):
        begin, end = header[one]["data_offsets"]
        header[other]["data_offsets"] = [begin + shift, end + shift]

    edit_header(tmp_path, move)
    with pytest.raises(ConfigError, match=r"is damaged: tensors \S+ and \S+ share bytes. Copy it again"):
        load_model(tmp_path)
