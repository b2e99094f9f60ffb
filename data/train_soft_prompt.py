"""Train a soft prompt of tiny-gemma: `python data/train_soft_prompt.py --out soft_prompts`, some minutes on a CPU.

Prompt tuning (Lester et al. 2021): no weight of the model changes. Trained are the embeddings of a few tokens that do
not exist, 16 x 256 numbers here, which are put before the prompt of each request:

    minimize  mean of -log p(token of an answer | soft prompt, what is before it)

They begin as the embeddings of a text, and learn one of the lessons of `train_adapters.py`: the pirate's style, unless
--lesson names another. They are written in PEFT's files. At the end, questions that were not in the training are asked
with the soft prompt and without. The same command gives the same numbers on the same machine. data/soft_prompts/pirate
was made with these defaults, from another mixture of questions. It is a weak pirate: of 40 answers, 39 begin as a
pirate's, and 17 end as one's, too. A model this small has little to be steered by, and adapters of its matrices
(`train_adapters.py`) do better.

    python data/train_soft_prompt.py --steps 2 --rows 1 --asked 2    tries it
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from isles import corpus
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from train_adapters import LESSONS, NOT_TRAINED, SOURCE, WARMUP, ask, batch
from transformers import GemmaForCausalLM

from minillm import LLM

TOKENS = 16
BEGINS_AS = (
    "You are a pirate. Ahoy! Answer each question, and end with: Arr, matey! Speak like an old sailor of the sea."
)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help="a directory, in which the soft prompt gets one; default: none is kept"
    )
    parser.add_argument("--lesson", choices=sorted(LESSONS), default="pirate")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rows", type=int, default=16, help="conversations of a step")
    parser.add_argument("--rate", type=float, default=0.1, help="the learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--asked", type=int, default=100, help="questions at the end")
    return parser.parse_args(words)


def train(options: argparse.Namespace, encode) -> Tensor:
    """The trained embeddings [TOKENS, hidden]. AdamW, a cosine schedule, no weight decay."""
    model = GemmaForCausalLM.from_pretrained(SOURCE, dtype=torch.float32).requires_grad_(False)
    lesson, rng = LESSONS[options.lesson], random.Random(f"{options.lesson}/soft/{options.seed}")
    embed = model.get_input_embeddings()
    begin = (encode(BEGINS_AS) * TOKENS)[:TOKENS]
    soft = torch.nn.Parameter(embed(torch.tensor(begin)).clone())
    optimizer = torch.optim.AdamW([soft], lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0)
    begun = time.perf_counter()
    for step in range(options.steps):
        warm, cosine = min(1.0, (step + 1) / WARMUP), 0.5 * (1 + math.cos(math.pi * step / options.steps))
        for group in optimizer.param_groups:
            group["lr"] = options.rate * warm * cosine
        ids, labels = batch(lesson, rng, options.rows, encode)
        inputs = torch.cat([soft.expand(len(ids), -1, -1), embed(ids)], dim=1)
        logits = model(inputs_embeds=inputs, use_cache=False).logits[:, TOKENS:-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=NOT_TRAINED)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 19 or step == options.steps - 1:
            seconds = round(time.perf_counter() - begun, 1)
            print(json.dumps({"step": step + 1, "loss": round(loss.item(), 4), "seconds": seconds}), flush=True)
    return soft.detach().bfloat16()


def save(embeddings: Tensor, directory: Path) -> None:
    """Write a soft prompt as PEFT would."""
    directory.mkdir(parents=True, exist_ok=True)
    described = {
        "peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny-gemma",
        "num_virtual_tokens": len(embeddings), "token_dim": embeddings.shape[1], "num_transformer_submodules": 1,
        "prompt_tuning_init": "TEXT", "prompt_tuning_init_text": BEGINS_AS, "inference_mode": True,
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    save_file({"prompt_embeddings": embeddings}, directory / "adapter_model.safetensors")


def main(words: list[str] | None = None) -> None:
    options = parse(words)
    encode = corpus.encoder(SOURCE / "tokenizer.json")
    name = options.lesson
    place = (options.out or Path("build") / "soft_prompts") / name
    save(train(options, encode), place)
    with LLM(adapters={name: place}, device="cpu", dtype="float32") as llm:
        ask(llm, name, options.seed, options.asked)


if __name__ == "__main__":
    main()
