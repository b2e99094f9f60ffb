"""Tokens that the files next to `tokenizer.json` add, and the names of special tokens.  Lesson 01.

Directories may have up to three such files: tokenizer_config.json, special_tokens_map.json and added_tokens.json. They
are read as transformers 5 does for the class PreTrainedTokenizerFast:

- tokenizer_config.json's added_tokens_decoder replaces the two older files, which count only if it is absent. They then
  take precedence over what tokenizer_config.json says.
- Of several definitions of a token the last one's flags hold: tokenizer.json's, then those of added_tokens_decoder (or
  added_tokens.json), then those of named special tokens and of extra_special_tokens (once additional_special_tokens).
  A token that any of them calls special is special.
- A token keeps the id that tokenizer.json gives it; a new one gets the next free id.
- add_bos_token and add_eos_token do nothing: the post-processor of tokenizer.json decides.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from .added_tokens import AddedToken
from .patterns import Spec, TokenizerError

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA, OLD_EXTRA = "extra_special_tokens", "additional_special_tokens"
UNKNOWN = -1  # the id of a token that is defined without one


@dataclass
class Settings:
    """The content of these files. tokens: to be added after those of `tokenizer.json`; special: name -> token."""

    tokens: list[AddedToken] = field(default_factory=list)
    special: dict[str, str] = field(default_factory=dict)


def read_settings(file_tokens: list[AddedToken], config: Spec, special_map: Spec, added: dict[str, int]) -> Settings:
    """Return the settings of tokenizer_config.json, special_tokens_map.json and added_tokens.json; {} stands for no
    file.

    file_tokens: those of `tokenizer.json`. Raises TokenizerError for a setting that is not supported.
    """
    if config.get("split_special_tokens"):
        raise TokenizerError("tokenizer_config.json sets split_special_tokens, which is not supported: remove it")
    old = "added_tokens_decoder" not in config
    extra_tokens, names = config.get(EXTRA) or config.get(OLD_EXTRA, config.get(EXTRA)), {}
    if isinstance(extra_tokens, dict):  # more names
        names, extra_tokens = extra_tokens, config.get(OLD_EXTRA) if config.get(EXTRA) else None
    names = {name: value for name, value in config.items() if _is_more(name) and isinstance(value, str)} | names
    if old:
        listed = special_map.get(EXTRA)
        if isinstance(listed, list):
            extra_tokens = [*(extra_tokens or ()), *listed]
        elif extra_tokens is None:
            extra_tokens = special_map.get(OLD_EXTRA)
        config = config | special_map
    extra = list(extra_tokens or ())
    more = {name: value for name, value in config.items() if _is_more(name) and name not in names} | names
    every = {name: config.get(name) for name in NAMED} | more
    special = {name: value for name, value in every.items() if isinstance(value, (str, dict))}
    contents = {name: _content(value) for name, value in special.items()}
    if old:
        plain = [value for name, value in special.items() if name in NAMED] + extra
        known = {_content(each) for each in plain if not _is_typed(each)}
        defined = {id: _token(id, content, content in known) for content, id in added.items()}
        defined |= {token.id: token for token in file_tokens}
    else:
        defined = {int(id): _token(int(id), {**entry}) for id, entry in config["added_tokens_decoder"].items()}
    tokens = [defined[id] for id in sorted(defined)]
    present = {token.content for token in [*file_tokens, *tokens]}
    for value in [*special.values(), *extra]:
        if _content(value) not in present:
            tokens.append(_token(UNKNOWN, value, special=not _is_typed(value)))
    named = set(contents.values())
    return Settings([replace(each, special=each.special or each.content in named) for each in tokens], contents)


def with_ids(
    file_tokens: Iterable[AddedToken], more: Iterable[AddedToken], vocab: dict[str, int]
) -> tuple[list[AddedToken], set[str]]:
    """Return the tokens with their ids and the flags that hold, and which of them the library decodes in normalized
    form.

    Raises TokenizerError for an id that contradicts the vocabulary, or is not the next free one.
    """
    by_content: dict[str, AddedToken] = {}
    normalized: set[str] = set()
    free = len(vocab)
    for from_file, token in [*((True, each) for each in file_tokens), *((False, each) for each in more)]:
        content = token.content
        if not content:
            continue
        before = by_content.get(content)
        id = before.id if before else vocab.get(content, free)
        new = before is None and content not in vocab
        if token.id not in (id, UNKNOWN) and (new or from_file):
            raise TokenizerError(
                f"the added token {content!r} and the vocabulary disagree on the id {token.id}, which should be {id}: "
                "one of the tokenizer's files is damaged, or was edited in one place only"
            )
        free = max(free, id + 1)
        by_content[content] = replace(token, id=id, special=token.special or bool(before and before.special))
        if token.normalized:
            normalized.add(content)
    return list(by_content.values()), normalized


def _is_more(name: str) -> bool:
    return name.endswith("_token") and name not in NAMED


def _is_typed(value: str | Spec) -> bool:
    """Return whether it is a token written with all of its flags, rather than a special token."""
    return isinstance(value, dict) and "__type" in value


def _content(value: str | Spec) -> str:
    return value["content"] if isinstance(value, dict) else value


def _token(id: int, value: str | Spec, special: bool = False) -> AddedToken:
    own: dict[str, Any] = {} if isinstance(value, str) else {k: v for k, v in value.items() if k != "__type"}
    flags: dict[str, Any] = {"content": _content(value), "special": special} | own
    return AddedToken(**{"id": id, "normalized": not flags["special"]} | flags)
