"""Compare a trained model of `minillm models` with transformers: logits, greedy text, tokenizer, streams, stops, chats.

    minillm download smollm2-135m
    python tools/real_model.py smollm2-135m --record smollm2-135m

Both read the same directory, in float32 on the CPU. Every part prints a row; the exit status is 1 if a part differs.
tests/pretrained/test_real_model.py runs the same parts where the model is downloaded.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from minillm import LLM, AsyncLLM, SamplingParams, pretrained  # noqa: E402
from minillm.bench import records  # noqa: E402
from minillm.calibration.forward import hidden_states  # noqa: E402
from minillm.model.loader import resolve  # noqa: E402
from minillm.tokenizer.detokenizer import StreamingDetokenizer  # noqa: E402

LOGITS_WITHIN = 5e-4  # float32 sums in another order; logits are up to about 30
NEW_TOKENS = 48
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three uses of copper.",
    "Who wrote Hamlet?",
    "What is 12 + 30?",
    "Write a Python function that reverses a string.",
    "Übersetze 'guten Morgen' ins Englische.",
    "日本の首都はどこですか。",
    "Reply with one emoji 😀.",
    'Give me a JSON object with the keys "name" and "age".',
)
SENTENCES = (
    "The quick brown fox jumps over 13 lazy dogs.",
    "In 1984, 12,345.67 of 1e-5 were ½ or ¾, x² and ٣٤.",
    "Fünf Bögen über Köln; naïve façade, Ørsted",
    "日本語のテキストと漢字。",
    "Привет, как дела?",
    "مرحبا بالعالم",
    "안녕하세요 세계",
    "😀👩‍👩‍👧‍👦🇩🇪 e\u0301 ﬁ",
    "def f(x):\n\treturn {'a': [1, 2], \"b\": x**2}  # it's\r\n",
    '{"key": "value", "list": [1, 2.5, null], "nested": {"a": "b\\n"}}',
    "<|im_start|>user\nhi<|im_end|>\n",
    "don't I'LL you've  we'd\u00a0they're",
    "https://example.org/path?query=1&other=%20#part",
    "   leading, \t tabs\n\n\n and   runs   of spaces   ",
    "\u200b\ufeff\x00\x7f zero widths and controls",
)
CHANGES: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    str.upper,
    lambda text: text[::-1],
    lambda text: f" {text}",
    lambda text: f"{text}\n",
    lambda text: text * 3,
    lambda text: text.replace(" ", ""),
    lambda text: text.replace(" ", "  "),
    lambda text: f"{text}<|im_end|>{text}",
    lambda text: text[: len(text) // 2],
    lambda text: " ".join(text),
    lambda text: f"1{text}2",
    lambda text: f"'{text}'",
    lambda text: text.title(),
    lambda text: text.encode("utf-8").hex(" "),
    lambda text: f"{text}\u0301",
    lambda text: text.replace("e", "é"),
    lambda text: f"# {text}\n\n* {text}",
    lambda text: text.swapcase(),
    lambda text: f"{text} {text[::-1]}",
)
TEXTS = tuple(change(text) for text in SENTENCES for change in CHANGES)
CHATS = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": " Why?\n\n  <|im_end|> 😀 "},
    ],
)


class Pair:
    """A model in minillm and in transformers."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.llm = LLM(directory, dtype="float32", device="cpu", max_num_seqs=16)
        self.ours = self.llm.engine.tokenizer
        self.theirs = AutoTokenizer.from_pretrained(directory)
        self.reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def prompts(self) -> list[list[int]]:
        """A chat about each question, or a text if the model has no chat template."""
        if self.theirs.chat_template is None:
            return [self.theirs.encode(text) for text in QUESTIONS]
        turns = [[{"role": "user", "content": text}] for text in QUESTIONS]
        return [self.theirs.apply_chat_template(each, add_generation_prompt=True)["input_ids"] for each in turns]


def tokenizer(pair: Pair) -> dict:
    """Ids of texts, with and without special tokens, and texts of ids, at once and streamed."""
    encoded = decoded = streamed = 0
    generator = random.Random(0)
    sequences = [[generator.randrange(pair.ours.vocab_size) for _ in range(20)] for _ in TEXTS]
    for text in TEXTS:
        for special in (True, False):
            ids = pair.theirs.encode(text, add_special_tokens=special)
            encoded += pair.ours.encode(text, add_special_tokens=special) != ids
            sequences.append(ids)
    for ids in sequences:
        for skip in (True, False):
            decoded += pair.ours.decode(ids, skip_special_tokens=skip) != pair.theirs.decode(
                ids, skip_special_tokens=skip
            )
        stream = StreamingDetokenizer(pair.ours)
        pieces = [stream.add([each]) for each in ids]
        streamed += "".join([*pieces, stream.flush()]) != pair.theirs.decode(ids, skip_special_tokens=True)
    return {"texts": len(TEXTS), "sequences": len(sequences), "differences": encoded + decoded + streamed}


def chat_template(pair: Pair) -> dict:
    """The text of conversations, with and without the beginning of an answer."""
    wrong = 0
    if pair.theirs.chat_template is not None:
        for chat in CHATS:
            for begin in (True, False):
                wanted = pair.theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=begin)
                wrong += pair.ours.apply_chat_template(chat, add_generation_prompt=begin) != wanted
    return {"conversations": len(CHATS), "differences": wrong}


@torch.inference_mode()
def logits(pair: Pair) -> dict:
    """All logits of prompts: the largest difference, and how many positions have another most likely token."""
    largest, wrong, positions = 0.0, 0, 0
    for ids in pair.prompts():
        row, model = torch.tensor([ids]), pair.llm.engine.model
        ours, theirs = model.logits(hidden_states(model, row)), pair.reference(row).logits[0]
        largest = max(largest, (ours - theirs).abs().max().item())
        wrong += (ours.argmax(-1) != theirs.argmax(-1)).sum().item()
        positions += len(ids)
    differences = wrong + (largest > LOGITS_WITHIN)
    return {"positions": positions, "largest_difference": float(f"{largest:.2g}"), "differences": differences}


@torch.inference_mode()
def greedy(pair: Pair) -> dict:
    """The most likely tokens of a batch, each against transformers' forward pass over prompt and answer; its end."""
    prompts, ends, wrong, ended = pair.prompts(), pair.llm.engine.model_config.eos_token_ids, 0, 0
    for ids, own in zip(prompts, pair.llm.generate(prompts, GREEDY), strict=True):
        tokens = [*own.token_ids]
        follow = pair.reference(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 :].argmax(-1).tolist()
        if own.finish_reason == "stop":
            ended += 1
            tokens += [] if tokens and tokens[-1] in ends else [follow[len(tokens)]]
            wrong += tokens[-1] not in ends
        wrong += tokens != follow[: len(tokens)]
    return {"prompts": len(prompts), "tokens": NEW_TOKENS, "ended_early": ended, "differences": wrong}


@torch.inference_mode()
def bfloat16(pair: Pair) -> dict:
    """What it would cost to store the weights in bfloat16: answers that change, and the KL divergence, in nats.

    No difference from transformers, so none is counted.
    """
    prompts, changed, divergence = pair.prompts(), 0, []
    before = pair.llm.generate(prompts, GREEDY)
    with LLM(pair.directory, dtype="float32", device="cpu", max_num_seqs=16) as other:
        for parameter in (*other.engine.model.norms(), *(each.weight for each in other.engine.model.weights())):
            parameter.copy_(parameter.to(torch.bfloat16))
        for ids, old, new in zip(prompts, before, other.generate(prompts, GREEDY), strict=True):
            changed += old.token_ids != new.token_ids
            row = torch.tensor([ids + [*old.token_ids]])
            found = [each.logits(hidden_states(each, row)) for each in (pair.llm.engine.model, other.engine.model)]
            p, q = (each[len(ids) - 1 :].double().log_softmax(-1) for each in found)
            divergence.append((p.exp() * (p - q)).sum(-1).mean().item())
    kl = sum(divergence) / len(divergence)
    return {"prompts": len(prompts), "changed": changed, "kl": float(f"{kl:.2g}"), "differences": 0}


def stops(pair: Pair) -> dict:
    """A stop string cuts the text before its first occurrence, in the middle of a token too."""
    prompts, wrong, cases = pair.prompts(), 0, []
    for prompt, whole in zip(prompts, pair.llm.generate(prompts, GREEDY), strict=True):
        text = pair.theirs.decode(whole.token_ids, skip_special_tokens=True)
        if stop := text[len(text) // 2 :][:3]:
            cases.append((prompt, text[: text.index(stop)], stop))
    params = [SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, stop=[stop]) for *_, stop in cases]
    for (_, wanted, _), own in zip(cases, pair.llm.generate([each[0] for each in cases], params), strict=True):
        wrong += own.text != wanted or own.finish_reason != "stop"
    return {"prompts": len(cases), "differences": wrong}


def streams(pair: Pair) -> dict:
    """Texts that come piece by piece are those that come at once, and are transformers' text of the same tokens.

    Each is generated alone: in a batch, sums are rounded differently, and a token that is drawn may be another.
    """
    params, prompts = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, seed=1), pair.prompts()
    whole = [pair.llm.generate(prompt, params)[0] for prompt in prompts]

    async def streamed() -> list[str]:
        engine = AsyncLLM(engine=pair.llm)
        try:
            return ["".join([delta.text async for delta in engine.stream(prompt, params)]) for prompt in prompts]
        finally:
            engine.close()

    texts = asyncio.run(streamed())
    wanted = [pair.theirs.decode(each.token_ids, skip_special_tokens=True) for each in whole]
    wrong = sum(text != each.text or text != want for text, each, want in zip(texts, whole, wanted, strict=True))
    return {"prompts": len(prompts), "differences": wrong}


# Streams are last: their engine closes the pair's.
PARTS: dict[str, Callable[[Pair], dict]] = {
    part.__name__: part for part in (tokenizer, chat_template, logits, greedy, bfloat16, stops, streams)
}


def compared(directory: Path) -> Iterator[dict]:
    """A row for each part."""
    pair = Pair(directory)
    for name, part in PARTS.items():
        begin = time.perf_counter()
        yield {"part": name, **part(pair), "seconds": round(time.perf_counter() - begin, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="a name of `minillm models`, or a directory")
    parser.add_argument("--record", help="a record's name, or a file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    directory, begun, results = Path(resolve(options.model)), records.begin(options.record), []
    for row in compared(directory):
        results.append(row)
        print(json.dumps(row), flush=True)
    found = pretrained.origin(directory)
    about = {"model": pretrained.model_name(directory), "rounded": found.rounded if found else ""}
    if options.record:
        records.write(records.record(results, begun, **about), options.record)
    return int(any(row["differences"] for row in results))


if __name__ == "__main__":
    sys.exit(main())
