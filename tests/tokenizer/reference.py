"""Texts of unfinished outputs, from the `tokenizers` library."""

import codecs
import itertools
import json

import tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


class Reference:
    def __init__(self, directory):
        self.library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.decoder = json.dumps(json.loads(self.library.to_str())["decoder"])
        added = self.library.get_added_tokens_decoder()
        self.known = self.library.get_vocab_size()
        self.special = {id for id, token in added.items() if token.special}

    def decode(self, ids) -> str:
        return self.library.decode([each for each in ids if each < self.known])

    def complete(self, ids) -> str:
        """The text of these ids, without a character at its end whose bytes are incomplete."""
        visible = [each for each in ids if each < self.known and each not in self.special]
        names = [self.library.id_to_token(each) for each in visible]
        utf8 = codecs.getincrementaldecoder("utf-8")("replace" if "ByteLevel" in self.decoder else "strict")
        if "ByteLevel" in self.decoder:
            for name in names:
                known = all(character in BYTES for character in name)
                utf8.decode(bytes(BYTES[character] for character in name) if known else name.encode())
            text = self.decode(visible)
            return text[:-1] if utf8.getstate()[0] else text
        if "ByteFallback" in self.decoder:
            run = [*itertools.takewhile(lambda name: len(name) == 6 and name.startswith("<0x"), reversed(names))]
            try:
                utf8.decode(bytes(int(name[3:5], 16) for name in reversed(run)))
            except UnicodeDecodeError:  # no more bytes can repair it
                return self.decode(visible)
            return self.decode(visible[: len(visible) - len(utf8.getstate()[0])])
        return self.decode(visible)
