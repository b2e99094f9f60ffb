"""A small model with two tokenizers: one puts <bos> before a text, the other only has a token of that name."""

import json

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers, processors

from tests import models

SPECIAL = ("<pad>", "<bos>", "<eos>")


@pytest.fixture(scope="session", params=[False, True], ids=["named-bos", "added-bos"])
def bos_directory(request, tmp_path_factory):
    """(a model's directory, whether its tokenizer adds <bos>)."""
    return _directory(tmp_path_factory.mktemp("model"), request.param), request.param


@pytest.fixture(scope="session")
def named_bos(tmp_path_factory):
    """A model's directory whose tokenizer has a bos_token and adds nothing, as SmolLM2's."""
    return _directory(tmp_path_factory.mktemp("model"), adds=False)


def _directory(place, adds):
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={word: id for id, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if adds:
        made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    made.add_special_tokens(list(SPECIAL))
    made.save(str(place / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (place / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    models.make("llama3-grouped", vocab_size=len(words)).save_pretrained(place)
    return place
