"""Make a small model out of a large one, to draft for it: `python data/prune_and_distill.py --out draft`.

Minitron's recipe (Muralidharan et al. 2024, "Compact Language Models via Pruning and Knowledge Distillation"). A few
sequences show which parts of the model do most: hidden channels by the size of what the norms give them, neurons and
heads by the size of their outputs, layers by how far they turn the residual stream. The rest is left out, in width and
in depth. What is left learns to predict what the whole model predicts:

    loss = KL(p || q) = mean over positions of sum_token p(token) log(p(token) / q(token)),   p: whole, q: pruned

No labels are needed. The most frequent tokens of the training text become the draft's head (draft_head.json), and
`LLM(speculate="draft")` runs it. The table shows what pruning and distillation do to perplexity and KL, and how many
tokens a step of the whole model yields with drafts of each.

    python data/prune_and_distill.py                                                       tiny-gemma, on generated text
    python data/prune_and_distill.py --model DIRECTORY --text FILE --layers 8 --hidden 576 --intermediate 1536 --heads 9
                                                                                           SmolLM2-135M, in depth alone
    python data/prune_and_distill.py --model smollm2-135m --own-text 4000000 --rows 32 ... from what the model writes
    python data/prune_and_distill.py --steps 2 --rows 1 --length 32 --tokens 200           tries it
"""

import argparse
import copy
import itertools
import json
import math
import random
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from isles import corpus
from torch import Tensor
from torch.nn.functional import cosine_similarity, kl_div
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from minillm import LLM, SamplingParams
from minillm.bench import records
from minillm.evaluate import load_text
from minillm.evaluate.compare import Reference
from minillm.model import load_model
from minillm.model.loader import EMBEDDED, resolve
from minillm.model.saver import check_free
from minillm.runner.draft_model import HEAD_FILE, frequent_tokens
from minillm.speculation import every_draft_runs
from minillm.tokenizer import Tokenizer

SHARD = "draft"
CALIBRATION = 4  # steps of text that show what matters
WARMUP = 20  # steps
DRAFTS = 4
MESSAGE = "MESSAGE"  # stands where a chat's first message does
STORIES = ["Once upon a time", "One morning", "There was a little", "A long time ago", "The sailor", "In the town of"]


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED, help="the whole model, or its directory")
    parser.add_argument("--text", type=Path, help="what to train on; default: generated text of tiny-gemma's world")
    parser.add_argument("--own-text", type=int, default=0, help="train on so many tokens that the model itself writes")
    parser.add_argument("--held-out", type=Path, help="what to measure on; default: tiny-gemma's held-out text")
    parser.add_argument("--out", type=Path, help="a new directory for the draft; default: it is not kept")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-tokens", type=int, default=1024, help="tokens that the draft's head keeps")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=4, help="sequences of a step")
    parser.add_argument("--length", type=int, default=256, help="tokens of each")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--tokens", type=int, default=8000, help="measure on so many tokens of the held-out text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--record", metavar="NAME", help="write the measurements into data/results")
    return parser.parse_args(words)


def text(options: argparse.Namespace) -> Iterator[Tensor]:
    """Batches [rows, length] of token ids: documents between the tokenizer's first token and the end, end to end."""
    documents: Iterator[list[int]]
    if options.own_text:
        documents = itertools.cycle(written(options.model, options.own_text, options.length, options.device))
    elif options.text is None:
        encode, shard = corpus.encoder(EMBEDDED / "tokenizer.json"), corpus.documents(SHARD)
        documents = ([2, *encode(document), 1] for _, document in shard)
    else:
        tokenizer = Tokenizer.from_pretrained(options.model)
        documents = itertools.repeat(tokenizer.encode(options.text.read_text(encoding="utf-8")))
    ids: list[int] = []
    size = options.rows * options.length
    while True:
        while len(ids) < size:
            ids += next(documents)
        yield torch.tensor(ids[:size], device=options.device).view(options.rows, options.length)
        ids = ids[size:]


@cache
def written(model: Path, tokens: int, length: int, device: str) -> list[list[int]]:
    """So many tokens that a model writes at temperatures of 1 and 0.7, in turns, in documents of `length`.

    Half of them begin as a chat does before its first message, so the model writes both sides of it; the others with
    any token at all. To learn from a model's own outputs: Kim and Rush 2016, "Sequence-Level Knowledge Distillation",
    section 3.2.
    """
    rng, count = random.Random(0), -(-tokens // length)
    with LLM(model, device=device, max_model_len=length, max_num_seqs=512 if device == "cuda" else 8) as llm:
        tokenizer, vocabulary = llm.tokenizer, llm.model_config.vocab_size
        chat = tokenizer.apply_chat_template([{"role": "user", "content": MESSAGE}]).partition(MESSAGE)[0]
        opening = tokenizer.encode(chat, add_special_tokens=False)
        starts = [[*tokenizer.prefix, rng.randrange(vocabulary)] if i % 2 else opening for i in range(count)]
        params = [
            SamplingParams(max_tokens=length - len(start), seed=i, temperature=(1, 0.7)[i // 2 % 2], ignore_eos=True)
            for i, start in enumerate(starts)
        ]
        return [
            [*start, *done.outputs[0].token_ids]
            for start, done in zip(starts, llm.generate(starts, params), strict=True)
        ]


# ---- pruning


@torch.no_grad()
def importance(model: PreTrainedModel, batches: list[Tensor]) -> dict[str, Tensor]:
    """How much parts of a model do: "hidden" [hidden], "layers" [layers], "heads" [layers, heads] and
    "neurons" [layers, intermediate].

    The means over tokens of |activation|: of norms, of a head's output, and of a neuron; of a layer, 1 - cosine of the
    residual stream before and after it (Men et al. 2024, "ShortGPT").
    """
    found: dict[str, dict[int, Tensor]] = defaultdict(dict)
    hooks = []

    def add(kind: str, index: int, value: Tensor) -> None:
        found[kind][index] = found[kind].get(index, 0) + value.float()

    size = model.config.num_attention_heads
    for index, layer in enumerate(model.model.layers):
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            hooks.append(norm.register_forward_hook(lambda _, __, out: add("hidden", 0, out.abs().mean((0, 1)))))

        def heads(_, inputs, index=index):
            add("heads", index, inputs[0].unflatten(-1, (size, -1)).norm(dim=-1).mean((0, 1)))

        def neurons(_, inputs, index=index):
            add("neurons", index, inputs[0].abs().mean((0, 1)))

        hooks.append(layer.self_attn.o_proj.register_forward_pre_hook(heads))
        hooks.append(layer.mlp.down_proj.register_forward_pre_hook(neurons))
    for rows in batches:
        states = model(input_ids=rows, use_cache=False, output_hidden_states=True).hidden_states
        for index, (before, after) in enumerate(itertools.pairwise(states)):
            add("layers", index, 1 - cosine_similarity(before, after, dim=-1).mean())
    for hook in hooks:
        hook.remove()
    stacked = {kind: torch.stack([each[i] for i in sorted(each)]) for kind, each in found.items()}
    return stacked | {"hidden": stacked["hidden"][0]}


def best(scores: Tensor, count: int) -> Tensor:
    """The indices of the `count` largest scores, in ascending order."""
    return scores.topk(count).indices.sort().values


def pruned(
    model: PreTrainedModel, scores: dict[str, Tensor], layers: int, hidden: int, intermediate: int, heads: int
) -> PreTrainedModel:
    """The model with its most important parts alone. All heads of keys and values stay, and each loses equally many
    heads of queries. The first layer always stays, since it follows the embedding."""
    config = copy.deepcopy(model.config)
    groups, head_dim = config.num_key_value_heads, model.model.layers[0].self_attn.head_dim
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = layers, hidden, intermediate
    config.num_attention_heads, config.head_dim = heads, head_dim
    turns = scores["layers"].clone()
    turns[0] = torch.inf
    kept, channels = best(turns, layers).tolist(), best(scores["hidden"], hidden)
    small = AutoModelForCausalLM.from_config(config).to(torch.float32)
    own, given = dict(small.named_parameters()), model.state_dict()

    def rows_of_heads(index: int) -> Tensor:
        grouped = scores["heads"][index].view(groups, -1)
        each = best(grouped, heads // groups) + torch.arange(groups)[:, None] * grouped.shape[1]
        return (each.view(-1, 1) * head_dim + torch.arange(head_dim)).flatten()

    with torch.no_grad():
        for name, parameter in own.items():
            _, _, tail = name.partition(".layers.")
            place, _, part = tail.partition(".")
            index = kept[int(place)] if tail else 0
            tensor = given[name.replace(f".layers.{place}.", f".layers.{index}.", 1) if tail else name]
            rows, columns = slice(None), channels
            if part.startswith("self_attn.q_proj"):
                rows = rows_of_heads(index)
            elif part.startswith("self_attn.o_proj"):
                rows, columns = channels, rows_of_heads(index)
            elif part.startswith(("mlp.gate_proj", "mlp.up_proj")):
                rows = best(scores["neurons"][index], intermediate)
            elif part.startswith("mlp.down_proj"):
                rows, columns = channels, best(scores["neurons"][index], intermediate)
            if tensor.dim() == 1:
                parameter.copy_(tensor[channels if name.endswith("norm.weight") else rows])
            else:
                parameter.copy_(tensor[rows][:, columns])
    return small


# ---- distillation


def distill(
    teacher: PreTrainedModel, student: PreTrainedModel, batches: Iterator[Tensor], steps: int, rate: float
) -> list[dict]:
    """Train the student to predict what the teacher does. AdamW with a cosine schedule; returns a log.

    The loss is KL(p || q) in nats a token.
    """
    learned = [each for each in student.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    log, begin = [], time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARMUP) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))
        rows = next(batches)
        with torch.autocast("cuda", torch.bfloat16, enabled=rows.is_cuda):
            with torch.inference_mode():
                p = teacher(input_ids=rows, use_cache=False).logits.float().log_softmax(-1)
            q = student(input_ids=rows, use_cache=False).logits.float().log_softmax(-1)
        loss = kl_div(q.flatten(0, 1), p.clone().flatten(0, 1), reduction="batchmean", log_target=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 25 == 24 or step == steps - 1:
            seconds = round(time.perf_counter() - begin, 1)
            log.append({"step": step + 1, "kl": round(loss.item(), 5), "seconds": seconds})
            print(json.dumps(log[-1]), flush=True)
    return log


def save(model: PreTrainedModel, source: Path, out: Path, head: list[int]) -> Path:
    """Save a draft in bfloat16, with the tokenizer of its source and the tokens of its head."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, out)
    (out / HEAD_FILE).write_text(json.dumps(head), encoding="utf-8")
    return out


# ---- measuring


def acceptance_length(model: Path, draft: Path, temperature: float) -> float:
    """Tokens that a step of the model yields for a request if the draft adds DRAFTS tokens to each, on stories."""
    params = SamplingParams(max_tokens=80, temperature=temperature, seed=1, ignore_eos=True)
    with (
        every_draft_runs(),
        LLM(model, speculate=draft, speculate_tokens=DRAFTS, device="cpu", dtype="float32") as llm,
    ):
        llm.generate(STORIES, params)
        stats = llm.stats()
    return 1 + stats["accepted_tokens"] / stats["drafts"]


class Measured:
    """What drafts predict, against the whole model, on a held-out text."""

    def __init__(self, options: argparse.Namespace):
        self.model = options.model
        tokenizer = Tokenizer.from_pretrained(options.model)
        held_out = load_text() if options.held_out is None else options.held_out.read_text(encoding="utf-8")
        ids = tokenizer.encode(held_out)[len(tokenizer.prefix) :][: options.tokens]
        whole = load_model(options.model, dtype="float32")
        self.reference, self.results = Reference(whole, ids, tokenizer.prefix), []
        self.row("whole", whole, options.model)

    def row(self, name: str, model, directory: Path, **more: object) -> dict:
        found = self.reference.divergence(model)
        row = {
            "model": name,
            "parameters": model.num_parameters,
            "bytes": sum(file.stat().st_size for file in directory.glob("*.safetensors")),
            "layers": model.config.num_layers,
            "hidden": model.config.hidden_size,
            "perplexity": round(found.perplexity, 4),
            "kl": float(f"{max(0.0, found.kl):.4g}"),
            **more,
        }
        self.results.append(row)
        print(json.dumps({key: value for key, value in row.items() if key != "log"}), flush=True)
        return row

    def add(self, name: str, draft: Path, **more: object) -> dict:
        lengths = {str(each): round(acceptance_length(self.model, draft, each), 3) for each in (0, 0.7)}
        return self.row(name, load_model(draft, dtype="float32"), draft, acceptance_length=lengths, **more)


def main() -> None:
    options = parse()
    options.model = Path(resolve(options.model))
    begun = records.begin(options.record)
    if options.out is not None:
        check_free(options.out)
    teacher = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval().to(options.device)
    batches, measured = text(options), Measured(options)
    shown = [next(batches) for _ in range(CALIBRATION)]
    sizes = {name: getattr(options, name) for name in ("layers", "hidden", "intermediate", "heads")}
    scores = {kind: each.cpu() for kind, each in importance(teacher, shown).items()}
    student = pruned(teacher, scores, **sizes).to(options.device)
    if options.hidden == teacher.config.hidden_size:  # then the embedding's numbers mean to it what they did
        student.get_input_embeddings().requires_grad_(False)
    counted = torch.cat([each.flatten() for each in [*shown, *itertools.islice(text(options), 60)]]).tolist()
    head = frequent_tokens(counted, min(options.head_tokens, teacher.config.vocab_size), teacher.config.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        measured.add("pruned", save(student, options.model, Path(folder) / "pruned", head))
        log = distill(teacher, student, batches, options.steps, options.rate)
        out = options.out or Path(folder) / "distilled"
        more = {"steps": options.steps, "training_tokens": options.steps * options.rows * options.length, "log": log}
        measured.add("pruned and distilled", save(student, options.model, out, head), head_tokens=len(head), **more)
    records.publish(records.record(measured.results, begun, model=options.model.name, drafts=DRAFTS), options.record)


if __name__ == "__main__":
    main()
