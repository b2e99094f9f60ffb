"""The tokenizer's public interface: loading, errors, chat templates."""

import json
import shutil

import pytest

from minillm.tokenizer import StreamingDetokenizer, Tokenizer, TokenizerError, decoders
from minillm.tokenizer.chat import ChatTemplate

pytestmark = pytest.mark.key


def test_a_directory_without_a_tokenizer_is_reported_with_a_remedy(tmp_path):
    with pytest.raises(TokenizerError, match="no tokenizer.json in .*: copy it there"):
        Tokenizer.from_pretrained(tmp_path)


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(TokenizerError, match="tokenizer.json is not JSON"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    with pytest.raises(TokenizerError, match="not in the expected form: KeyError\\('vocab'\\)"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("text", ["\ud800", "abc\udfff", "\ud83d \ude00"])
def test_a_lone_surrogate_is_rejected_with_its_position(gemma, text):
    with pytest.raises(TokenizerError, match=f"lone surrogate .* at character {0 if text[0] > 'z' else 3}"):
        gemma.encode(text)


@pytest.mark.parametrize("text", [None, b"bytes", ["a"]])
def test_only_strings_can_be_encoded(gemma, text):
    with pytest.raises(TokenizerError, match="encode takes a str, not"):
        gemma.encode(text)


@pytest.mark.parametrize("id", [-1, 540, 10**9])
def test_an_id_out_of_range_is_rejected_with_the_range(gemma, id):
    with pytest.raises(TokenizerError, match=f"no token has the id {id}: this tokenizer's ids run from 0 to 539"):
        gemma.decode([5, id])
    with pytest.raises(TokenizerError, match=f"no token has the id {id}"):
        gemma.token(id)


def test_an_unknown_token_is_rejected(gemma):
    with pytest.raises(TokenizerError, match="'<nope>' is not one of the 540 tokens"):
        gemma.id("<nope>")


def test_unused_ids_of_a_padded_vocabulary_stream_as_no_text(gemma):
    ids = gemma.encode("the river", add_special_tokens=False)
    stream = StreamingDetokenizer(gemma)
    assert stream.add([9999, *ids, 9999]) + stream.flush() == "the river"


def test_a_stream_can_be_used_again_after_a_flush(gemma):
    stream = StreamingDetokenizer(gemma)
    assert stream.add([gemma.id("<0xE2>")]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
    assert stream.add([gemma.id("<0x41>"), gemma.id("<end_of_turn>")]) + stream.flush() == "A"


def test_a_stream_used_again_begins_like_a_new_one(directories):
    """Llama 2's decoder takes the first space off a text, once."""
    tokenizer = Tokenizer.from_pretrained(directories["llama2"])
    ids = tokenizer.encode("the river", add_special_tokens=False)
    stream = StreamingDetokenizer(tokenizer)
    assert [stream.add(ids) + stream.flush() for _ in range(3)] == ["the river"] * 3


def test_an_added_token_that_contradicts_the_vocabulary_is_rejected(directories, tmp_path):
    file = json.loads((directories["gemma"] / "tokenizer.json").read_text(encoding="utf-8"))
    file["added_tokens"][0]["id"] = 5
    with pytest.raises(TokenizerError, match="'<pad>' and the vocabulary disagree on the id 5"):
        Tokenizer(file)


def test_special_tokens_are_read_from_any_file_that_defines_them(directories, tmp_path):
    shutil.copy(directories["gemma"] / "tokenizer.json", tmp_path)
    assert Tokenizer.from_pretrained(tmp_path).bos_token_id is None
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<bos>"}, "eos_token": "<eos>"}')
    assert Tokenizer.from_pretrained(tmp_path).bos_token_id == 2
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null, "eos_token": "<end_of_turn>"}')
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (2, tokenizer.id("<eos>"))
    config = {"bos_token": None, "eos_token": "<end_of_turn>", "added_tokens_decoder": {}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, tokenizer.id("<end_of_turn>"))


def test_a_chat_renders_as_gemmas_turns_and_encodes_with_one_bos(gemma):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi "},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    prompt = gemma.apply_chat_template(messages)
    assert prompt == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )
    assert gemma.encode(prompt, add_special_tokens=False).count(gemma.bos_token_id) == 1


def test_turns_out_of_order_raise_the_templates_own_error(gemma):
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(TokenizerError, match="turn 2 must be from the assistant, not user"):
        gemma.apply_chat_template(messages)


@pytest.mark.parametrize("messages", [[], "hello", [{"content": "x"}], None])
def test_invalid_messages_are_rejected(gemma, messages):
    with pytest.raises(TokenizerError, match="messages must be a list"):
        gemma.apply_chat_template(messages)


@pytest.mark.parametrize("names", [False, True])
def test_a_developers_message_is_the_systems_where_the_template_names_no_developer(directories, names):
    settings = json.loads((directories["llama3"] / "tokenizer_config.json").read_text())
    spec = json.loads((directories["llama3"] / "tokenizer.json").read_text())
    template = "{{ messages[0].role }}" + ("{# developer #}" if names else "")
    messages = [{"role": "developer", "content": "x"}]
    found = Tokenizer(spec, settings, template).apply_chat_template(messages)
    assert found == ("developer" if names else "system") and messages[0]["role"] == "developer"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ messages[0].content.index('<') }}", "substring not found"),
        ("{{ messages[0].content.format() }}", "Single '{' encountered"),
        ("{{ 1 // messages[0].content|length }}{{ 1 // (messages|length - 1) }}", "division"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_template_that_fails_like_a_program_rejects_the_messages(source, why):
    with pytest.raises(TokenizerError, match=f"^the chat template rejects these messages: .*{why}"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "{"}])


def test_a_missing_chat_template_error_says_where_to_put_one(directories):
    llama3 = Tokenizer.from_pretrained(directories["llama3"])
    with pytest.raises(TokenizerError, match="no chat template: .* put a chat_template.jinja"):
        llama3.apply_chat_template([{"role": "user", "content": "x"}])


def test_a_template_file_takes_precedence_and_default_is_chosen_among_several(directories, tmp_path):
    shutil.copy(directories["gemma"] / "tokenizer.json", tmp_path)
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}!"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    messages = [{"role": "user", "content": "x"}]
    assert Tokenizer.from_pretrained(tmp_path).apply_chat_template(messages) == "x!"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_pretrained(tmp_path).apply_chat_template(messages) == "from the file"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__ }}",
        "{% set x = messages[0].update({'role': 'system'}) %}",
    ],
)
def test_templates_are_sandboxed_and_cannot_change_the_messages(source):
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(TokenizerError, match="rejects"):
        ChatTemplate(source, {}).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


def test_templates_have_the_globals_that_transformers_provides():
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{{ eos_token }}{{ strftime_now('%Y') | length }}{{ tools is none }}"
        "{% generation %}said{% endgeneration %}"
    )
    messages = [{"role": "user", "content": "<é>"}] * 2
    expected = '{"role": "user", "content": "<é>"}</s>4Truesaid'
    assert ChatTemplate(source, {"eos_token": "</s>"}).render(messages) == expected


def test_a_template_with_a_syntax_error_is_rejected_at_once():
    with pytest.raises(TokenizerError, match="does not parse"):
        ChatTemplate("{% if %}", {})


def test_the_bytes_of_a_texts_tokens_are_the_text_in_every_layout(pair):
    """The grammars of structured output read them. Some layouts put a space before a text, which decoding removes."""
    tokenizer, _ = pair
    text = "The miller's naïve daughter"
    found = [tokenizer.token_bytes(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    assert b"".join(found).removeprefix(b" ") == text.encode()
    assert tokenizer.token_bytes(tokenizer.vocab_size + 7) is None
    special = tokenizer.encode("", add_special_tokens=True)
    assert [tokenizer.token_bytes(token) for token in special] == [None] * len(special)


def test_the_bytes_of_each_token_are_what_it_adds_between_two_others(pair, monkeypatch):
    """As the library decodes it, for tokens of whole characters; two decoders do for all tokens."""
    tokenizer, theirs = pair
    made = []
    monkeypatch.setattr(decoders.Decoder, "push", counting(decoders.Decoder.push, made))
    found = tokenizer.tokens_bytes(range(tokenizer.vocab_size + 1))
    assert len(made) <= 2 and found[-1] is None
    anchor = tokenizer.id("a")
    compared = 0
    for id, each in enumerate(found):
        whole = each is not None and "\ufffd" not in each.decode(errors="replace")
        if whole and not tokenizer.token(id).startswith("<0x"):
            assert theirs.decode([anchor, id, anchor], skip_special_tokens=False) == f"a{each.decode()}a"
            assert tokenizer.token_bytes(id) == each
            compared += 1
    assert compared > tokenizer.vocab_size // 3


def counting(function, calls):
    def counted(*args):
        calls.append(function.__name__)
        return function(*args)

    return counted


def test_the_bytes_of_a_token_do_not_depend_on_a_texts_start_or_end():
    """A decoder may join tokens with spaces, or strip a text's ends."""
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 1}
    tokens = ["a", " a", "a ", "▁", "\ue000", "<0x41>"]
    plain = [token.encode() for token in tokens]
    assert decoders.tokens_bytes(None, tokens) == [b" " + each for each in plain]
    assert decoders.tokens_bytes({"type": "Sequence", "decoders": [{"type": "Fuse"}, strip]}, tokens) == plain
    byte = [*plain[:5], b"A"]
    assert decoders.tokens_bytes({"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}, tokens) == byte
