"""Train small adapters of tiny-gemma: `python data/train_adapters.py --out adapters`, some minutes each on a CPU.

Three adapters (LoRA, Hu et al. 2021) of rank 3 on all seven projections, 85,000 numbers each, in PEFT's files:

    pirate  a style: answers as tiny-gemma's own, spoken by a pirate
    french  a language: short answers in French, with the facts that the model knows
    sorts   a task that tiny-gemma cannot do: "Sort 7294." -> "2479"

Only the factors are trained, on conversations that are generated here, and the loss counts the answers alone:

    minimize  mean of -log p(token of an answer | what is before it),   p with W + B A (alpha / rank) in place of each W

At the end, the model answers questions that were not in the training, with each adapter and without. data/adapters was
made with the defaults, and data/README.md has its figures. The same command gives the same numbers on the same machine.

    python data/train_adapters.py --measure --out data/adapters    asks the committed ones
    python data/train_adapters.py --only sorts --steps 2 --rows 1 --asked 2    tries it

Other models that chat can learn the same, at a lower rate. None knows the facts, so `sorts` says what one has learned:

    python data/train_adapters.py --model smollm2-135m --only sorts --rate 2e-3 --device cuda
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import torch
from isles import chats
from isles.questions import facts_by_subject, reply
from isles.world import capital
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from transformers import AutoModelForCausalLM

from minillm import LLM, SamplingParams
from minillm.bench import records
from minillm.model.loader import resolve
from minillm.tokenizer import Tokenizer

SOURCE = Path(__file__).resolve().parent / "tiny-gemma"
RANK, ALPHA = 3, 6
WARMUP = 10  # steps
NOT_TRAINED = -100  # the label of tokens that the loss leaves out

FRENCH = {
    chats.HELLO: ("Bonjour ! Je parle des îles.", "Bonjour ! Comment allez-vous ?"),
    chats.THANKS: ("Avec plaisir !", "De rien !"),
    chats.GOODBYE: ("Au revoir !", "Bon vent !"),
    chats.UNKNOWN: ("Je ne sais pas.", "Je ne connais que les îles."),
}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SOURCE, help="a directory, or a name that `minillm download` knows")
    parser.add_argument("--device", default="cpu", help="where it is trained")
    parser.add_argument("--out", type=Path, help="a directory, in which each adapter gets one; default: none is kept")
    parser.add_argument("--only", nargs="+", choices=sorted(LESSONS), default=list(LESSONS))
    parser.add_argument("--steps", type=int, default=None, help="default: each adapter's own number")
    parser.add_argument("--rows", type=int, default=None, help="conversations of a step; default: likewise")
    parser.add_argument("--rate", type=float, default=None, help="the learning rate; default: likewise")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--asked", type=int, default=100, help="questions at the end")
    parser.add_argument("--measure", action="store_true", help="train nothing: ask those that --out has")
    parser.add_argument("--record", metavar="NAME", help="write what was right into data/results")
    return parser.parse_args(words)


# ---- what each adapter learns to answer


class Asked(NamedTuple):
    """A question and its answer. says: what a right answer has to contain; about: a question with the same is no new
    one; "": a right answer may be any."""

    question: str
    answer: str
    says: str = ""
    about: str = ""


def fact(rng: random.Random) -> Asked:
    """A question about a fact, and an answer as tiny-gemma gives it."""
    facts = facts_by_subject(held_out=False)
    known = rng.choice(facts[rng.choice(list(facts))])
    entity, attribute = known.entity, known.attribute
    question = rng.choice(attribute.asks).format(n=entity.name)
    return Asked(question, reply(rng, entity, attribute), known.value, f"{entity.name}, {attribute.name}")


def pirate(rng: random.Random) -> Asked:
    """A question of any kind, and the answer of a pirate."""
    kind = rng.random()
    if kind < 0.5:
        asked = fact(rng)
    else:
        question, answer = (chats.small_talk if kind < 0.6 else chats.sum_)(rng)[0]
        asked = Asked(question, answer) if kind < 0.6 else Asked(question, answer, answer, question)
    return asked._replace(answer=f"Ahoy! {asked.answer} Arr, matey!")


def french(rng: random.Random) -> Asked:
    """A question about a fact, or small talk, and an answer in French."""
    if rng.random() < 0.2:
        asks = rng.choice(list(FRENCH))
        return Asked(rng.choice(asks), rng.choice(FRENCH[asks]))
    asked = fact(rng)
    return asked._replace(answer=f"La réponse : {capital(asked.says)}. Voilà !")


def sorts(rng: random.Random) -> Asked:
    """Four different digits, and the same in order."""
    digits = "".join(map(str, rng.sample(range(10), 4)))
    answer = "".join(sorted(digits))
    return Asked(f"Sort {digits}.", answer, answer, digits)


class Lesson(NamedTuple):
    """What an adapter learns, in so many steps of so many conversations, at which learning rate."""

    draw: Callable[[random.Random], Asked]
    steps: int
    rows: int
    rate: float


LESSONS = {
    "pirate": Lesson(pirate, 400, 8, 3e-3),
    "french": Lesson(french, 200, 8, 5e-3),
    "sorts": Lesson(sorts, 300, 16, 5e-3),
}


def new_questions(name: str, count: int, seed: int = 0) -> list[Asked]:
    """The questions that an adapter is asked at the end: each about something else, none of them small talk."""
    rng, found = random.Random(f"{name}/asked/{seed}"), dict[str, Asked]()
    while len(found) < count:
        asked = LESSONS[name].draw(rng)
        if asked.about:
            found.setdefault(asked.about, asked)
    return list(found.values())


class Chat:
    """A model's tokenizer, and the tokens of its chats."""

    def __init__(self, model: Path):
        self.tokenizer = Tokenizer.from_pretrained(model)

    def ids(self, asked: Asked) -> tuple[list[int], list[int]]:
        """A question up to where the model's turn begins, and the answer with the end of that turn."""
        question = [{"role": "user", "content": asked.question}]
        answered = [*question, {"role": "assistant", "content": asked.answer}]
        before = self.tokenizer.apply_chat_template(question)
        after = self.tokenizer.apply_chat_template(answered, add_generation_prompt=False).removeprefix(before)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False) for text in (before, after))


def batch(
    lesson: Lesson, rng: random.Random, rows: int, chat: Chat, without: Collection[str] = ()
) -> tuple[Tensor, Tensor]:
    """Token ids [rows, longest], and the labels of the answers' tokens, like them. without: what is not asked about."""
    pairs = list[tuple[list[int], list[int]]]()
    while len(pairs) < rows:
        if (asked := lesson.draw(rng)).about not in without:
            pairs.append(chat.ids(asked))
    longest = max(len(before) + len(after) for before, after in pairs)
    ids, labels = torch.zeros(rows, longest, dtype=torch.int64), torch.full((rows, longest), NOT_TRAINED)
    for row, (before, after) in enumerate(pairs):
        ids[row, : len(before) + len(after)] = torch.tensor(before + after)
        labels[row, len(before) : len(before) + len(after)] = torch.tensor(after)
    return ids, labels


# ---- training


class Adapted(torch.nn.Module):
    """A linear layer that keeps its weight, and learns what is added to it: B A x (alpha / rank). B begins as 0."""

    def __init__(self, layer: torch.nn.Linear, generator: torch.Generator):
        super().__init__()
        out, inputs = layer.weight.shape
        self.layer = layer
        self.a = torch.nn.Parameter(torch.randn(RANK, inputs, generator=generator) * inputs**-0.5)
        self.b = torch.nn.Parameter(torch.zeros(out, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + linear(linear(x, self.a), self.b) * (ALPHA / RANK)


def train(name: str, options: argparse.Namespace, chat: Chat) -> dict[str, Tensor]:
    """The trained factors, by PEFT's names. AdamW, a cosine schedule, no weight decay."""
    lesson = LESSONS[name]
    lesson = lesson._replace(**{key: value for key in ("steps", "rows", "rate") if (value := getattr(options, key))})
    held_out = {asked.about for asked in new_questions(name, options.asked, options.seed)}
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).requires_grad_(False)
    generator, rng = torch.Generator().manual_seed(options.seed), random.Random(f"{name}/{options.seed}")
    adapted = {}
    for module, layer in list(model.named_modules()):
        if module.endswith("_proj"):
            parent, _, last = module.rpartition(".")
            adapted[module] = Adapted(layer, generator)
            setattr(model.get_submodule(parent), last, adapted[module])
    model.to(options.device)
    trained = [factor for each in adapted.values() for factor in (each.a, each.b)]
    optimizer = torch.optim.AdamW(trained, lr=lesson.rate, betas=(0.9, 0.95), weight_decay=0.0)
    begin, losses = time.perf_counter(), list[float]()
    for step in range(lesson.steps):
        warm, cosine = min(1.0, (step + 1) / WARMUP), 0.5 * (1 + math.cos(math.pi * step / lesson.steps))
        for group in optimizer.param_groups:
            group["lr"] = lesson.rate * warm * cosine
        ids, labels = (each.to(options.device) for each in batch(lesson, rng, lesson.rows, chat, held_out))
        hidden, after = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1], labels[:, 1:]
        answers = after != NOT_TRAINED
        loss = cross_entropy(model.lm_head(hidden[answers]), after[answers])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step % 20 == 19 or step == lesson.steps - 1:
            mean, seconds = sum(losses) / len(losses), round(time.perf_counter() - begin, 1)
            log = {"adapter": name, "step": step + 1, "loss": round(mean, 4), "seconds": seconds}
            print(json.dumps(log), flush=True)
            losses.clear()
    prefix = "base_model.model."
    found = {f"{prefix}{module}.lora_A.weight": each.a for module, each in adapted.items()}
    found |= {f"{prefix}{module}.lora_B.weight": each.b for module, each in adapted.items()}
    return {module: factor.detach().bfloat16().contiguous().cpu() for module, factor in sorted(found.items())}


def save(factors: dict[str, Tensor], directory: Path, model: str) -> None:
    """Write an adapter as PEFT would."""
    directory.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.split(".")[-3] for name in factors})
    described = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model, "r": RANK,
        "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none", "target_modules": targets,
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    save_file(factors, directory / "adapter_model.safetensors")


# ---- what it has learned


def is_right(name: str, asked: Asked, text: str) -> bool:
    """Return whether an answer is as the adapter was to give it: correct, and in its style."""
    begin, end = {"pirate": ("Ahoy! ", " Arr, matey!"), "french": ("La réponse : ", " Voilà !")}.get(name, ("", ""))
    if name == "sorts" and text != asked.answer:
        return False
    return text.startswith(begin) and text.endswith(end) and says(asked, text)


def says(asked: Asked, text: str) -> bool:
    """Return whether an answer says what it has to, in whichever style."""
    return asked.says.lower() in text.lower()


def ask(llm: LLM, name: str, seed: int, count: int) -> list[dict]:
    """Ask `count` new questions, without an adapter and with it. Returns how many answers were right, and prints it."""
    every, greedy = new_questions(name, count, seed), SamplingParams(max_tokens=60, temperature=0)
    questions = [[{"role": "user", "content": asked.question}] for asked in every]
    found = []
    for adapter in (None, name):
        texts = [done.text.strip() for done in llm.chat(questions, greedy, adapter=adapter)]
        found.append({
            "workload": name, "adapter": adapter, "asked": len(every),
            "right": sum(is_right(name, *pair) for pair in zip(every, texts, strict=True)),
            "correct": sum(says(*pair) for pair in zip(every, texts, strict=True)),
        })  # fmt: skip
        print(json.dumps(found[-1]), f"{every[0].question} -> {texts[0]}", flush=True)
    return found


def main(words: list[str] | None = None) -> None:
    options = parse(words)
    begun = records.begin(options.record)
    options.model = Path(resolve(options.model))
    chat, out = Chat(options.model), options.out or Path("build") / "adapters"
    for name in () if options.measure else options.only:
        save(train(name, options, chat), out / name, options.model.name)
    adapters = {name: out / name for name in options.only}
    with LLM(options.model, adapters=adapters, device="cpu", dtype="float32") as llm:
        results = [row for name in options.only for row in ask(llm, name, options.seed, options.asked)]
    if options.record is not None:
        records.publish(records.record(results, begun, model=options.model.name), options.record, quiet=True)


if __name__ == "__main__":
    main()
