"""A model divided between two processes, what a reduce may cost, and a pipeline's times.  Lesson 14."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from minillm.bench import records
from minillm.engine.llm import LLM
from minillm.model.config import PRESETS, ModelConfig
from minillm.model.modules import Module
from minillm.quantization import Shard
from minillm.request import SamplingParams

PROMPT = "Once upon a time there was a"
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
BY_COLUMNS = ("o_proj", "down_proj")
LARGE: ModelConfig = replace(  # the shape of Llama 3.1 70B
    PRESETS["gemma-2b"],
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    tie_word_embeddings=False,
    norm_offset=0.0,
    embedding_scale=1.0,
    activation="silu",
)
ShardRule = Callable[[str, int, int, int, int, int], tuple[range, range]]


def engine(ranks: int = 1) -> LLM:
    """The embedded model in float64, in this process or in several. Close it, or use it in a `with` block."""
    return LLM(device="cpu", dtype="float64", num_blocks=64, tensor_parallel_size=ranks)


def by_name(rule: ShardRule) -> Callable[[Module, int, int], Shard]:
    """The lesson's shard(name, out, inputs, parts, rank, size) as the engine calls it: shard(module, rank, size)."""

    def shard_by_name(module: Module, rank: int, size: int) -> Shard:
        name = module.name.rpartition(".")[2]
        return Shard(*rule(name, len(module.rows), module.inputs, module.parts, rank, size))

    return shard_by_name


def step_ms() -> dict[int, float]:
    """{tokens of a decode step: its milliseconds}, of Gemma 2B on one H200, from lesson 00's record."""
    rows = [each for each in records.read("h200/roofline")["results"] if each["name"].startswith("decode")]
    return {row["tokens"]: 1e3 * row["seconds"] for row in rows}


def reduces(config: ModelConfig) -> int:
    """Return how many sums over ranks a step has: of embeddings, and two in each layer."""
    return 1 + 2 * config.num_layers


def gain(one_ms: float, count: int, reduce_us: float, ranks: int) -> float:
    """Return how many times as fast a step is on so many ranks, at best: if all its time is divided evenly.

    one_ms: its time on one GPU. count, reduce_us: of sums over ranks, one after the other.
    """
    return one_ms / (one_ms / ranks + 1e-3 * count * reduce_us)


def break_even_us(one_ms: float, count: int, ranks: int) -> float:
    """The time of one reduce from which a step is no faster on so many ranks than on one GPU."""
    return 1e3 * (one_ms - one_ms / ranks) / count


def timeline(stage_ms: Sequence[float], batches: int, steps: int) -> list[list[list[float]]]:
    """Return when each stage of a pipeline begins each batch of each step: begin[step][batch][stage].  Lesson 14."""
    free = [0.0] * len(stage_ms)  # when a stage has done all before
    known = [0.0] * batches  # when a batch's last tokens are known
    begin: list[list[list[float]]] = []
    for _ in range(steps):
        begin.append([])
        for batch in range(batches):
            ready, row = known[batch], []
            for stage, ms in enumerate(stage_ms):
                start = max(ready, free[stage])
                ready = free[stage] = start + ms
                row.append(start)
            known[batch] = ready
            begin[-1].append(row)
    return begin


def idle(begin: Sequence[Sequence[Sequence[float]]], stage_ms: Sequence[float]) -> float:
    """The share of all stages' time in which they run nothing, up to the end of the last batch."""
    end = max(start + ms for step in begin for row in step for start, ms in zip(row, stage_ms, strict=True))
    busy = sum(stage_ms) * sum(map(len, begin))
    return 1 - busy / (end * len(stage_ms))


def text(llm: LLM) -> str:
    """The greedy continuation of `PROMPT`."""
    return llm.generate(PROMPT, GREEDY)[0].text
