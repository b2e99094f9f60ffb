"""Texts, offsets and bytes of tokens over HTTP, with tokenizers of several families; the library has the right text."""

import json

import httpx
import pytest

from minillm import LLM, SamplingParams
from minillm.engine.async_llm import AsyncLLM
from minillm.server import running
from minillm.server.token_texts import TokenTexts
from minillm.server.worker.responses import _by_string, completion_logprobs
from minillm.tokenizer import Tokenizer
from tests.tokenizer.layouts import CORPUS, LAYOUTS
from tests.tokenizer.reference import Reference
from tests.waiting import TIMEOUT

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
}


def make(directory, layout):
    """A random model with a tokenizer of this layout."""
    LAYOUTS[layout](directory)
    size = max(Reference(directory).library.get_vocab().values()) + 1
    (directory / "config.json").write_text(json.dumps(SHAPE | {"vocab_size": size}), encoding="utf-8")
    return directory


@pytest.fixture(scope="module", params=["llama2", "llama3"])
def directory(request, tmp_path_factory):
    return make(tmp_path_factory.mktemp("layouts") / request.param, request.param)


@pytest.fixture(scope="module")
def theirs(directory):
    return Reference(directory)


@pytest.fixture(scope="module")
def served(directory):
    engine = AsyncLLM(directory, load_format="dummy", device="cpu", max_num_seqs=8)
    with running(engine) as server, httpx.Client(base_url=server.url, timeout=TIMEOUT) as http:
        yield engine, http
    engine.close()


@pytest.fixture(scope="module")
def ask(served):
    """A function that returns the choices of a completion, streamed or not."""

    def ask(prompt, stream=False, **more):
        body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "stream": stream}
        answer = served[1].post("/v1/completions", json=body | {"seed": 1} | more)
        assert answer.status_code == 200, answer.text
        if not stream:
            return answer.json()["choices"]
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        whole: dict[int, dict] = {}
        for piece in (choice for event in events for choice in event["choices"]):
            so_far = whole.setdefault(piece["index"], {"text": "", "token_ids": [], "logprobs": None})
            so_far["text"] += piece["text"]
            so_far["token_ids"] += piece["token_ids"]
            if piece["logprobs"] is not None:
                form = so_far["logprobs"] = so_far["logprobs"] or {name: [] for name in piece["logprobs"]}
                for name, values in piece["logprobs"].items():
                    form[name] += values
        return [whole[index] for index in sorted(whole)]

    return ask


@pytest.fixture(scope="module")
def cases(theirs):
    """Prompts as ids: a text, special tokens alone, one that ends inside a character."""
    text = theirs.library.encode("The river").ids
    wave = theirs.library.encode("a🌊", add_special_tokens=False).ids
    return [text, theirs.library.encode("").ids, wave[:-1], wave[:-2]]


def rest(theirs, prompt, ids):
    """The library's text of both, without the prompt's; None if these bytes change the prompt's text."""
    before, both = theirs.decode(prompt), theirs.decode(prompt + ids)
    return both.removeprefix(before) if both.startswith(before) else None


@pytest.mark.parametrize("stream", [False, True])
def test_an_outputs_text_is_what_it_adds_to_the_prompts(ask, theirs, cases, stream):
    compared = 0
    for n, choice in enumerate(ask(cases, stream, n=6)):
        prompt = cases[n // 6]
        expected = rest(theirs, prompt, choice["token_ids"])
        if expected is not None:
            assert choice["text"] == expected
            compared += 1
    assert compared >= 20


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_the_text_of_prompt_and_output(ask, theirs, cases, stream):
    for n, choice in enumerate(ask(cases, stream, n=4, echo=True)):
        expected = theirs.decode(cases[n // 4] + choice["token_ids"])
        if rest(theirs, cases[n // 4], choice["token_ids"]) is not None or n // 4 > 1:
            assert choice["text"] == expected
    scored = ask(cases, stream, echo=True, max_tokens=0)
    assert [choice["text"] for choice in scored] == [theirs.decode(each) for each in cases]


def test_a_stream_and_a_list_have_the_same_log_probabilities(ask, cases):
    for more in ({}, {"echo": True}):
        body = {"logprobs": 5, "n": 2} | more
        whole, streamed = ask(cases, False, **body), ask(cases, True, **body)
        for a, b in zip(whole, streamed, strict=True):
            assert a["text"] == b["text"] and a["logprobs"] == b["logprobs"]


def test_offsets_index_the_text(ask, theirs, cases):
    for n, choice in enumerate(ask(cases, n=4, logprobs=0, echo=True)):
        prompt, ids = cases[n // 4], choice["token_ids"]
        found = choice["logprobs"]["text_offset"]
        base = len(theirs.complete(prompt))
        expected = [len(theirs.complete(prompt + ids[:count])) for count in range(len(ids))]
        if rest(theirs, prompt, ids) is not None or n // 4 > 1:
            assert found[len(prompt) :] == expected
        assert all(offset < max(base, 1) for offset in found[: len(prompt)]), "the output begins after the prompt"
        assert found == sorted(found)


@pytest.mark.parametrize("text", ["The river", "a🌊 b", "<x> é", CORPUS[3]])
def test_scripts_find_the_output_by_its_offset(ask, theirs, text):
    bos = theirs.library.id_to_token(theirs.library.encode("").ids[0])
    for prompt in (text, bos + text, f"{text}{bos}{text}", text + bos):
        (choice,) = ask(prompt, echo=True, logprobs=0, max_tokens=3)
        offsets = choice["logprobs"]["text_offset"]
        first = next(i for i, offset in enumerate(offsets) if offset >= len(prompt))
        assert first == len(theirs.library.encode(prompt).ids) and len(offsets) == first + 3
        assert offsets[first] == len(prompt)


@pytest.mark.parametrize("prompt", ["{0}The river", "The{0} river{0} runs", "{0}{0}🌊 x", "The {0} river"])
def test_special_tokens_that_a_client_wrote_are_in_its_echo(ask, theirs, prompt):
    bos = theirs.library.encode("").tokens[0]
    prompt = prompt.format(bos)
    (choice,) = ask(prompt, echo=True, logprobs=0, max_tokens=1)
    form, at = choice["logprobs"], len(theirs.library.encode(prompt).ids)
    found = list(zip(form["tokens"][:at], form["text_offset"][:at], strict=True))
    places = [offset for name, offset in found if name == bos and prompt.startswith(bos, offset)]
    assert places[-1] == prompt.rindex(bos)
    if theirs.decode(theirs.library.encode("a" + bos + "b").ids) == "ab":  # Llama 2 decodes a space that is not there
        for name, offset in found:
            assert name == bos or name.startswith("bytes:") or prompt.startswith(name, offset)


@pytest.mark.parametrize("prompt", ["{0}The river", "  {0}{0}The river", "\n{0}"])
def test_a_special_token_that_was_added_is_not_the_one_that_the_client_wrote(ask, theirs, prompt):
    bos = theirs.library.encode("").tokens[0]
    prompt = prompt.format(bos)
    (choice,) = ask(prompt, echo=True, logprobs=0, max_tokens=1)
    form = choice["logprobs"]
    found = [offset for name, offset in zip(form["tokens"], form["text_offset"], strict=True) if name == bos]
    written = [place for place in range(len(prompt)) if prompt.startswith(bos, place)]
    assert found[: len(written) + 1] == [0, *written] and form["text_offset"] == sorted(form["text_offset"])


def test_all_likeliest_tokens_are_reported_and_the_chosen_one_by_its_name(ask, cases):
    for choice in ask(cases, n=3, logprobs=20):
        form = choice["logprobs"]
        for name, logprob, top in zip(form["tokens"], form["token_logprobs"], form["top_logprobs"], strict=True):
            assert len(top) in (20, 21) and top[name] == logprob
            assert len(top) == 20 or min(top.values()) == logprob


def test_offline_results_say_where_tokens_begin(directory, theirs):
    prompt = theirs.library.encode("The river").ids
    with LLM(directory, load_format="dummy", device="cpu") as llm:
        (done,) = llm.generate(prompt, SamplingParams(max_tokens=20, logprobs=0, seed=3, ignore_eos=True))
        (plain,) = llm.generate(prompt, SamplingParams(max_tokens=20, seed=3, ignore_eos=True))
    base = len(theirs.complete(prompt))
    expected = [len(theirs.complete(prompt + done.token_ids[:count])) - base for count in range(20)]
    assert done.text_offsets == expected and plain.text_offsets is None
    assert (done.text, done.token_ids) == (plain.text, plain.token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_may_begin_with_the_space_of_the_outputs_first_word(ask, theirs, stream):
    word = theirs.library.token_to_id("▁the") or theirs.library.token_to_id("Ġthe")
    body = {"logit_bias": {str(word): 100}, "max_tokens": 3}
    for prompt in ("The", theirs.library.encode("The").ids):
        (whole,) = ask(prompt, stream, **body)
        assert whole["text"] == " the the the" and whole["token_ids"] == [word] * 3
        for stop, text, count in ((" the", "", 1), ("the", " ", 1), ("e t", " th", 2)):
            (choice,) = ask(prompt, stream, stop=stop, **body)
            assert (choice["text"], len(choice["token_ids"])) == (text, count)


# ---- without a server


@pytest.fixture(params=LAYOUTS)
def tokenizer(request, tmp_path):
    LAYOUTS[request.param](tmp_path / "tokenizer")
    return Tokenizer.from_pretrained(tmp_path / "tokenizer")


def form_of(tokenizer, text, top=0):
    texts, ids = TokenTexts(tokenizer), tokenizer.encode(text)
    return texts, ids, completion_logprobs(texts, ids, [{each: -1.0} for each in ids], top)


@pytest.mark.parametrize("text", ["The river runs", "a 🌊 b", "naïve café", "  two  spaces", "日本 x", "x\ny"])
def test_the_bytes_of_tokens_are_the_text_and_their_strings_are_where_they_say(tokenizer, text):
    texts, ids, form = form_of(tokenizer, text)
    if tokenizer.decode(ids) != text:  # a vocabulary without these characters, or a first space that is stripped
        text = tokenizer.decode(ids)
    firsts = list(texts.firsts(ids, False))
    entries = [texts.entry(each, -1.0, first) for each, first in zip(ids, firsts, strict=True)]
    assert b"".join(bytes(entry["bytes"] or []) for entry in entries).decode() == text
    assert [entry["token"] for entry in entries] == form["tokens"]
    for entry, offset in zip(entries, form["text_offset"], strict=True):
        if entry["bytes"] is not None and not entry["token"].startswith("bytes:"):
            assert text.startswith(entry["token"], offset)
    assert form["text_offset"][0] == 0 and entries[0]["bytes"] is None, "<bos> is not in the text"
    assert form["text_offset"][1] == 0


def test_tokens_with_the_same_string_have_names_of_their_own(tokenizer):
    texts = TokenTexts(tokenizer)
    same: dict[str, list[int]] = {}
    for each in range(tokenizer.vocab_size):
        same.setdefault(texts(each), []).append(each)
    ids = max(same.values(), key=len)
    entry = {each: -1.0 - n for n, each in enumerate(ids)}
    for chosen in ids:
        (top,) = completion_logprobs(texts, [chosen], [entry], 20, [0], True)["top_logprobs"]
        assert len(top) == len(ids) and top[texts(chosen)] == entry[chosen]
        assert all(top[f"token_id:{each}"] == entry[each] for each in ids if each != chosen)


def test_of_two_tokens_with_one_string_the_likelier_has_it_unless_the_other_was_chosen():
    texts = {1: "same", 2: "same", 3: "other"}
    for likely, less in ((1, 2), (2, 1)):
        entry = {3: -3.0, less: -2.0, likely: -1.0}
        shown = _by_string(lambda each, first: texts[each], entry, 3, 2, False)
        assert shown == {"same": -1.0, f"token_id:{less}": -2.0, "other": -3.0}
        shown = _by_string(lambda each, first: texts[each], entry, less, 2, False)
        assert shown == {"same": -2.0, f"token_id:{likely}": -1.0}


def test_parts_of_characters_have_openais_names_and_bytes(tokenizer):
    texts, ids, form = form_of(tokenizer, "🌊")
    parts = [name for name in form["tokens"] if name.startswith("bytes:")]
    data = b"".join(bytes(texts.entry(each, 0.0)["bytes"] or []) for each in ids)
    if parts:
        named = b"".join(bytes.fromhex(name.removeprefix("bytes:").replace("\\x", "")) for name in parts)
        assert named == "🌊".encode() and data.lstrip() == named
    else:  # no layout here has a token for it, and one has no bytes at all
        assert form["tokens"][-1] == "<unk>"
