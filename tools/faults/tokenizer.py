"""Faults in encoding, decoding and training."""

from . import Fault

BPE, ADDED = "minillm/tokenizer/bpe.py", "minillm/tokenizer/added_tokens.py"

FAULTS = (
    Fault(
        "an added token strips only one of the spaces before it",
        ADDED,
        "while start > done and _SPACE.fullmatch(text[start - 1]):",
        "if start > done and _SPACE.fullmatch(text[start - 1]):",
        "tests/tokenizer/test_components.py -k consumes_all_white_space",
    ),
    Fault(
        "the rightmost of equal pairs is merged first",
        BPE,
        "positions[rank].popleft()",
        "positions[rank].pop()",
        "tests/tokenizer/test_bpe.py -k heap",
    ),
    Fault(
        "a long piece is split inside an unknown token",
        BPE,
        "if pair not in self._joinable and pair[0] in self.vocab and pair[1] in self.vocab:",
        "if pair not in self._joinable:",
        "tests/tokenizer/test_bpe.py -k splitting_a_long_piece",
    ),
    Fault(
        "cached words survive a replaced merge function",
        BPE,
        "self._cache, self._cache_version = {}, PARTS.version",
        "self._cache_version = PARTS.version",
        "tests/test_overrides.py -k user_supplied_merge",
    ),
    Fault(
        "a flush keeps the bytes that it returned",
        "minillm/tokenizer/detokenizer.py",
        "decoder, self._decoder = self._decoder, self._tokenizer.new_decoder()",
        "decoder = self._decoder",
        "tests/tokenizer/test_tokenizer.py -k used_again",
    ),
    Fault(
        "an output's first word loses its space",
        "minillm/tokenizer/detokenizer.py",
        "        if len(after):\n",
        "        if not after:\n",
        "tests/tokenizer/test_continuation.py -k first_word",
    ),
    Fault(
        "an old map of special tokens no longer overrides",
        "minillm/tokenizer/settings.py",
        "config = config | special_map",
        "config = special_map | config",
        "tests/tokenizer/test_settings.py -k each_way",
    ),
    Fault(
        "settings change no flags of a token of tokenizer.json",
        "minillm/tokenizer/settings.py",
        "by_content[content] = replace(token, id=id, special",
        "by_content[content] = replace(before or token, id=id, special",
        "tests/tokenizer/test_settings.py -k each_way",
    ),
    Fault(
        "equally frequent characters keep their order of appearance",
        "minillm/tokenizer/training.py",
        "key=lambda c: (-character_counts[c], c)",
        "key=lambda c: -character_counts[c]",
        "tests/tokenizer/test_training.py",
    ),
)
