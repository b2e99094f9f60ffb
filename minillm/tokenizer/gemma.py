"""Gemma's tokenizer layout, written as the files that `transformers` and minillm load.  Lesson 01."""

import json
from collections.abc import Sequence
from pathlib import Path

from .patterns import TokenizerError

SPACE = "▁"  # U+2581: stands for a space in vocabularies
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))

# No token crosses these pieces. Newlines are pieces of their own: otherwise byte-pair encoding learns tokens like
# "D\n\nWhich", which hide the answer letter of a question. So are digits, so that a digit is the
# same token wherever it stands in a number.
SPLIT_PATTERN = r"\n+|\p{N}|▁?[\p{L}\p{M}']+|▁?[^\s▁\p{L}\p{M}\p{N}']+|▁+"

CHAT_TEMPLATE = """\
{{ bos_token }}
{%- set rules = messages[0]['content'] | trim + '\\n\\n' if messages[0]['role'] == 'system' else '' -%}
{%- set turns = messages[1:] if rules else messages -%}
{%- for turn in turns -%}
    {%- set speaker = 'user' if loop.index0 is even else 'assistant' -%}
    {%- if turn['role'] != speaker -%}
        {{ raise_exception('turn ' ~ loop.index ~ ' must be from the ' ~ speaker ~ ', not ' ~ turn['role']) }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if speaker == 'assistant' else 'user') + '\\n' }}
    {{- rules if loop.first else '' }}{{ turn['content'] | trim }}{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""


def write_tokenizer(
    directory: str | Path,
    vocab: dict[str, int],
    merges: Sequence[tuple[str, str]],
    *,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    split_pattern: str | None = SPLIT_PATTERN,
    chat_template: str = CHAT_TEMPLATE,
    model_max_length: int = 2048,
) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` to `directory`, created if necessary.  Lesson 01.

    vocab, merges     what `train_bpe` returned
    special_tokens    as given to `train_bpe`
    split_pattern     as given to `train_bpe`; None writes Gemma's own form, which does not split texts
    chat_template     Jinja2
    model_max_length  in tokens
    Raises TokenizerError if a special token is not in the vocabulary.
    """
    missing = [token for token in (*SPECIAL_TOKENS[:4], *special_tokens) if token not in vocab]
    if missing:
        raise TokenizerError(f"the vocabulary lacks {', '.join(missing)}: give train_bpe the same special_tokens")
    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    split = {"type": "Split", "pattern": {"Regex": split_pattern}, "behavior": "Isolated", "invert": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocab[token], "content": token, **flags} for token in special_tokens],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": split if split_pattern else None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [vocab["<bos>"]], "tokens": ["<bos>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }
    config = {
        # transformers 5's GemmaTokenizer builds its own pipeline without the split; this class reads the file.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": model_max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        (directory / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
