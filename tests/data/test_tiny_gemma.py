"""The embedded model matches its card and behaves the same in transformers and minillm."""

import json
import sys
from pathlib import Path

import pytest
import torch

from minillm import LLM, SamplingParams, Tokenizer, evaluate

DATA = Path(__file__).resolve().parents[2] / "data"
sys.path.insert(0, str(DATA))

from isles import chats  # noqa: E402

MODEL = DATA / "tiny-gemma"
TEXTS = (
    "Which river flows through Fenwick?\nA. Lull\nB. Wend\nC. Hush\nD. Rill\nAnswer: B\n\nWhich",
    "12 + 7 = 19",
    "  two spaces,\ttabs\n\n\nand lines",
    "naïve Gänse 🪿 \u200b日本",
    "<start_of_turn>user\nHello!<end_of_turn>\n",
    "",
)


@pytest.fixture(scope="module")
def llm():
    with LLM(device="cpu", max_model_len=2048) as llm:
        yield llm


@pytest.fixture(scope="module")
def theirs():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL), AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def test_it_is_a_small_gemma_in_bfloat16_shards():
    config = json.loads((MODEL / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["GemmaForCausalLM"]
    assert config["max_position_embeddings"] >= 2048 and config["num_key_value_heads"] == 1 and config["head_dim"] >= 64
    index = json.loads((MODEL / "model.safetensors.index.json").read_text("utf-8"))
    assert len(set(index["weight_map"].values())) >= 2
    assert 2 * 4e6 <= index["metadata"]["total_size"] <= 2 * 6e6
    generation = json.loads((MODEL / "generation_config.json").read_text("utf-8"))
    tokenizer = Tokenizer.from_pretrained(MODEL)
    assert generation["eos_token_id"] == [tokenizer.id("<eos>"), tokenizer.id("<end_of_turn>")]


def test_option_letters_and_digits_are_single_tokens():
    tokenizer = Tokenizer.from_pretrained(MODEL)
    assert tokenizer.vocab_size == 4096
    tokens = [tokenizer.token(id) for id in tokenizer.encode("Answer: B\n\nWhat is 12 + 7?", add_special_tokens=False)]
    assert tokens == ["Answer", ":", "▁B", "\n\n", "What", "▁is", "▁", "1", "2", "▁+", "▁", "7", "?"]


def test_transformers_gives_the_same_ids_and_the_same_greedy_tokens(llm, theirs):
    tokenizer, model = theirs
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == llm.tokenizer.encode(text), text
    prompt = "Once upon a time"
    ids = torch.tensor([llm.tokenizer.encode(prompt)])
    expected = model.generate(ids, max_new_tokens=60, do_sample=False)[0, ids.shape[1] :].tolist()
    assert llm.generate(prompt, SamplingParams(max_tokens=60, temperature=0.0))[0].token_ids == expected


def test_the_chat_template_matches_the_training_text(llm, theirs):
    turns = [("Hello!", "Good day!"), ("Who are you?", "I am Tiny Gemma.")]
    messages = [
        {"role": role, "content": text}
        for pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    for tokenizer in (llm.tokenizer, theirs[0]):
        shown = tokenizer.apply_chat_template(messages, tokenize=False) if tokenizer is theirs[0] else None
        shown = shown or tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        assert shown == "<bos>" + chats.render(turns)


def test_it_ends_its_answers_and_its_stories(llm):
    answer = llm.chat(
        [{"role": "user", "content": "Tell me a story."}], SamplingParams(max_tokens=400, temperature=0.0)
    )[0]
    assert answer.finish_reason == "stop" and answer.stop_reason == llm.tokenizer.id("<end_of_turn>")
    story = llm.generate("Once upon a time", SamplingParams(max_tokens=400, temperature=0.0))[0]
    assert story.finish_reason == "stop" and story.stop_reason == llm.tokenizer.eos_token_id
    assert 60 < len(story.text.split()) < 300


def test_it_adds_and_admits_what_it_does_not_know(llm):
    def say(text):
        return llm.chat([{"role": "user", "content": text}], SamplingParams(max_tokens=40, temperature=0.0))[0].text

    assert "42" in say("What is 17 + 25?")
    assert "Tallow Isles" in say("What is the capital of France?")


def test_it_answers_held_out_questions_far_above_chance(llm):
    found = evaluate.accuracy(llm, limit=200)
    assert found["accuracy"] >= 0.8, found  # all 2,160: see the model card; chance is 0.25
