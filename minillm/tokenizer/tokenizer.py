"""The tokenizer of a `tokenizer.json`: text to ids and back.  Lesson 01.

Encoding matches added tokens, then runs normalizer, pre-tokenizer, byte-pair merges and post-processor, in that order;
decoding runs the decoder. The file's format is that of Hugging Face's `tokenizers`, with the components that Gemma,
Llama and similar models use. `truncation` and `padding` are ignored: the engine rejects prompts that are too long.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from minillm.values import read_json

from .added_tokens import AddedToken, AddedTokens
from .bpe import BPE
from .chat import ChatTemplate
from .decoders import Decoder, tokens_bytes
from .normalizers import build_normalizer
from .patterns import Spec, TokenizerError
from .pre_tokenizers import build_pre_tokenizer
from .settings import read_settings, with_ids

FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


class Tokenizer:
    """A tokenizer read from a model's directory.  Lesson 01.

    bos_token_id, eos_token_id  ids, or None if the directory names no such token
    prefix                      ids that `encode` puts before a text: <bos>, or nothing (even if there is a bos_token)
    vocab_size                  number of tokens, including added ones
    added_by_settings           how many of them are not in `tokenizer.json`, but in files next to it
    """

    def __init__(
        self,
        tokenizer: Spec,
        config: Spec | None = None,
        chat_template: str | None = None,
        special_map: Spec | None = None,
        added_tokens: dict[str, int] | None = None,
    ) -> None:
        """tokenizer, config, special_map, added_tokens: the contents of `tokenizer.json`, `tokenizer_config.json`,
        `special_tokens_map.json` and `added_tokens.json`. Raises TokenizerError."""
        try:
            self._model = _build_model(tokenizer["model"])
            in_file = [AddedToken(**entry) for entry in tokenizer.get("added_tokens") or []]
        except (KeyError, TypeError, AttributeError) as error:
            raise TokenizerError(f"tokenizer.json is not in the expected form: {error!r}") from error
        config = config or {}
        try:
            settings = read_settings(in_file, config, special_map or {}, added_tokens or {})
            template = chat_template or _default_template(config.get("chat_template"))
            self._chat = ChatTemplate(template, settings.special) if template else None
            self._has_developers = template is not None and "developer" in template
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            contents = zip(FILES, (config, special_map, added_tokens), strict=True)
            names = " or ".join(name for name, content in contents if content)
            raise TokenizerError(f"{names} is not in the expected form: {error!r}") from error
        added, normalized = with_ids(in_file, settings.tokens, self._model.vocab)
        try:
            normalize = build_normalizer(tokenizer.get("normalizer"))
            self._added = AddedTokens(added, normalize)
            self._pre_tokenize = build_pre_tokenizer(tokenizer.get("pre_tokenizer"))
            self.prefix, self._suffix = _build_template(tokenizer.get("post_processor"))
            self._decoder_spec = tokenizer.get("decoder")
            self.new_decoder()
        except (KeyError, TypeError, AttributeError) as error:
            raise TokenizerError(f"tokenizer.json is not in the expected form: {error!r}") from error
        self._ids = self._model.vocab | {token.content: token.id for token in added}
        self._tokens = {id: token for token, id in self._ids.items()}
        self._tokens |= {token.id: normalize(token.content) for token in added if token.content in normalized}
        special = {token.content for token in added if token.special}
        self._special = {token.id for token in added if self._tokens[token.id] in special}
        self.vocab_size = len(self._tokens)
        self.added_by_settings = self.vocab_size - len(self._model.vocab.keys() | {token.content for token in in_file})
        self.bos_token_id = self._ids.get(settings.special.get("bos_token", ""))
        self.eos_token_id = self._ids.get(settings.special.get("eos_token", ""))

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> "Tokenizer":
        """Read `tokenizer.json` and, if present, the files next to it that add tokens (see `settings`) and
        `chat_template.jinja`.  Lesson 01.

        Raises TokenizerError, which names the file or component, if one is missing, damaged or not supported.
        """
        directory = Path(directory)
        tokenizer = _read_json(directory / "tokenizer.json")
        if tokenizer is None:
            raise TokenizerError(
                f"there is no tokenizer.json in {directory}: copy it there from where the model comes from, "
                "or work with token ids alone"
            )
        config, special_map, added = (_read_json(directory / name) for name in FILES)
        return cls(tokenizer, config, _read_template(directory / "chat_template.jinja"), special_map, added)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`.  Lesson 01.

        add_special_tokens: whether to add the tokens that the file's post-processor puts around a text (usually <bos>).
        Special tokens that occur in the text become their ids in any case. Takes O(n log n) time at worst.
        Raises TokenizerError if `text` is not a str or has a lone surrogate, which UTF-8 cannot encode.
        """
        if not isinstance(text, str):
            raise TokenizerError(f"encode takes a str, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text has the lone surrogate {text[error.start]!a} at character {error.start}, which is half of "
                'a UTF-16 pair and not a character: decode its source with errors="replace", or remove it'
            ) from None
        ids: list[int] = []
        for piece, at_start in self._added.split(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                for word in self._pre_tokenize(piece, at_start):
                    ids += self._model.encode(word)
        return [*self.prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`.  Lesson 01.

        skip_special_tokens: whether to omit special tokens. Raises TokenizerError for an unknown id.
        """
        ids = list(ids)
        for id in ids:
            self.token(id)
        decoder = self.new_decoder()
        return decoder.push(self.visible_tokens(ids, skip_special_tokens)) + decoder.finish()

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, *, tokenize: bool = False
    ) -> str:
        """Return the prompt for `messages`. Encode it with add_special_tokens=False: it starts with <bos>.  Lesson 01.

        messages: {"role": ..., "content": ...} each. add_generation_prompt: whether to end with the start of the
        model's turn. tokenize: only False, as in calls written for transformers. Raises TokenizerError if there is no
        chat template, or if it rejects the messages. A template that does not name the role "developer", OpenAI's newer
        name for "system", gets such messages as the system's.
        """
        if tokenize:
            raise TokenizerError("tokenize=True: encode the text yourself, with add_special_tokens=False")
        if self._chat is None:
            raise TokenizerError(
                "this tokenizer has no chat template: use a model trained for chat, or put a chat_template.jinja "
                "next to its tokenizer.json"
            )
        if not self._has_developers and isinstance(messages, (list, tuple)):
            messages = [_as_system(message) for message in messages]
        return self._chat.render(messages, add_generation_prompt)

    def token(self, id: int) -> str:
        """Return the token with this id, as written in the vocabulary. Raises TokenizerError for an unknown id."""
        try:
            return self._tokens[id]
        except KeyError:
            limit = max(self._tokens, default=-1)
            raise TokenizerError(f"no token has the id {id}: this tokenizer's ids run from 0 to {limit}") from None

    def token_bytes(self, id: int) -> bytes | None:
        """Return the bytes that this token adds inside a text; None for a special token and for an unknown id."""
        return self.tokens_bytes([id])[0]

    def tokens_bytes(self, ids: Iterable[int]) -> list[bytes | None]:
        """`token_bytes` of each id, in much less time than one by one."""
        tokens = [None if id in self._special else self._tokens.get(id) for id in ids]
        known = iter(tokens_bytes(self._decoder_spec, [token for token in tokens if token is not None]))
        return [None if token is None else next(known) for token in tokens]

    def id(self, token: str) -> int:
        """Return the id of this token. Raises TokenizerError if it is not in the vocabulary."""
        try:
            return self._ids[token]
        except KeyError:
            raise TokenizerError(f"{token!r} is not one of the {self.vocab_size} tokens of this vocabulary") from None

    def visible_tokens(self, ids: Iterable[int], skip_special_tokens: bool) -> Iterator[str]:
        """Yield the tokens that have text: known ids, without special tokens if `skip_special_tokens`."""
        for id in ids:
            token = self._tokens.get(id)
            if token is not None and not (skip_special_tokens and id in self._special):
                yield token

    def new_decoder(self) -> Decoder:
        """Return a new decoder, for one sequence of tokens."""
        return Decoder(self._decoder_spec)


def _build_model(spec: Spec) -> BPE:
    if spec.get("type", "BPE") != "BPE":
        raise TokenizerError(f"tokenizer.json has the model {spec['type']!r}, which is not supported; BPE is")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if spec.get(option):
            raise TokenizerError(f"the BPE option {option}={spec[option]!r} is not supported: it must be null")
    options = {name: spec.get(name) or False for name in ("fuse_unk", "byte_fallback", "ignore_merges")}
    return BPE(spec["vocab"], spec["merges"], spec.get("unk_token"), **options)


def _build_template(spec: Spec | None) -> tuple[list[int], list[int]]:
    """Return the ids that a post-processor adds before and after a text."""
    if spec is None or spec["type"] == "ByteLevel":  # ByteLevel only changes offsets, which are not used here
        return [], []
    before: list[int] = []
    after: list[int] = []
    if spec["type"] == "Sequence":
        for prefix, suffix in map(_build_template, spec["processors"]):
            before, after = prefix + before, after + suffix
        return before, after
    if spec["type"] != "TemplateProcessing":
        raise TokenizerError(
            f"tokenizer.json has the post-processor {spec['type']!r}, which is not supported; these are: ByteLevel, "
            "Sequence, TemplateProcessing"
        )
    side = before
    for item in spec["single"]:
        if "Sequence" in item:
            side = after
        else:
            side += spec["special_tokens"][item["SpecialToken"]["id"]]["ids"]
    return before, after


def _default_template(template: str | list[dict[str, str]] | None) -> str | None:
    """Return the default of a file's templates: it may have one, or several with names."""
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _read_json(path: Path) -> Spec | None:
    return read_json(path, TokenizerError) if path.is_file() else None


def _read_template(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 text ({error}): it may be a damaged download") from error


def _as_system(message: Any) -> Any:
    """Return a developer's message as one of the system's; others, and what is no message, as they are."""
    developer = isinstance(message, dict) and message.get("role") == "developer"
    return message | {"role": "system"} if developer else message
