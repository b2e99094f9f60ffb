"""A small Llama as a GGUF file, written with the `gguf` package as llama.cpp's converter does, and its twin."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, quants
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

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

    changes: of the metadata, by keyword: architecture, split, tokenizer; tensors (more of them); without (one of them)
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
    writer = GGUFWriter(path, given.architecture)
    writer.add_name("Small")
    writer.add_license("apache-2.0")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens()))
    writer.add_tokenizer_model(given.tokenizer)
    writer.add_tokenizer_pre(given.split)
    writer.add_token_list(tokens())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens()) - len(SPECIAL)))  # 3: a control token
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, text in given.fields.items():
        writer.add_string(name, text)
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return twin


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


def _interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of heads in llama.cpp's order for rotation: the two numbers of a pair next to each other."""
    if not heads:
        return values
    return values.reshape(heads, 2, HEAD // 2, -1).swapaxes(1, 2).reshape(values.shape)


def _halves(values: np.ndarray, heads: int) -> np.ndarray:
    """The inverse: the pairs' first numbers, then their second ones, as transformers has them."""
    if not heads:
        return values
    return values.reshape(heads, HEAD // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
