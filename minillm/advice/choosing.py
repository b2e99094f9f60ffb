"""Recommend a precision for a model, a GPU and its traffic, by arithmetic that explains itself.  Lesson 08.

    from minillm.advice.choosing import GPUS, Traffic, recommend
    from minillm.model.config import PRESETS
    print(recommend(PRESETS["gemma-2b"], GPUS["H200"], Traffic(concurrency=1, input_len=128, output_len=256)))

A step takes a fixed time, plus the time of its products, plus the time to read the cache:

    product    max(bytes of the matrix / bytes per second, 2 x numbers in the matrix x rows / operations per second)
    cache      rows x tokens in the cache x bytes of a token / bytes per second

A product reads and computes at the same time, except in minillm's own kernels for few rows of codes, where both times
add up. Few requests wait for bytes, so smaller weights help; many wait for arithmetic, so only 8-bit products help.
Attention's own arithmetic is left out: it is the same for every method. Corrections to this arithmetic are measured:
`MethodFacts.alone` and `MethodFacts.few`, CONVERTING, STEP_ALONE, STEP and ROW are fitted to the record
`h200/quantization`, REACHED to `h200/roofline`, `h200/ceiling-h200` and `h200/quantization`. Tests hold them against
these records.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from minillm.config import Traffic
from minillm.errors import ConfigError
from minillm.model.config import ModelConfig
from minillm.values import shown

from . import sizing

LOSSES = ("none", "low", "medium", "high")  # how much quality a method may lose
NEAR = 0.97  # a method this near to the fastest is fast enough to win by losing less

# Shares of the datasheet's rates that an H200 reached: reading memory, and products of many rows by their inputs. The
# products of 8-bit inputs include rounding those.
REACHED = {"bytes": 0.886, "bf16": 0.674, "int8": 0.53, "fp8": 0.62}
STEP_ALONE = 11e-6  # seconds for each layer of a step of one request, which fuses its kernels
STEP = 35e-6  # the same of other steps
ROW = 2e-6  # seconds for each row of a step: sampling, and the operations between products
MOST_ROWS = 64  # rows up to which a kernel multiplies codes; above, 16-bit products have the matrix dequantized first
CONVERTING = 0.8  # share of the 16-bit rate that this kernel reaches while it converts codes
PROMPT = 16384  # tokens of prompts in a step at most


@dataclass(frozen=True)
class GPU:
    """A GPU and the rates that products reach on it, which are below those of its datasheet.

    flops_per_s  operations per second by the products' inputs: "bf16", and where the GPU has them "int8" and "fp8"
    source       where the rates come from
    """

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    source: str = "given"

    def __post_init__(self) -> None:
        if "bf16" not in self.flops_per_s:
            raise ConfigError(f"flops_per_s must have bf16, and may have int8 and fp8, not {shown(self.flops_per_s)}")
        rates = {"memory_bytes": self.memory_bytes, "bytes_per_s": self.bytes_per_s, **self.flops_per_s}
        for name, rate in rates.items():
            if not rate > 0:
                raise ConfigError(f"{name} of {self.name} must be above 0, not {shown(rate)}")


def _gpu(name: str, memory: float, bytes_per_s: float, source: str, **flops: float) -> GPU:
    """Return a GPU by the numbers of its datasheet, without sparsity."""
    reached = {products: REACHED[products] * rate for products, rate in flops.items()}
    return GPU(name, memory, REACHED["bytes"] * bytes_per_s, reached, source)


SCALED = "datasheet, times the shares that an H200 reaches of its own"
GPUS = {
    "H200": _gpu("NVIDIA H200", 141e9, 4.8e12, "measured", bf16=989e12, int8=1979e12, fp8=1979e12),
    "H100": _gpu("NVIDIA H100 80GB HBM3", 80e9, 3.35e12, SCALED, bf16=989e12, int8=1979e12, fp8=1979e12),
    "A100": _gpu("NVIDIA A100-SXM4-80GB", 80e9, 2.039e12, SCALED, bf16=312e12, int8=624e12),
    "L40S": _gpu("NVIDIA L40S", 48e9, 0.864e12, SCALED, bf16=362e12, int8=733e12, fp8=733e12),
    "L4": _gpu("NVIDIA L4", 24e9, 0.3e12, SCALED, bf16=121e12, int8=242e12, fp8=242e12),
    "RTX 4090": _gpu("NVIDIA GeForce RTX 4090", 24e9, 1.008e12, SCALED, bf16=165e12, int8=661e12, fp8=330e12),
}


def known(name: str) -> GPU | None:
    """Return the GPU that torch calls by this name, "NVIDIA H200"; None if its rates are not known here."""
    return next((each for each in GPUS.values() if each.name == name), None)


@dataclass(frozen=True)
class MethodFacts:
    """A method of quantizing the layers' weights, as far as its speed and quality matter.

    bits             of a weight, with the scales of its group
    products         what its products compute with, a key of `GPU.flops_per_s`
    alone, few       shares of the memory's bandwidth at which products of one row, or of several, read its weights
    loss             NVIDIA's judgment of its impact on accuracy, one of LOSSES; "very low" counts as low
    perplexity_loss  of tiny-gemma: (perplexity after - before) / before, from the record `cpu/quantization`
    calibrated       whether it needs calibration: `minillm quantize --method NAME`
    """

    name: str
    bits: float
    products: str
    alone: float
    few: float
    loss: str
    perplexity_loss: float
    calibrated: bool = False


BF16 = MethodFacts("bf16", 16, "bf16", 1.0, 1.0, "none", 0.0)
INT4 = MethodFacts("int4", 4.125, "bf16", 0.67, 0.55, "high", 0.00371)
W8A8 = MethodFacts("w8a8", 8, "int8", 0.69, 0.93, "medium", 0.00011)
METHODS = (
    BF16,
    MethodFacts("int8", 8, "bf16", 0.94, 0.78, "low", 0.00011),
    MethodFacts("fp8", 8, "fp8", 0.87, 0.96, "low", 0.00072),
    W8A8,
    INT4,
    replace(W8A8, name="smoothquant", perplexity_loss=-0.00007, calibrated=True),
    replace(INT4, name="awq", loss="low", perplexity_loss=0.00277, calibrated=True),
    replace(INT4, name="gptq", loss="low", perplexity_loss=0.00262, calibrated=True),
)
# method -> a head's format that suits it
HEADS = {"int8": "int8", "fp8": "fp8", "int4": "int8", "awq": "int8", "gptq": "int8"}
CACHES = ("auto", "fp8")  # int8 takes the same bytes


@dataclass(frozen=True)
class Seconds:
    """The parts of the time of all requests: waiting for weights or for arithmetic, reading the cache, and the rest."""

    weights: float = 0.0
    arithmetic: float = 0.0
    cache: float = 0.0
    fixed: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.arithmetic + self.cache + self.fixed

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __mul__(self, times: float) -> "Seconds":
        return Seconds(*(getattr(self, each.name) * times for each in fields(self)))


@dataclass(frozen=True)
class Candidate:
    """A precision and what to expect of it. `speed`: output tokens per second, divided by bf16's."""

    method: MethodFacts
    quantized_head: str | None
    kv_cache_dtype: str
    weight_bytes: int
    requests: int  # how many fit on the GPU at once
    seconds: Seconds
    output_tokens_per_s: float
    speed: float | None  # None where bf16 does not fit

    @property
    def name(self) -> str:
        head = "" if self.quantized_head is None else f", head {self.quantized_head}"
        cache = "" if self.kv_cache_dtype == "auto" else f", cache {self.kv_cache_dtype}"
        return self.method.name + head + cache


@dataclass(frozen=True)
class Recommendation:
    """The recommended precision as options of `LLM`, all candidates, fastest first, and why.

    quantization  None: bf16. A calibrated method is the `--method` of `minillm quantize` instead of an option

    `print` it for a table, which shows each method with the recommended cache and its faster head, next to bf16.
    """

    quantization: str | None
    quantized_head: str | None
    kv_cache_dtype: str
    best: Candidate
    candidates: tuple[Candidate, ...]
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        rows = [("", "speed", "weights", "requests that fit", "may lose")]
        for each in self._listed():
            size = f"{each.weight_bytes / 1e9:.2f} GB"
            speed = "-" if each.speed is None else f"{each.speed:.2f}"
            mark = "> " if each is self.best else "  "
            rows.append((mark + each.name, speed, size, f"{each.requests:,}", each.method.loss))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs))
            for pairs in (list(zip(row, widths, strict=True)) for row in rows)
        ]
        return "\n".join([*lines, "", *self.reasons])

    def _listed(self) -> list[Candidate]:
        listed: dict[str, Candidate] = {}
        for each in self.candidates:
            if each.kv_cache_dtype == self.kv_cache_dtype:
                listed.setdefault(each.method.name, each)
        listed[self.best.method.name] = self.best
        return [each for each in self.candidates if each.name == BF16.name or each in listed.values()]


def recommend(
    config: ModelConfig,
    gpu: GPU,
    traffic: Traffic,
    *,
    loss: str = "low",
    calibrated: bool = False,
    kv_cache_dtype: str | None = None,
    utilization: float = 0.9,
) -> Recommendation:
    """Return the fastest precision for this model, GPU and traffic, or one nearly as fast that loses less.  Lesson 08.

    loss            how much quality may be lost, one of LOSSES: "none" is bf16, "low" what is hardly measurable, and
                    also allows an 8-bit cache
    calibrated      whether methods that need calibration may be recommended
    kv_cache_dtype  the cache's, as `LLM` takes it; None: choose it too
    utilization     share of the GPU that may be used, in (0, 1]

    The speeds are estimates for minillm's kernels. Raises ConfigError, also if no method's weights fit.
    """
    if loss not in LOSSES:
        raise ConfigError(f"loss must be one of {', '.join(LOSSES)}, not {shown(loss)}")
    caches = (kv_cache_dtype,) if kv_cache_dtype else CACHES if loss != "none" else ("auto",)
    candidates = []
    for method in METHODS:
        if method.products not in gpu.flops_per_s or (method.calibrated and not calibrated):
            continue
        for head in dict.fromkeys((None, HEADS.get(method.name))):
            for cache in caches:
                candidates.append(_candidate(config, gpu, traffic, method, head, cache, utilization))
    dense = candidates[0]
    if dense.requests:
        candidates = [replace(each, speed=each.output_tokens_per_s / dense.output_tokens_per_s) for each in candidates]
    candidates.sort(key=lambda each: -each.output_tokens_per_s)
    allowed = LOSSES[: LOSSES.index(loss) + 1]
    best = _choice([each for each in candidates if each.requests and each.method.loss in allowed])
    if best is None:
        smallest = min(candidates, key=lambda each: each.weight_bytes)
        raise ConfigError(
            f"no precision with loss={loss!r} leaves room for a request on {gpu.name}, which has "
            f"{gpu.memory_bytes / 1e9:.0f} GB: even {smallest.name} needs {smallest.weight_bytes / 1e9:.2f} GB "
            "for its weights; allow more loss, shorter requests, or use a larger GPU"
        )
    reasons = tuple(_reasons(gpu, traffic, loss, dense, best, candidates))
    name = None if best.method is BF16 else best.method.name
    return Recommendation(name, best.quantized_head, best.kv_cache_dtype, best, tuple(candidates), reasons)


def _candidate(
    config: ModelConfig,
    gpu: GPU,
    traffic: Traffic,
    method: MethodFacts,
    head: str | None,
    cache: str,
    utilization: float,
) -> Candidate:
    size = sizing.fit(
        config,
        gpu.memory_bytes,
        traffic.input_len + traffic.output_len,
        kv_cache_dtype=cache,
        utilization=utilization,
    )
    size = replace(size, weight_bytes=weight_bytes(config, method, head))
    rows = min(traffic.concurrency, size.requests)
    if not rows:
        return Candidate(method, head, cache, size.weight_bytes, 0, Seconds(), 0.0, None)
    each = _seconds(config, gpu, traffic, method, head, rows, size.kv_bytes_per_token)
    seconds = each * (traffic.concurrency / rows)  # requests that do not fit wait for others to end
    speed = traffic.concurrency * traffic.output_len / seconds.total
    return Candidate(method, head, cache, size.weight_bytes, size.requests, seconds, speed, None)


def weight_bytes(config: ModelConfig, method: MethodFacts, head: str | None = None) -> int:
    """Return bytes of the model's weights, with the scales of groups, if its layers and head have these formats."""
    layers, table = _numbers(config)
    size = layers * method.bits / 8 + table * _head(head).bits / 8
    return int(size if config.tie_word_embeddings else size + table * BF16.bits / 8)


def _numbers(config: ModelConfig) -> tuple[int, int]:
    """Return how many weights the layers have, and the head."""
    table = config.vocab_size * config.hidden_size
    return sizing.parameters(config) - table * (1 if config.tie_word_embeddings else 2), table


def _head(name: str | None) -> MethodFacts:
    return BF16 if name is None else next(each for each in METHODS if each.name == name)


def _seconds(
    config: ModelConfig, gpu: GPU, traffic: Traffic, method: MethodFacts, head: str | None, rows: int, token_bytes: int
) -> Seconds:
    """Return the time of `rows` requests that start together."""
    layers, table = _numbers(config)
    tokens = rows * traffic.input_len
    chunk = min(tokens, PROMPT)
    prompts = product(gpu, method, layers, chunk) + Seconds(fixed=STEP * config.num_layers)
    context = traffic.input_len + traffic.output_len / 2  # on average
    step = product(gpu, method, layers, rows) + product(gpu, _head(head), table, rows)
    fixed = (STEP_ALONE if rows == 1 else STEP) * config.num_layers + ROW * rows
    step += Seconds(cache=rows * context * token_bytes / gpu.bytes_per_s, fixed=fixed)
    return prompts * (tokens / chunk) + step * traffic.output_len


def product(gpu: GPU, method: MethodFacts, numbers: int, rows: int) -> Seconds:
    """Return the time to multiply `rows` rows with matrices of so many numbers in all.  Lesson 08."""
    nbytes, rate = numbers * method.bits / 8, gpu.flops_per_s[method.products]
    share = method.alone if rows == 1 else method.few
    converted = method.products == BF16.products and method.bits < BF16.bits  # codes, to 16-bit numbers
    if rows <= MOST_ROWS and method.bits < BF16.bits:  # in minillm's own kernel
        rate *= CONVERTING if converted else 1
        return Seconds(nbytes / (gpu.bytes_per_s * share), 2 * numbers * rows / rate)
    before = 0.0
    if converted:  # by a kernel that reads codes and writes a 16-bit matrix, which the product reads
        before, nbytes, share = (nbytes + 2 * numbers) / gpu.bytes_per_s, 2 * numbers, BF16.few
    reading, computing = nbytes / (gpu.bytes_per_s * share), 2 * numbers * rows / rate
    if computing > reading:
        return Seconds(weights=before, arithmetic=computing)
    return Seconds(weights=before + reading)


def _choice(allowed: list[Candidate]) -> Candidate | None:
    """Return the fastest, or the one that loses least of those nearly as fast."""
    near = [each for each in allowed if each.output_tokens_per_s >= NEAR * allowed[0].output_tokens_per_s]

    def losses(each: Candidate) -> tuple:
        method = each.method
        return (
            LOSSES.index(method.loss),
            method.perplexity_loss,
            each.quantized_head is not None,
            each.kv_cache_dtype != "auto",
        )

    return min(near, key=losses, default=None)


def _reasons(
    gpu: GPU, traffic: Traffic, loss: str, dense: Candidate, best: Candidate, candidates: list[Candidate]
) -> Iterator[str]:
    """Sentences that say why: what the time goes into, how the best saves some, what fits, what quality it costs."""
    method = best.method
    if dense.requests:
        many = "one request spends" if traffic.concurrency == 1 else f"{traffic.concurrency:,} requests at once spend"
        parts = {name: getattr(dense.seconds, name) / dense.seconds.total for name in WAITING}
        longest = sorted(parts, key=lambda name: -parts[name])[:2]
        waits = [f"{parts[name]:.0%} of the time {WAITING[name]}" for name in longest if parts[name] >= 0.1]
        yield f"In bf16 on {gpu.name}, {many} {' and '.join(waits)}."
    else:
        yield f"In bf16 the weights leave no room for a request on {gpu.name}."
    if method is not BF16:
        ways = [f"reads {best.weight_bytes / 1e9:.2f} GB of weights instead of {dense.weight_bytes / 1e9:.2f} GB"]
        if method.products != BF16.products:
            faster = gpu.flops_per_s[method.products] / gpu.flops_per_s[BF16.products]
            ways.append(f"computes products of 8-bit numbers, at {faster:.1f} times the rate of 16-bit ones")
        yield f"{best.name} {' and '.join(ways)}."
    elif loss != "none":
        yield (
            f"No quantized weights that loss={loss!r} allows make this more than {1 / NEAR - 1:.0%} faster: what "
            "reading fewer bytes saves, their products lose again."
        )
    other = "" if best.requests == dense.requests else f", instead of {dense.requests:,}"
    limits = "does not limit" if dense.requests >= traffic.concurrency else "limits"
    yield f"{best.requests:,} requests fit{other}: memory {limits} this traffic."
    if method is not BF16:
        yield (
            f"Quality: {method.name} changes tiny-gemma's perplexity by {method.perplexity_loss:+.2%}; its usual "
            f"impact on accuracy is {method.loss}."
        )
    speeds = [each for each in candidates if each.kv_cache_dtype == best.kv_cache_dtype]
    if speeds[0].output_tokens_per_s > best.output_tokens_per_s / NEAR:
        yield f"{speeds[0].name} should be faster, but may lose more than loss={loss!r} allows."
    if method.calibrated:
        yield f"It needs calibration: minillm quantize --method {method.name}."
    yield f"Speeds are estimates for minillm's kernels; the GPU's rates are: {gpu.source}."


WAITING = {  # on each part of `Seconds`
    "weights": "reading weights",
    "arithmetic": "computing products",
    "cache": "reading keys and values",
    "fixed": "on fixed costs of steps",
}
