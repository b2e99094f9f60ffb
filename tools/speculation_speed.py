"""Measure what drafts gain and cost: the same requests on two engines of one process, with and without, in turns.

    python tools/speculation_speed.py --record speculation                 tiny-gemma, and a trained model if it is here
    python tools/speculation_speed.py --draft DIRECTORY --parts draft      with a draft model
    python tools/speculation_speed.py --model gemma-2b --load-format dummy --dtype bfloat16 --parts worst synthetic \
        --drafts 7 3 --output-len 256 --record speculation                      the shape of a large one, on a GPU
    python tools/speculation_speed.py ... --ahead --record speculation-ahead    with drafts that the device finds

The parts:

tasks      prompt lookup on chats whose answers repeat their question to a different degree; greedy, one request.
           It needs a model of `minillm models` that is downloaded (`--chat`, default: smollm2-135m)
worst      every draft is wrong, whatever is drafted; 1, 8 and 64 requests
synthetic  drafts that are right by a coin: a proposer that knows the output, which costs nothing. It says what an
           acceptance length is worth on a machine, not what one can expect. On a GPU steps of different sizes round
           differently, so the output is not known: there drafts are accepted by the coin, whatever the model samples
draft      the draft model of `--draft`, on stories and on chats; temperature 0 and 0.7
exact      what `exact` costs without drafts, prompts and decodes together; only if it is named

With --ahead, the device finds its drafts itself. Those of random weights, which repeat a token, are all right, so a
coin decides there on the device, too.

Each row is printed, and written to the record, as soon as it is measured. On a GPU, decode steps are captured before.
A speed-up is the median over rounds of the time without, divided by the time with drafts right before or after it. The
acceptance length is that of rows of steps that had drafts: one, and the drafts that were right.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[1]))

import minillm  # noqa: E402
from minillm import LLM, SamplingParams, pretrained  # noqa: E402
from minillm.bench import records  # noqa: E402
from minillm.errors import MinillmError  # noqa: E402
from minillm.kernels import prompt_lookup  # noqa: E402
from minillm.runner import launched  # noqa: E402
from minillm.scheduler import Step  # noqa: E402
from minillm.speculation import Asked, every_draft_runs  # noqa: E402
from minillm.tokenizer import Tokenizer  # noqa: E402

PARTS = ("tasks", "worst", "synthetic", "draft")
EXACT = "exact"
BATCHES = (1, 8, 64)
RIGHT = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0)  # of drafts in "synthetic"
NOTE = (
    "The ferry to the northern islands leaves at seven in the morning and at four in the afternoon. Passengers should "
    "be at the pier twenty minutes before departure. Bicycles travel free; cars need a reservation. In winter "
    "the afternoon ferry does not run on Sundays. Tickets are sold at the harbor office and on board."
)
CODE = """def total_price(items, tax_rate):
    total = 0
    for item in items:
        if item["quantity"] > 0:
            total = total + item["price"] * item["quantity"]
    total = total + total * tax_rate
    return round(total, 2)


def average_price(items):
    if len(items) == 0:
        return 0
    return sum(item["price"] for item in items) / len(items)
"""
CLASS = """class ShoppingCart:
    def __init__(self, tax_rate):
        self.items = []
        self.tax_rate = tax_rate

    def add_item(self, name, price, quantity):
        if quantity <= 0:
            raise ValueError("quantity must be positive")
        self.items.append({"name": name, "price": price, "quantity": quantity})

    def remove_item(self, name):
        self.items = [item for item in self.items if item["name"] != name]

    def total_price(self):
        total = 0
        for item in self.items:
            total = total + item["price"] * item["quantity"]
        total = total + total * self.tax_rate
        return round(total, 2)

    def average_price(self):
        if len(self.items) == 0:
            return 0
        return sum(item["price"] for item in self.items) / len(self.items)
"""
TASKS = {
    "copy": f"Repeat the following text exactly, word for word:\n\n{NOTE}",
    "copy with edits": f"Repeat the following text, but write 'boat' instead of 'ferry' everywhere:\n\n{NOTE}",
    "edit code": f"Rename the variable `total` to `amount` in this code and print the whole code:\n\n{CODE}",
    "edit a class": f"Rename the class `ShoppingCart` to `Basket` in this code and print the whole code:\n\n{CLASS}",
    "summarize": f"Summarize the following text in two sentences, using its words:\n\n{NOTE}",
    "explain": "Explain in a few sentences why the sky is blue.",
}
START = 8  # tokens by which prompts differ
STORIES = ["Once upon a time", "One morning", "There was a little", "A long time ago", "The sailor", "In the town of"]
CHATS = [
    TASKS["explain"],
    "Who wrote Romeo and Juliet, and what is it about?",
    "Give me three tips for sleeping better.",
    "What is the difference between a river and a lake?",
    "Write a short letter that thanks a friend for a gift.",
    "How do I boil an egg?",
    "Tell me about the moon.",
    "What should I see in Paris in two days?",
]


class Known:
    """Drafts what follows in outputs that are known, each token with a chance of `right`, and otherwise another."""

    def __init__(self, outputs: Sequence[Sequence[int]], right: float, vocabulary: int, most: int = 64):
        self.by_start = {tuple(each[:START]): each for each in outputs}
        self.right, self.vocabulary, self.most, self.rng = right, vocabulary, most, random.Random(0)

    def propose(self, asked: Sequence[Asked]) -> list[list[int]]:
        return [self._drafts(each) for each in asked]

    def _drafts(self, asked: Asked) -> list[int]:
        count = len(asked.tokens)
        known = self.by_start[tuple(asked.tokens[:START].tolist())][count : count + min(asked.most, self.most)]
        return [each if self.rng.random() < self.right else (each + 1) % self.vocabulary for each in known]

    def forget(self, request_id: str) -> None:
        pass


def by_coin(right: float) -> Callable[[Step, np.ndarray], launched.Results]:
    """In place of `launched.agreed`: accepts each draft with a chance of `right`, if those before it are."""
    own, rng = launched.agreed, np.random.default_rng(0)

    def agreed(step: Step, sampled: np.ndarray) -> launched.Results:
        results = own(step, sampled)
        if step.drafts is not None:
            accepted = (step.drafts[step.samples] >= 0) & (rng.random(step.drafts[step.samples].shape) < right)
            results.accepted = 1 + np.cumprod(accepted, axis=1).sum(axis=1)
        return results

    return agreed


@triton.jit
def accept_by_coin_kernel(
    rows_ptr, counts_ptr, positions_ptr, drafts_ptr, right_ptr, lengths_ptr, accepted_ptr, PAD_ROW,
    MOST: tl.constexpr, RING: tl.constexpr, FOUND: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    row = tl.load(rows_ptr + i).to(tl.int64)
    count = tl.load(counts_ptr + i).to(tl.int32)
    if (row != PAD_ROW) & (count >= 0):
        length = tl.load(positions_ptr + i).to(tl.int32)
        each = tl.arange(0, MOST)
        drafts = tl.load(drafts_ptr + i + 1 + each, mask=each < count, other=-1)
        right = tl.rand(row, length * MOST + each) < tl.load(right_ptr)
        accepted = 1 + tl.min(tl.where((drafts >= 0) & right, MOST, each))
        tl.store(lengths_ptr + row, length + accepted)
        tl.store(accepted_ptr + row * RING + length % RING, tl.sum((drafts >= 0).to(tl.int32)) * FOUND + accepted)


class DeviceCoin:
    """In place of `prompt_lookup.accept`: accepts each draft with a chance of `right`, if those before it are."""

    def __init__(self) -> None:
        self.right = torch.ones(1, device="cuda")

    def accept(self, rows, counts, running, sampled, lengths, accepted, most: int) -> None:
        accept_by_coin_kernel[(len(rows),)](
            rows, counts, running.positions, running.host_tokens, self.right, lengths, accepted, len(lengths) - 1,
            MOST=triton.next_power_of_2(most + 1), RING=accepted.shape[1], FOUND=prompt_lookup.FOUND, num_warps=1,
        )  # fmt: skip


class Pair:
    """Two engines with the same options, one of which drafts."""

    def __init__(
        self, model: str | None, speculate: str, options: dict[str, Any], longest: int = 0, ahead: bool = False
    ):
        self.plain = LLM(model, **options)
        self.drafting = LLM(model, **options, speculate=speculate, speculate_ahead=ahead)
        self.on_gpu = self.plain.engine.config.device.startswith("cuda")
        for each in (self.plain, self.drafting):
            _capture(each, longest)

    def close(self) -> None:
        self.plain.close()
        self.drafting.close()

    def measured(self, prompts, params, rounds: int, proposer: Callable | None = None) -> dict:
        """Seconds of both, in turns, and what became of drafts. The outputs are compared."""
        seconds: dict[bool, list[float]] = {False: [], True: []}
        outputs, counts = {}, {}
        with minillm.using(proposer=proposer) if proposer else nullcontext():
            for turn in range(-1, rounds):
                for drafting in (False, True) if turn % 2 else (True, False):
                    llm = self.drafting if drafting else self.plain
                    before, begun = llm.stats(), time.perf_counter()
                    done = llm.generate(prompts, params)
                    passed, after = time.perf_counter() - begun, llm.stats()
                    if turn >= 0:  # the first one compiles, and finds out what steps cost
                        seconds[drafting].append(round(passed, 4))
                    outputs[drafting] = [each.outputs[0].token_ids for each in done]
                    counts[drafting] = {name: after[name] - before.get(name, 0) for name in after}
        drafts, tokens = counts[True]["drafts"], sum(len(each) for each in outputs[False])
        ratios = [a / b for a, b in zip(seconds[False], seconds[True], strict=True)]
        return {
            "requests": len(prompts),
            "output_tokens": tokens,
            "speedup": round(statistics.median(ratios), 4),
            "speedups": [round(each, 4) for each in ratios],
            "seconds_without": seconds[False],
            "seconds_with": seconds[True],
            "output_tokens_per_s": round(tokens / statistics.median(seconds[True]), 1),
            "acceptance_length": round(1 + counts[True]["accepted_tokens"] / drafts, 3) if drafts else None,
            "draft_tokens": counts[True]["draft_tokens"],
            "accepted_tokens": counts[True]["accepted_tokens"],
            "steps_without": counts[False]["steps"],
            "steps_with": counts[True]["steps"],
            "same_tokens": outputs[False] == outputs[True],
        }


def _capture(llm: LLM, longest: int) -> None:
    """Capture decode steps of all sizes, so that it does not happen while times are measured; nothing on a CPU.

    longest: the most tokens of a request.
    """
    graphs = llm.engine.executor.runner.graphs
    if graphs is not None and longest:
        decodes, block = graphs.decodes, llm.engine.config.block_size
        widths = {decodes.width(blocks) for blocks in range(1, -(-longest // block) + 1)}
        shapes = [type(decodes.largest)(size, width) for size in decodes.sizes for width in widths]
        decodes.capture_sizes(shapes)
        if graphs.lookups is not None:
            graphs.lookups.capture_sizes(shapes)


def tasks(options: argparse.Namespace) -> Iterator[dict]:
    try:
        place = str(pretrained.directory(options.chat))
    except MinillmError as error:
        print(f"tasks are left out: {error}", file=sys.stderr)
        return
    made = {"device": options.device, "max_num_seqs": 4, "enable_prefix_caching": False}
    pair = Pair(place, "ngram", made, 512 + options.output_len, options.ahead)
    params, tokenizer = SamplingParams(max_tokens=options.output_len, temperature=0), pair.plain.tokenizer
    for task, question in TASKS.items():
        prompt = chat_prompt(tokenizer, question)
        yield {"model": options.chat, "task": task, **pair.measured([prompt], params, options.rounds)}
    pair.close()


def chat_prompt(tokenizer: Tokenizer, question: str) -> list[int]:
    text = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def random_prompts(count: int, vocabulary: int, length: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(10, vocabulary - 10) for _ in range(length)] for _ in range(count)]


@cache
def known_pair(model: str | None, longest: int, ahead: bool, **settings: Any) -> Pair:
    return Pair(model, "ngram", settings, longest, ahead)


@cache
def device_coin() -> DeviceCoin:
    """One for all engines, whose captured steps keep it."""
    return DeviceCoin()


def with_known_outputs(
    options: argparse.Namespace, chances: Sequence[float], batches: Sequence[int], every: bool
) -> Iterator[dict]:
    on_device = options.ahead and options.device != "cpu" and torch.cuda.is_available()
    with patch.object(prompt_lookup, "accept", device_coin().accept) if on_device else nullcontext():
        yield from _with_known_outputs(options, chances, batches, every, device_coin() if on_device else None)


def _with_known_outputs(options, chances, batches, every: bool, device: DeviceCoin | None) -> Iterator[dict]:
    longest = options.input_len + options.output_len
    pair = known_pair(options.model, longest, options.ahead, **engine_options(options))
    vocabulary = pair.plain.model_config.vocab_size
    params = SamplingParams(max_tokens=options.output_len, temperature=0, ignore_eos=True)
    for batch in batches:
        prompts = random_prompts(batch, vocabulary, options.input_len)
        done = pair.plain.generate(prompts, params)
        outputs = [[*prompt, *each.outputs[0].token_ids] for prompt, each in zip(prompts, done, strict=True)]
        for most, right in product(options.drafts if every else [max(options.drafts)], chances):
            proposer: Callable | None = partial(Known, outputs, right, vocabulary, most)
            if options.ahead:
                pair.drafting.engine.scheduler.speculation.most, proposer = most, None
            if device is not None:
                device.right.fill_(right)
            by_chance = device is not None or (pair.on_gpu and every)
            coin = patch.object(launched, "agreed", by_coin(right)) if by_chance else nullcontext()
            with every_draft_runs() if every else nullcontext(), coin:
                found = pair.measured(prompts, params, options.rounds, proposer)
            yield {"drafts": most, "right": right, "accepted_by_coin": by_chance, **found}


def worst(options: argparse.Namespace) -> Iterator[dict]:
    for found in with_known_outputs(options, (0.0,), options.batches, every=False):
        yield {"model": options.model or "tiny-gemma", **found}


def synthetic(options: argparse.Namespace) -> Iterator[dict]:
    for found in with_known_outputs(options, options.right, options.batches[:2], every=not options.choose):
        yield {"model": options.model or "tiny-gemma", "synthetic_acceptance": True, **found}


def draft(options: argparse.Namespace) -> Iterator[dict]:
    if options.draft is None:
        return
    pair = Pair(options.model, options.draft, engine_options(options), 64 + options.output_len)
    tokenizer = pair.plain.tokenizer
    texts = {
        "stories": [tokenizer.encode(each) for each in STORIES],
        "chats": [chat_prompt(tokenizer, each) for each in CHATS],
    }
    for (text, given), temperature in product(texts.items(), (0, 0.7)):
        params = SamplingParams(
            max_tokens=options.output_len, temperature=temperature, seed=1, ignore_eos=text == "stories"
        )
        for batch in options.batches[:2]:
            prompts = (given * batch)[:batch]
            found = pair.measured(prompts, params, options.rounds)
            yield {"model": options.model or "tiny-gemma", "text": text, "temperature": temperature, **found}
    pair.close()


def exact(options: argparse.Namespace) -> Iterator[dict]:
    made = engine_options(options)
    engines = {each: LLM(options.model, **made, exact=each) for each in (False, True)}
    for llm in engines.values():
        _capture(llm, options.input_len + options.output_len)
    params = SamplingParams(max_tokens=options.output_len, temperature=0, ignore_eos=True)
    for batch in options.batches:
        prompts = random_prompts(batch, engines[False].model_config.vocab_size, options.input_len)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(-1, options.rounds):
            for each in (False, True) if turn % 2 else (True, False):
                begun = time.perf_counter()
                engines[each].generate(prompts, params)
                if turn >= 0:
                    seconds[each].append(round(time.perf_counter() - begun, 4))
        ratios = [a / b for a, b in zip(seconds[True], seconds[False], strict=True)]
        yield {
            "model": options.model or "tiny-gemma",
            "dtype": engines[True].engine.facts.dtype,
            "requests": batch,
            "times_as_long": round(statistics.median(ratios), 4),
            "ratios": [round(each, 4) for each in ratios],
            "seconds_without": seconds[False],
            "seconds_with": seconds[True],
        }
    for llm in engines.values():
        llm.close()


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "device": options.device,
        "dtype": options.dtype,
        "load_format": options.load_format,
        "max_num_seqs": 64,
        "max_model_len": 2048,
        "speculate_tokens": max(options.drafts),
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.4,
    }


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: tiny-gemma")
    parser.add_argument("--chat", default="smollm2-135m", help="the model of `tasks`")
    parser.add_argument("--draft", help="a draft model's directory")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, EXACT), default=list(PARTS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), help="requests at once")
    parser.add_argument("--right", nargs="+", type=float, default=list(RIGHT), help="of drafts in `synthetic`")
    parser.add_argument(
        "--drafts", nargs="+", type=int, default=[7], help="most of a request in a step; `synthetic`: each"
    )
    parser.add_argument("--ahead", action="store_true", help="the device finds drafts: speculate_ahead")
    parser.add_argument("--choose", action="store_true", help="`synthetic`: run only the drafts that are worth it")
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", metavar="NAME", help="write a record of this name")
    return parser.parse_args(words)


def main() -> None:
    options = parse()
    begun, results = records.begin(options.record), []
    for part in options.parts:
        for row in globals()[part](options):
            results.append({"part": part, "drafts": max(options.drafts), **row})
            lists = ("speedups", "ratios", "seconds_with", "seconds_without")
            print(json.dumps({key: value for key, value in results[-1].items() if key not in lists}), flush=True)
            if options.record:
                records.write(records.record(results, begun), options.record)


if __name__ == "__main__":
    main()
