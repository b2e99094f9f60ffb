"""Lesson 09's set-ups: what its pools inherit, and small engines whose block tables are drawn."""

import json
import random
import tempfile
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from minillm import LLM, RequestOptions, SamplingParams
from minillm.kv_cache import BlockPoolError
from minillm.model.config import PRESETS, ModelConfig
from minillm.trace import Trace, TraceError, tables

LENGTHS = ((30, 20), (12, 30), (44, 16), (20, 40), (9, 24), (26, 12), (33, 9), (14, 20))  # prompt, output
QUESTIONS = (
    "Who are you?",
    "On which island does Fenwick lie?",
    "What does the quirrel eat?",
    "What is 3 plus 4?",
    "Tell me a story about a lighthouse.",
)
WINDOW = 16
LOCAL_AND_GLOBAL = {
    "architectures": ["Gemma3ForCausalLM"],
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}


class PoolWithoutPrefixes:
    """Answers what else the engine asks of a pool, for one that allocates, shares and releases without a prefix cache.

    references: the number of holders of each block.
    """

    num_blocks: int
    references: list[int]

    @property
    def cached(self) -> int:
        return 0

    def lookup(self, keys: Iterable[Hashable]) -> list[int]:
        return []

    def register(self, block: int, key: Hashable) -> None:
        pass

    def forget(self) -> None:
        pass

    def unreferenced(self, blocks: Iterable[int]) -> int:
        return 0

    def check(self, holders: Iterable[int]) -> None:
        """Raise AssertionError unless the counts are right. holders: every held block, once for each holder."""
        assert Counter({block: count for block, count in enumerate(self.references) if count}) == Counter(holders)


class PoolWithPrefixes(PoolWithoutPrefixes):
    """The same for a pool with cached blocks, `idle`, and the dictionaries `block_of` (by key) and `key_of`."""

    free: list[int]
    idle: dict[int, None]
    block_of: dict[Hashable, int]
    key_of: dict[int, Hashable]

    @property
    def cached(self) -> int:
        return len(self.idle)

    def forget(self) -> None:
        self.free.extend(self.idle)
        for each in (self.idle, self.block_of, self.key_of):
            each.clear()

    def unreferenced(self, blocks: Iterable[int]) -> int:
        return sum(self.references[block] == 0 for block in blocks)

    def check(self, holders: Iterable[int]) -> None:
        super().check(holders)
        used = [block for block, count in enumerate(self.references) if count]
        assert sorted([*used, *self.idle, *self.free]) == list(range(self.num_blocks))


def random_prompt(tokens: int, seed: int) -> list[int]:
    """Token ids without a meaning, for runs in which only their number matters."""
    return random.Random(seed).choices(range(10, 4096), k=tokens)


def eight_requests(prefix: Sequence[int] = ()) -> Trace:
    """The trace of eight requests that come at once; three run at a time, in 24 blocks of 8 slots.

    Their lengths are LENGTHS. prefix: tokens before each prompt, which the prefix cache can share. Raises
    BlockPoolError if the pool hands out a block that is in use.
    """
    trace = Trace()
    exactly = [SamplingParams(max_tokens=out, ignore_eos=True, temperature=0) for _, out in LENGTHS]
    prompts = [[*prefix, *random_prompt(tokens, seed=tokens)] for tokens, _ in LENGTHS]
    with LLM(
        device="cpu",
        trace=trace,
        block_size=8,
        num_blocks=24,
        max_num_seqs=3,
        run_ahead=0,
        enable_prefix_caching=bool(prefix),
    ) as engine:
        engine.generate(prompts, exactly)
    try:
        deque(tables(trace), maxlen=0)
    except TraceError as error:  # it says where, and assumes that the trace is incomplete; here the pool is wrong
        event = str(error).partition(": ")[0]
        raise BlockPoolError(f"the block pool made a mistake, which the trace shows: {event}") from None
    return trace


def chat(llm: LLM, salts: Sequence[str]) -> tuple[list[dict], list[tuple[int, int]]]:
    """A conversation of QUESTIONS, a salt for each turn: its messages, and each turn's (prompt tokens, those found)."""
    messages: list[dict] = []
    turns = []
    for question, salt in zip(QUESTIONS, salts, strict=True):
        messages.append({"role": "user", "content": question})
        before = llm.stats()["prefix_hit_tokens"]
        params = SamplingParams(max_tokens=40, temperature=0)
        (completion,) = llm.chat(messages, params, RequestOptions(cache_salt=salt))
        messages.append({"role": "assistant", "content": completion.text})
        turns.append((len(completion.prompt_token_ids), llm.stats()["prefix_hit_tokens"] - before))
    return messages, turns


def local_and_global() -> Trace:
    """The trace of one request, 20 tokens and 60 new ones, in a model of a local and a global layer (random weights).

    The local layer has a window of 16 tokens; blocks have 8 slots.
    """
    trace = Trace()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LOCAL_AND_GLOBAL))
        with LLM(
            folder,
            load_format="dummy",
            device="cpu",
            trace=trace,
            block_size=8,
            num_blocks=24,
            run_ahead=0,
            enable_prefix_caching=False,
        ) as engine:
            engine.generate([list(range(2, 22))], SamplingParams(max_tokens=60, ignore_eos=True))
    return trace


def gemma_3_4b() -> ModelConfig:
    """The cache's shape in Gemma 3 4B: 34 layers, every sixth of which is global, the others with a window of 1,024."""
    windows = tuple(None if layer % 6 == 5 else 1024 for layer in range(34))
    return replace(PRESETS["gemma-2b"], num_layers=34, num_kv_heads=4, max_model_len=131_072, windows=windows)
