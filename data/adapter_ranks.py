"""Find the rank that a change of style needs: `python data/adapter_ranks.py --record adapter-ranks`, minutes on a CPU.

Lesson 15 does this once, and shows the record of several seeds, which draw other questions and other factors. The seven
matrices of the last three layers are trained whole, so that tiny-gemma's answers stand between an opening and a
closing. Their change is then cut to each rank by SVD (Eckart and Young 1936), and the loss of held-out answers is
measured:

    W + U[:, :r] diag(s[:r]) V[:r],    U diag(s) V = W_trained - W

For comparison, factors (LoRA, Hu et al. 2021) of some ranks are trained on the same conversations.
"""

import argparse
import json
import random
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from transformers import GemmaForCausalLM

from minillm import LLM
from minillm.bench import records
from minillm.course.lesson_15 import adapting
from minillm.course.lesson_15.style import Pair, Style, batch
from minillm.model.loader import EMBEDDED

RANKS, TRAINED_RANKS = (0, 1, 2, 4, 8, 16, 32, 64, 256), (1, 2, 4, 8, 16)
LAYERS = (3, 4, 5)
OPENING, CLOSING = "Hear ye!", "So says the crier."
WHOLE_RATE, RATE = 1e-3, 1e-2
WARMUP = 5  # steps


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--record", metavar="NAME", help="write the measurements into data/results")
    return parser.parse_args(words)


class Adapted(torch.nn.Module):
    """A linear layer to which the product of two factors is added; `up` begins as 0."""

    def __init__(self, layer: torch.nn.Linear, rank: int):
        super().__init__()
        out, inputs = layer.weight.shape
        self.layer = layer
        self.down = torch.nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = torch.nn.Parameter(torch.zeros(out, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + linear(linear(x, self.down), self.up)


def untrained() -> tuple[GemmaForCausalLM, dict[str, torch.nn.Linear]]:
    """The model, none of whose parameters is trained, and the projections of its last layers by name."""
    model = GemmaForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).requires_grad_(False)
    ends = tuple(f"layers.{layer}." for layer in LAYERS)
    return model, {
        name: each
        for name, each in model.named_modules()
        if name.endswith("_proj") and any(end in name for end in ends)
    }


def loss(model: torch.nn.Module, pairs: Sequence[Pair]) -> Tensor:
    """The mean of -log p of the answers' tokens."""
    ids, labels = batch(pairs)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def train(model: torch.nn.Module, trained: list, style: Style, rate: float, steps: int, seed: int) -> None:
    """As in lesson 15."""
    optimizer, draws = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0), random.Random(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / WARMUP) * (1 - step / steps)
        loss(model, draws.sample(style.pairs, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(style: Style, steps: int, seed: int) -> list[dict]:
    """A row for each rank to which the change of whole matrices is cut."""
    model, layers = untrained()
    before = {name: each.weight.clone() for name, each in layers.items()}
    train(model, [each.weight.requires_grad_() for each in layers.values()], style, WHOLE_RATE, steps, seed)
    model.requires_grad_(False)
    changes = {name: each.weight - before[name] for name, each in layers.items()}
    rows = []
    for rank in RANKS:
        products = {}
        for name, each in layers.items():
            down, up = adapting.low_rank(changes[name], rank)
            products[name] = up @ down
            each.weight.copy_(before[name] + products[name])
        share = adapting.kept(list(changes.values()), list(products.values()))
        measured = loss(model, style.held_out).item()
        rows.append({"seed": seed, "kind": "cut", "rank": rank, "kept": round(share, 4), "loss": round(measured, 4)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def at_rank(style: Style, rank: int, steps: int, seed: int) -> dict:
    """A row for factors that were trained at this rank."""
    model, layers = untrained()
    torch.manual_seed(seed)
    adapted = []
    for name, each in layers.items():
        parent, _, last = name.rpartition(".")
        adapted.append(Adapted(each, rank))
        setattr(model.get_submodule(parent), last, adapted[-1])
    train(model, [factor for each in adapted for factor in (each.down, each.up)], style, RATE, steps, seed)
    with torch.no_grad():
        row = {"seed": seed, "kind": "trained", "rank": rank, "loss": round(loss(model, style.held_out).item(), 4)}
    print(json.dumps(row), flush=True)
    return row


def main(words: list[str] | None = None) -> None:
    options = parse(words)
    begun = records.begin(options.record)
    found = []
    with LLM(device="cpu", dtype="float32") as llm:
        for seed in range(options.seeds):
            style = Style(llm, OPENING, CLOSING, seed)
            found += whole(style, options.steps, seed)
            found += [at_rank(style, rank, options.steps, seed) for rank in TRAINED_RANKS]
    if options.record:
        records.write(records.record(found, begun, model="tiny-gemma"), options.record)


if __name__ == "__main__":
    main()
