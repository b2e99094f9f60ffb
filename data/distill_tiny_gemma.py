"""Train tiny-gemma for its own rounding: `python data/distill_tiny_gemma.py --out tiny-gemma-int4`, minutes on a CPU.

Quantization-aware training by distillation. A copy of the model computes with weights rounded to 4 bits in groups of
128 (see `minillm.quantization.methods.straight_through`) and learns to predict what the float model predicts:

    loss = KL(p || q) = mean over positions of sum_token p(token) log(p(token) / q(token)),   p: float, q: rounded

The text is generated from a shard that neither training nor `minillm eval` reads, and no labels are needed. Embedding
and norms stay as they are. `--out` keeps the int4 model: `minillm generate --model tiny-gemma-int4` runs it. Then the
same with 3 bits, for which the engine has no format: that model is simulated, with dense weights of eight values a
group. The same command gives the same weights on the same machine.

    python data/distill_tiny_gemma.py --steps 2 --rows 1 --length 32 --tokens 200 --questions 20    tries it
"""

import argparse
import json
import math
import shutil
import tempfile
import time
from pathlib import Path

import torch
from isles import corpus
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import kl_div
from torch.nn.utils import parametrize
from transformers import GemmaForCausalLM

from minillm import LLM
from minillm.bench import records
from minillm.calibration.methods import Method, MethodRecipe
from minillm.calibration.quantize import quantize
from minillm.evaluate import load_text
from minillm.evaluate.accuracy import answers
from minillm.evaluate.compare import Reference, paired_loss
from minillm.evaluate.tasks import held_out
from minillm.model import load_model
from minillm.model.modules import modules
from minillm.model.saver import check_free, save_model
from minillm.quantization.methods.straight_through import fake_quantize
from minillm.tokenizer import Tokenizer

SOURCE = Path(__file__).resolve().parent / "tiny-gemma"
SHARD = "distillation"
EOS, BOS = 1, 2
GROUP = 128
WARMUP = 10  # steps
RATES = {4: 5e-5, 3: 2e-4}  # learning rates, by bits: the more is lost, the further weights have to move


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a new directory for the int4 model; default: it is not kept")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3], choices=sorted(RATES))
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--rows", type=int, default=8, help="sequences of a step")
    parser.add_argument("--length", type=int, default=256, help="tokens of each")
    parser.add_argument("--seed", type=int, default=0, help="chooses the text")
    parser.add_argument("--tokens", type=int, help="measure on so many tokens of the held-out text; default: on all")
    parser.add_argument("--questions", type=int, help="ask at most so many; default: all")
    parser.add_argument("--record", metavar="NAME", help="write the measurements into data/results")
    return parser.parse_args(words)


class Rounded(torch.nn.Module):
    """A parametrization: products see the rounded weight, and training changes the weight behind it."""

    def __init__(self, bits: int):
        super().__init__()
        self.bits = bits

    def forward(self, weight: Tensor) -> Tensor:
        return fake_quantize(weight, self.bits, GROUP, scale_dtype=torch.bfloat16)


def text(options: argparse.Namespace) -> Tensor:
    """[steps, rows, length] token ids: documents of all kinds between <bos> and <eos>, end to end."""
    encode = corpus.encoder(SOURCE / "tokenizer.json")
    shape = options.steps, options.rows, options.length
    documents = corpus.documents(f"{SHARD}/{options.seed}")
    ids: list[int] = []
    while len(ids) < math.prod(shape):
        ids += [BOS, *encode(next(documents)[1]), EOS]
    return torch.tensor(ids[: math.prod(shape)]).view(shape)


def projections(model: GemmaForCausalLM) -> dict[str, torch.nn.Module]:
    """The modules that are quantized, by their names in a checkpoint."""
    return {name: module for name, module in model.named_modules() if name.endswith("_proj")}


def distill(bits: int, ids: Tensor, lr: float) -> tuple[dict[str, Tensor], list[dict]]:
    """The trained weights [out, in] float32 of each projection, not rounded, and a log.

    AdamW, a cosine schedule, no weight decay; the loss is KL(p || q) in nats a token.
    """
    teacher, student = (GemmaForCausalLM.from_pretrained(SOURCE, dtype=torch.float32).eval() for _ in range(2))
    student.requires_grad_(False)
    trained = {name: module.weight.requires_grad_() for name, module in projections(student).items()}
    for module in projections(student).values():
        parametrize.register_parametrization(module, "weight", Rounded(bits))
    optimizer = torch.optim.AdamW(trained.values(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    log, begin = [], time.perf_counter()
    for step, rows in enumerate(ids):
        rate = lr * min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / len(ids)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.no_grad():
            p = teacher(input_ids=rows, use_cache=False).logits.log_softmax(-1)
        q = student(input_ids=rows, use_cache=False).logits.log_softmax(-1)
        loss = kl_div(q.flatten(0, 1), p.flatten(0, 1), reduction="batchmean", log_target=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 9 or step == len(ids) - 1:
            seconds = round(time.perf_counter() - begin, 1)
            log.append({"step": step + 1, "kl": round(loss.item(), 6), "seconds": seconds})
            print(json.dumps({"bits": bits, **log[-1]}), flush=True)
    return {name: weight.detach() for name, weight in trained.items()}, log


def save_int4(weights: dict[str, Tensor], out: Path) -> Path:
    """Round weights to int4 as `minillm quantize` does, and save the model."""
    with tempfile.TemporaryDirectory() as folder:
        dense = Path(folder)
        for file in SOURCE.glob("*.json"):
            if file.name != "model.safetensors.index.json":
                shutil.copy(file, dense)
        tensors = GemmaForCausalLM.from_pretrained(SOURCE, dtype=torch.float32).state_dict()
        tensors |= {f"{name}.weight": weight for name, weight in weights.items()}
        tensors.pop("lm_head.weight")  # tied
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, dense / "model.safetensors")
        quantize(dense, MethodRecipe.of(Method("int4", GROUP)), out, device="cpu")
    return out


def save_simulated(weights: dict[str, Tensor], out: Path, bits: int = 3) -> Path:
    """Save the model with these weights rounded, as dense ones in float32."""
    model = load_model(SOURCE, dtype="float32")
    for address, parts in modules(model.config).items():
        matrix = model.addressed()[address].dequantize()
        for part in parts:
            if part.name in weights:
                rounded = fake_quantize(weights[part.name], bits, GROUP, scale_dtype=torch.bfloat16)
                matrix[part.rows.start : part.rows.stop] = rounded
    save_model(model, SOURCE, out)
    return out


class Measured:
    """What models lose against the float32 model: on held-out text, and on the held-out questions without examples."""

    def __init__(self, tokens: int | None, questions: int | None):
        self.limit, self.workload, self.begin = questions, held_out("isles"), time.perf_counter()
        self.results: list[dict] = []
        ids = Tokenizer.from_pretrained(SOURCE).encode(load_text(), add_special_tokens=False)[:tokens]
        self.reference = Reference(load_model(SOURCE, dtype="float32"), ids, BOS)
        self.base: list[bool] = []

    def add(self, directory: Path, name: str, bits: int, **more: object) -> dict:
        """Measure a saved model; its row of the record."""
        with LLM(directory, dtype="float32", device="cpu") as llm:
            found = self.reference.divergence(llm.engine.model)
            own = answers(llm, self.workload.questions, self.workload.examples, shots=0, limit=self.limit)
        self.base = self.base or own.correct
        loss = paired_loss(self.base, own.correct)
        row = {
            "engine": "minillm",
            "workload": "distillation",
            "quantization": name,
            "bits": bits,
            "group_size": None if bits == 32 else GROUP,
            "simulated": bits == 3,
            "dtype": "float32",
            "requests": len(own.correct),
            "input_tokens": self.reference.tokens + own.input_tokens,
            "output_tokens": 0,
            "seconds": round(time.perf_counter() - self.begin, 2),
            "output_tokens_per_s": 0.0,
            "perplexity": round(found.perplexity, 5),
            "kl": float(f"{max(0.0, found.kl):.5g}"),
            "accuracy": round(own.accuracy, 4),
            "loss_points": round(loss.points, 3),
            "loss_interval": [round(loss.low, 3), round(loss.high, 3)],
            **more,
        }
        self.results.append(row)
        print(f"{name:<16} perplexity {row['perplexity']:.4f}   KL {row['kl']:.2g}   accuracy {row['accuracy']:.2%}")
        return row


def main() -> None:
    options = parse()
    begun = records.begin(options.record)
    if options.out is not None:
        check_free(options.out)
    measured = Measured(options.tokens, options.questions)
    floor = measured.add(SOURCE, "float32", 32)["perplexity"]
    source = GemmaForCausalLM.from_pretrained(SOURCE, dtype=torch.float32)
    given = {name: module.weight.detach() for name, module in projections(source).items()}
    ids = text(options)
    with tempfile.TemporaryDirectory() as folder:
        for bits in options.bits:
            save = save_int4 if bits == 4 else save_simulated
            before = measured.add(save(given, Path(folder) / f"{bits}"), f"int{bits}", bits)["perplexity"]
            weights, log = distill(bits, ids, RATES[bits])
            out = options.out if bits == 4 and options.out else Path(folder) / f"{bits}-trained"
            more = {"steps": len(ids), "training_tokens": ids.numel(), "log": log}
            row = measured.add(save(weights, out), f"int{bits}, trained", bits, **more)
            row["won_back"] = round((before - row["perplexity"]) / (before - floor), 4)
            print(f"{row['won_back']:.0%} of the perplexity that rounding lost is won back", flush=True)
    records.publish(records.record(measured.results, begun, model=SOURCE.name), options.record)


if __name__ == "__main__":
    main()
