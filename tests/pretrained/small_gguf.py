"""A small Llama as a GGUF file, written with the `gguf` package as llama.cpp's converter does, and its twin."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map, quants
from gguf import GGMLQuantizationType as Kind
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.models import make

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# "Ġ" is a space's character. "Â" is the first byte of "½": a space and "½" would merge across a digit's border.
MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ġ", "Â"), ("i", "n"), ("1", "2"), ("n", "'")]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, INNER = 2, 64, 4, 2, 16, 96
TEXTS = [
    "the tin",
    "in 1984, 12 of ½ or ¾",
    " ½x²",
    "don't\n\n  stop",
    "naïve 東京 😀",
    "<|im_start|>user the<|im_end|>",
    "",
]


def tokens() -> list[str]:
    return [*SPECIAL, *sorted(bytes_to_unicode().values()), *("".join(pair) for pair in MERGES)]


def tokenizer(digits: bool) -> Tokenizer:
    """What the file describes, made of the parts of `tokenizers`. digits: whether each digit is a piece."""
    vocabulary = {token: index for index, token in enumerate(tokens())}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    steps = [pre_tokenizers.Digits(individual_digits=True), split] if digits else [split]
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return made


def write(path: Path, kind: Kind = Kind.Q4_1, table: Kind = Kind.Q8_0, **changes: object) -> LlamaForCausalLM:
    """Write a file with random weights in these formats; the model of transformers with the values that it holds.

    changes: of the metadata, by keyword: architecture, split, tokenizer; tensors (more of them); without (one of them);
    fields (more of them, or others in their place; None: without it)
    """
    given = SimpleNamespace(
        **{
            "architecture": "llama",
            "split": "smollm",
            "tokenizer": "gpt2",
            "tensors": {},
            "without": None,
            "fields": {},
        }
        | changes
    )
    torch.manual_seed(7)
    twin = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokens()),
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD,
            max_position_embeddings=128,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_theta": 5000.0, "rope_type": "default"},
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).eval()
    writer = _writer(path, given.architecture, twin.config, given.tokenizer, given.split)
    writer.add_license("apache-2.0")
    writer.add_rope_dimension_count(HEAD)
    for name, value in given.fields.items():
        if value is None:
            del writer.kv_data[0][name]
            continue
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_array)(name, value)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            own, heads = _name(name)
            if own == given.without:
                continue
            parameter.mul_(1 + torch.arange(parameter.numel()).reshape(parameter.shape) % 5)
            values = parameter.numpy()
            chosen = table if own.startswith("token_embd") else kind if values.ndim == 2 else Kind.F32
            packed = quants.quantize(_interleaved(values, heads), chosen)
            writer.add_tensor(own, packed, raw_dtype=chosen)
            stored = quants.dequantize(packed, chosen).reshape(values.shape)
            parameter.copy_(torch.from_numpy(_halves(stored, heads)))
    for name, values in given.tensors.items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    _finish(writer)
    return twin


def write_family(path: Path, name: str, **changes: object) -> PreTrainedModel:
    """Write a model of tests/models.py in float32; the model.

    changes: of its configuration, besides those that make it one whose values a file can state.
    """
    family = name.split("-")[0]
    assumed = {
        "llama3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
        "qwen3": {"head_dim": 128},
        "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0}
        | {"final_logit_softcapping": 30.0},
        "gemma3": {"head_dim": 256, "query_pre_attn_scalar": 256},
    }
    twin = make(name, vocab_size=len(tokens()), **assumed.get(family, {}) | changes).eval()
    architecture = {"llama3": "llama"}.get(family, family)
    config = twin.config
    writer = _writer(path, architecture, config, "gpt2", "gpt-2")
    if family != "qwen2":
        writer.add_key_length(config.head_dim)
    if architecture == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if family.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    known = get_tensor_name_map(MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for key, parameter in twin.named_parameters():
        values = parameter.detach().numpy()
        if family.startswith("gemma") and key.endswith("norm.weight"):
            values = values + 1  # as llama.cpp's converter does
        if architecture == "llama" and ("q_proj" in key or "k_proj" in key):
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            values = _interleaved(values, heads, config.head_dim)
        writer.add_tensor(known.get_name(key, try_suffixes=(".weight", ".bias")), values)
    _finish(writer)
    return twin


def _writer(path: Path, architecture: str, config: PretrainedConfig, tokenizer: str, split: str) -> GGUFWriter:
    """A writer that has the metadata that all these models have."""
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer = GGUFWriter(path, architecture)
    writer.add_name("Small")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens()) - len(SPECIAL)))  # 3: a control token
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    return writer


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> tuple[str, int]:
    """A parameter's name in the file, and how many heads its rows are of, if llama.cpp orders these in another way."""
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name], 0
    _, _, layer, *rest = name.split(".")
    names = {
        "self_attn.q_proj": ("attn_q", HEADS),
        "self_attn.k_proj": ("attn_k", KV_HEADS),
        "self_attn.v_proj": ("attn_v", 0),
        "self_attn.o_proj": ("attn_output", 0),
        "mlp.gate_proj": ("ffn_gate", 0),
        "mlp.up_proj": ("ffn_up", 0),
        "mlp.down_proj": ("ffn_down", 0),
        "input_layernorm": ("attn_norm", 0),
        "post_attention_layernorm": ("ffn_norm", 0),
    }
    own, heads = names[".".join(rest[:-1])]
    return f"blk.{layer}.{own}.weight", heads


def _interleaved(values: np.ndarray, heads: int, size: int = HEAD) -> np.ndarray:
    """Rows of heads in llama.cpp's order for rotation: the two numbers of a pair next to each other."""
    if not heads:
        return values
    return values.reshape(heads, 2, size // 2, -1).swapaxes(1, 2).reshape(values.shape)


def _halves(values: np.ndarray, heads: int) -> np.ndarray:
    """The inverse: the pairs' first numbers, then their second ones, as transformers has them."""
    if not heads:
        return values
    return values.reshape(heads, HEAD // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
