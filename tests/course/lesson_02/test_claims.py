"""What lesson 02 says about tiny-gemma, its cache and other models is what its cells print, or what the model does."""

import torch

from minillm import LLM, SamplingParams, using
from minillm.course.shared import adapters
from minillm.ops import reference
from tests.course.lesson import solved

lesson = solved("02")
PROMPT = "Fenwick lies on the island of"
ONE = SamplingParams(max_tokens=1, temperature=0)


class Attention:
    """Causal attention of one request in another dtype, which keeps the weights of the newest token, layer by layer."""

    def __init__(self, dtype: torch.dtype):
        self.dtype, self.weights = dtype, []

    def __call__(self, q, k, v, length, *, scale):
        group = q.shape[1] // k.shape[1]
        k, v = (each[:length].to(self.dtype).repeat_interleave(group, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.to(self.dtype), k) * scale
        hidden = torch.arange(length) > torch.arange(length - len(q), length)[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        self.weights.append(weights[:, -1])
        return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def logits(llm: LLM, attention: Attention) -> torch.Tensor:
    found = []

    def lm_head(*given):
        found.append(reference.lm_head(*given))
        return found[-1]

    with using(lm_head=lm_head, **adapters.gathered(attention)):
        llm.generate(PROMPT, ONE)
    return found[-1]


def test_where_the_heads_look_and_what_float32_changes():
    lesson.says(
        "its logits are off by less than 1e-5",
        "Three heads look at pieces of the town's name, and head 1 at ` island`",
        "Head 0 gives nearly all weight to 'wick', heads 2 and 3 most of it to 'en', and head 1 nearly all to '",
    )
    with LLM(device="cpu", dtype="float64", enable_prefix_caching=False, num_blocks=16) as llm:
        tokens = [llm.tokenizer.decode([token]) for token in llm.tokenizer.encode(PROMPT)]
        exact, narrow = Attention(torch.float64), Attention(torch.float32)
        off = (logits(llm, exact) - logits(llm, narrow)).abs().max()
    assert 1e-7 < off < 1e-5
    weights, most = exact.weights[2].max(dim=1)
    assert [tokens[place] for place in most] == ["wick", " island", "en", "en"]
    assert weights[:2].min() > 0.9 and weights[2:].min() > 0.7


def test_the_island_comes_after_layer_2_and_depends_on_the_name_only_there():
    lesson.says(
        "After layer 2 the island is there.",
        "Only in layer 2 does the answer depend on it.",
        "Hiding it in layer 0 only makes the model less sure; in the other layers, little changes.",
    )
    after = [lesson.number(rf"^layer {layer}   ' (?:of|Bramble)' +([\d.]+)$") for layer in range(6)]
    assert max(after[:2]) < 0.001 < 0.1 < min(after[2:])
    hidden = [lesson.number(rf"^layer {layer}    ' (?:Bramble|Pewter)' +([\d.]+)$") for layer in range(6)]
    assert hidden[2] < 0.1 < hidden[0] < after[5] - 0.1
    assert min(hidden[layer] for layer in (1, 3, 4, 5)) > after[5] - 0.02


def test_how_much_cache_models_need():
    lesson.says(
        "Llama 2 7B is smaller than Llama 3.1 8B, and needs four times as much cache per token.",
        "Gemma 2B 18 instead of 147, Llama 3.1 8B 131 instead of 524, Llama 2 7B 524 either way, Llama 3.1 70B 328 "
        "instead of 2,621.",
    )
    shown = {}
    for name in ("Gemma 2B", "Llama 3.1 8B", "Llama 2 7B", "Llama 3.1 70B"):
        size, heads, kv_heads, nbytes = lesson.numbers(rf"^{name} +([\d.]+) B +(\d+) / (\d+) +([\d,]+) ")
        shown[name] = (size, round(nbytes / 1000), round(nbytes * heads / kv_heads / 1000))
    assert [each[1:] for each in shown.values()] == [(18, 147), (131, 524), (524, 524), (328, 2621)]
    assert shown["Llama 2 7B"][0] < shown["Llama 3.1 8B"][0] and shown["Llama 2 7B"][1] == 4 * shown["Llama 3.1 8B"][1]


def test_more_memory_holds_more_than_proportionally_more_requests():
    lesson.says("The number of requests grows more than the memory", "Llama 3.1 70B fits neither GPU.")
    memory = lesson.number(r"^and the memory: ([\d.]+) times as much$")
    names = ("Gemma 2B", "Llama 3.1 8B", "Llama 2 7B")
    assert min(lesson.number(rf"^{each} .* requests, ([\d.]+) times as many$") for each in names) > memory


def test_no_batch_of_long_contexts_comes_near_the_ridge():
    lesson.says("At 8,192 tokens of context, no batch that fits the GPU comes near the ridge.")
    ridge = lesson.number(r"^its ridge is at (\d+) operations per byte$")
    at = {each: lesson.number(rf"^ *{each} tokens of context: .* ([\d.]+) operations") for each in ("8,192", "1,024")}
    assert at["8,192"] < ridge / 3 and at["1,024"] > ridge


def test_operations_shrink_more_than_time():
    lesson.says("The time shrinks far less than the operations")
    operations, time = lesson.numbers(r"^with a cache: operations 1/(\d+), time 1/(\d+)$")
    assert operations > 5 * time
