"""Measure whether fast accumulation in FP8 products costs tiny-gemma any quality; needs a GPU with FP8 products.

    python tools/fast_accumulation.py --record fast-accumulation

Every token of the held-out text is scored twice, with exact and with fast accumulation of the same codes, and the two
are paired: `loss` is the mean of (fast - exact) in nats per token, `interval` its 95% confidence interval over
windows of the text, since neighboring tokens are not independent. `rounding` is the same for exact FP8 against bf16,
for scale. Another row a width gives the relative error that fast accumulation adds to a product, beside that of
rounding its inputs; the engine uses it for up to `FAST` inputs.
"""

import argparse
import statistics
import sys
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from minillm import LLM, SamplingParams  # noqa: E402
from minillm.bench import records  # noqa: E402
from minillm.evaluate.perplexity import prompt_logprob  # noqa: E402
from minillm.evaluate.sources import load_text  # noqa: E402
from minillm.kernels import quantized_inputs  # noqa: E402
from minillm.model.loader import EMBEDDED  # noqa: E402

MODEL = EMBEDDED.name
WINDOW = 1024
WIDTHS = (256, 768, 2048, 4096, 16384)


def nats(fast: int, **engine: object) -> list[list[float]]:
    """-log p of every token of each window but its first, with fast accumulation for up to so many inputs."""
    with mock.patch.object(quantized_inputs, "FAST", fast), LLM(EMBEDDED, dtype="bfloat16", **engine) as llm:
        ids = llm.tokenizer.encode(load_text(), add_special_tokens=False)
        windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
        done = llm.generate(windows, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0), progress=False)
        return [
            [-prompt_logprob(each, position, window[position]) for position in range(1, len(window))]
            for each, window in zip(done, windows, strict=True)
        ]


def paired(before: list[list[float]], after: list[list[float]]) -> tuple[float, list[float]]:
    """The mean difference per token, and its 95% interval by the spread over windows of (nearly) equal length."""
    pairs = zip(before, after, strict=True)
    differences = [statistics.fmean(later) - statistics.fmean(earlier) for earlier, later in pairs]
    count = sum(map(len, before))
    mean = (sum(map(sum, after)) - sum(map(sum, before))) / count
    reach = 1.96 * statistics.stdev(differences) / len(differences) ** 0.5
    return mean, [mean - reach, mean + reach]


def errors(width: int) -> dict:
    """Relative errors of a product with so many inputs: of rounding them to e4m3, and what fast accumulation adds."""
    torch.manual_seed(0)
    x, weight = torch.randn(512, width, device="cuda"), torch.randn(512, width, device="cuda")
    codes, other = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    fast = torch._scaled_mm(codes, other.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True).double()
    exact = codes.double() @ other.double().t()
    size = exact.norm()
    plain = exact.bfloat16().double()  # rounds its output alike
    return {
        "columns": width,
        "rounding": float((exact - x.double() @ weight.double().t()).norm() / size),
        "output": float((plain - exact).norm() / size),
        "fast": float((fast - exact).norm() / size),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--record", help="write the table to this file, or to the committed record of this name")
    chosen = options.parse_args()
    begun = records.begin(chosen.record)
    torch.backends.cuda.matmul.allow_tf32 = False
    bf16 = nats(0)
    exact = nats(0, quantization="fp8")
    fast = nats(max(WIDTHS), quantization="fp8")
    loss, interval = paired(exact, fast)
    rounding, around = paired(bf16, exact)
    row = {
        "engine": "minillm", "model": MODEL, "quantization": "fp8", "kv_cache_dtype": "bfloat16",
        "tokens": sum(map(len, exact)), "windows": len(exact), "loss": loss, "interval": interval,
        "rounding": rounding, "rounding_interval": around,
    }  # fmt: skip
    results = [row, *({"limit": quantized_inputs.FAST, **errors(width)} for width in WIDTHS)]
    for each in results:
        print(each)
    if chosen.record:
        records.write(records.record(results, begun), chosen.record)


if __name__ == "__main__":
    main()
