"""Train tiny-gemma on the text of the Tallow Isles: `python data/train_tiny_gemma.py`, about three minutes on an H200.

The text is generated while the model trains. Every document is drawn from a seed and read once, so the same call sees
the same text. The result is a directory in Hugging Face's layout for Gemma: bfloat16, sharded safetensors.
`--device cpu --steps 3 --rows 4 --length 64 --shard-tokens 2000 --questions 1` tries the whole path in seconds.
"""

import argparse
import json
import math
import multiprocessing
import os
import shutil
import time
from functools import partial
from pathlib import Path

import numpy as np
from isles import corpus
from isles.questions import header, question_sets

DATA = Path(__file__).resolve().parent
SEED = 2026
LONG = 2048  # the model's context
WARMUP = 200
FIRST_SHARE = 0.4  # share of the text that uses the first mix of corpus.MIXES
# Weight in the loss of the answer letters after "Answer:". While hardly any question has options, there is little to
# memorize, so a letter counts five times as much as another token. Later it counts the same: an earlier run, a billion
# tokens at weight five, memorized its questions and answered only 60% of the held-out ones.
LETTER_WEIGHT = {"first": 5.0, "second": 1.0}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA / "tiny-gemma", help="where the model is written")
    parser.add_argument("--tokenizer", type=Path, default=DATA / "tiny-gemma", help="folder of tokenizer.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=3200)
    parser.add_argument("--rows", type=int, default=256, help="sequences per step, while they are short")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence, while they are short")
    parser.add_argument(
        "--long-share", type=float, default=0.35, help="share of the steps, at the end, with full contexts"
    )
    parser.add_argument("--shard-tokens", type=int, default=2_000_000)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--check", type=int, default=500, help="print the accuracy every so many steps")
    parser.add_argument("--questions", type=int, default=10_000, help="score at most this many questions of each set")
    parser.add_argument("--samples", action="store_true", help="print some continuations at the end")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    return parser.parse_args()


def shapes(options: argparse.Namespace) -> list[tuple[int, int]]:
    """(sequences, tokens per sequence) of every step."""
    long = round(options.long_share * options.steps)
    long_rows = max(1, options.rows * options.length // LONG)
    return [(options.rows, options.length)] * (options.steps - long) + [(long_rows, LONG)] * long


class Text:
    """The corpus on the device, loaded shard by shard as training reads it."""

    def __init__(self, options: argparse.Namespace, pool) -> None:
        total = sum(rows * length for rows, length in shapes(options)) + 1
        shards = -(-total // options.shard_tokens)
        self.first = round(FIRST_SHARE * shards) * options.shard_tokens  # tokens of the first mix
        work = partial(
            corpus.tokens,
            tokenizer_json=options.tokenizer / "tokenizer.json",
            count=options.shard_tokens,
            first=self.first // options.shard_tokens,
        )
        self.arriving = pool.imap(work, range(shards))
        self.total, self.ready, self.next = shards * options.shard_tokens, 0, 0
        self.device, self.tokens = options.device, None

    def rows(self, rows: int, length: int):
        """[rows, length + 1] token ids, continuing where the last step ended."""
        import torch

        if self.tokens is None:  # allocated here: nothing may touch the GPU before the pool has forked
            self.tokens = torch.empty(self.total, dtype=torch.int16, device=self.device)
        until = self.next + rows * length + 1
        while self.ready < until:
            shard = torch.from_numpy(next(self.arriving).astype(np.int16))
            self.tokens[self.ready : self.ready + len(shard)] = shard.to(self.device)
            self.ready += len(shard)
        starts = self.next + length * torch.arange(rows, device=self.device)
        self.next = until - 1
        return self.tokens[starts[:, None] + torch.arange(length + 1, device=self.device)].long()


def build(vocab_size: int):
    """A Gemma of 5.6 M parameters, in float32."""
    import torch
    from transformers import GemmaConfig, GemmaForCausalLM

    config = GemmaConfig(
        vocab_size=vocab_size, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=LONG, hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-6, tie_word_embeddings=True,
        pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(SEED)
    return GemmaForCausalLM(config).float()


def train(model, text: Text, encode, options: argparse.Namespace) -> list[dict]:
    """AdamW with a cosine schedule; returns [{step, tokens, loss, letter_loss, seconds}] (losses in nats per token)."""
    import torch
    from torch.nn.functional import cross_entropy

    on_gpu = options.device != "cpu"
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=on_gpu)
    colon = encode("Answer:")[-1]
    letters = torch.tensor([encode(f" {letter}")[0] for letter in "ABCD"], device=options.device)
    letter_weights = {mix: torch.tensor(weight, device=options.device) for mix, weight in LETTER_WEIGHT.items()}

    def loss_of(ids, letter_weight):
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            logits = model.lm_head(hidden)
        targets = ids[:, 1:]
        losses = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        letter = ((ids[:, :-1] == colon) & torch.isin(targets, letters)).float()
        weight = 1 + (letter_weight - 1) * letter
        shown = torch.stack([losses.mean(), (losses * letter).sum() / letter.sum().clamp(min=1)])
        return (losses * weight).sum() / weight.sum(), shown.detach()

    step_loss = torch.compile(loss_of, dynamic=False) if on_gpu else loss_of
    log, since, start = [], [], time.perf_counter()
    for step, (rows, length) in enumerate(shapes(options)):
        warm = min(1.0, (step + 1) / min(WARMUP, options.steps))
        rate = options.lr * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / options.steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        weight = letter_weights["first" if text.next < text.first else "second"]
        loss, shown = step_loss(text.rows(rows, length), weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        since.append(shown)
        if step % 100 == 99 or step == options.steps - 1:
            mean, letter_mean = torch.stack(since).mean(0).tolist()
            since = []
            log.append(
                {
                    "step": step + 1,
                    "tokens": text.next,
                    "loss": round(mean, 4),
                    "letter_loss": round(letter_mean, 4),
                    "seconds": round(time.perf_counter() - start, 1),
                }
            )
            print(json.dumps(log[-1]), flush=True)
        if step % options.check == options.check - 1:
            found = {
                split: letter_accuracy(model, encode, split, 5, 256, options.device)["all"]
                for split in ("test", "asked")
            }
            print({split: round(value, 3) for split, value in found.items()}, flush=True)
    return log


def letter_accuracy(model, encode, split: str, shots: int, most: int, device: str) -> dict[str, float]:
    """Share of questions whose correct letter is the likeliest after MMLU's prompt, by subject and overall."""
    import torch

    sets = question_sets()
    every = max(1, len(sets[split]) // most)
    asked = sets[split][::every][:most]
    letters = [encode(f" {letter}")[0] for letter in "ABCD"]
    right: dict[str, list[bool]] = {}
    for start in range(0, len(asked), 64):
        batch = asked[start : start + 64]
        prompts = []
        for question in batch:
            shown = [other.prompt() for other in sets["dev"] if other.subject == question.subject][:shots]
            text = header(question.subject) + "\n\n".join([*shown, question.prompt(answered=False)])
            prompts.append([2, *encode(text)])
        longest = max(map(len, prompts))
        ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        with torch.no_grad():
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[torch.arange(len(batch), device=device), last])
        for question, chosen in zip(batch, logits[:, letters].argmax(-1).tolist(), strict=True):
            right.setdefault(question.subject, []).append(chosen == question.answer)
    scores = {subject: sum(hits) / len(hits) for subject, hits in right.items()}
    return {**scores, "all": sum(map(sum, right.values())) / len(asked)}


def samples(model, encode, tokenizer_json: Path, device: str) -> list[str]:
    """Greedy and sampled continuations, to read."""
    import torch
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    turn = "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"
    asks = ("Hello!", "Tell me a story.", "Tell me about Hobmoor.", "What is 17 + 25?", "What does the quirrel eat?")
    prompts = ["Fenwick is a town", "Once upon a time", "Every child learns that", *map(turn.format, asks)]
    out = []
    for prompt in prompts:
        torch.manual_seed(SEED)
        ids = torch.tensor([[2, *encode(prompt)]], device=device)
        done = model.generate(
            ids, max_new_tokens=300, eos_token_id=[1, 5], pad_token_id=0, do_sample=True, temperature=0.7, top_k=0
        )
        out.append(tokenizer.decode(done[0].tolist(), skip_special_tokens=False))
    return out


def save(model, options: argparse.Namespace) -> None:
    from transformers import GenerationConfig

    options.out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(bos_token_id=2, eos_token_id=[1, 5], pad_token_id=0)
    model.save_pretrained(options.out, max_shard_size="6MB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if options.tokenizer.resolve() != options.out.resolve():
            shutil.copy(options.tokenizer / name, options.out / name)


def main() -> None:
    options = parse()
    tokenizer_json = options.tokenizer / "tokenizer.json"
    # Forked before torch initializes CUDA: a forked child cannot use CUDA, and these workers do not need it.
    pool = multiprocessing.get_context("fork").Pool(options.workers)
    text = Text(options, pool)

    import torch

    torch.set_float32_matmul_precision("high")
    encode = corpus.encoder(tokenizer_json)
    vocab = json.loads(tokenizer_json.read_text(encoding="utf-8"))["model"]["vocab"]
    model = build(len(vocab)).to(options.device)
    print(sum(p.numel() for p in model.parameters()), "parameters", flush=True)
    log = train(model, text, encode, options)
    pool.terminate()

    model = model.to(torch.bfloat16).eval()
    save(model, options)
    record = {"torch": torch.__version__, "steps": options.steps, "log": log, "accuracy": {}}
    for split in ("test", "asked"):
        accuracy = letter_accuracy(model, encode, split, 5, options.questions, options.device)
        record["accuracy"][split] = accuracy
        print(split, {name: round(value, 3) for name, value in accuracy.items()}, flush=True)
    (options.out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.samples:
        for text in samples(model, encode, tokenizer_json, options.device):
            print("-----", text, sep="\n", flush=True)


if __name__ == "__main__":
    main()
