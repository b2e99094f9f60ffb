"""Faults in structured output: masks, schemas, the tokens of required texts."""

from . import Fault

MATCHER, SCHEMA, VOCABULARY = (f"minillm/grammar/{name}.py" for name in ("matcher", "schema", "vocabulary"))

FAULTS = (
    Fault(
        "a schema may ask for multiples that take minutes to compile",
        SCHEMA,
        "if least > MOST_MULTIPLE:",
        "if False:",
        "tests/grammar/test_schema.py -k multipleOf",
    ),
    Fault(
        "requests with the same grammar share one place in it",
        MATCHER,
        "return Matcher(self._state.deep_copy(), self.mask)",
        "return self",
        "tests/grammar/test_matcher.py -k advance_alone",
    ),
    Fault(
        "an object may have properties that its schema does not list",
        SCHEMA,
        "    close(found.values())\n",
        "",
        "tests/grammar/test_matcher.py -k listed_property",
    ),
    Fault(
        "an object that several schemas describe has only the properties of one",
        SCHEMA,
        "    if any(map(_combines, found)):\n",
        "    if False:\n",
        "tests/grammar/test_schema.py -k lists_or_requires",
    ),
    Fault(
        "a text that a grammar requires is encoded as if it began a text",
        VOCABULARY,
        '            if b"".join(self.tokens[id] for id in ids) == data:\n',
        "            if True:\n",
        "tests/grammar/test_vocabulary.py -k required_text_alone",
    ),
    Fault(
        "an end token that the tokenizer takes for text may come in a text",
        VOCABULARY,
        "            found[id] = None\n",
        "            pass\n",
        "tests/grammar/test_vocabulary.py -k no_text_even",
    ),
    Fault(
        "a vocabulary without some bytes is asked for the tokens of required texts",
        MATCHER,
        "made = _without_forcing(made, library)",
        "pass",
        "tests/grammar/test_vocabulary.py -k never_allows",
    ),
    Fault(
        "a comma may come after the last name that an object may have",
        SCHEMA,
        "    _settle_patterns(found, library)\n",
        "",
        "tests/grammar/test_schema.py -k follows_its_schema",
    ),
    Fault(
        "each grammar makes the vocabulary again",
        MATCHER,
        "self._made = self._made or self._make_tokenizer()",
        "self._made = self._make_tokenizer()",
        "tests/grammar/test_matcher.py -k made_once",
    ),
    Fault(
        "a refusal names the whole schema and not its part",
        SCHEMA,
        "if named else None",
        "if False else None",
        "tests/grammar/test_schema.py -k names_the_part",
    ),
)
