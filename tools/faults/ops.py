"""Faults in the operations in plain PyTorch: masks, axes, scales."""

from . import Fault

CPU, REFERENCE = "minillm/ops/cpu.py", "minillm/ops/reference.py"
COMPOSITIONS, ON_CODES = "minillm/ops/compositions.py", "minillm/ops/triton_linear.py"

FAULTS = (
    Fault(
        "the fused cache write runs in place of a user's",
        COMPOSITIONS,
        'self.are_own("rotary_embedding", "write_kv")',
        'self.are_own("rotary_embedding")',
        "tests/ops/test_compositions.py -k unless_one_is_replaced",
    ),
    Fault(
        "a stream's cache gets rotated keys",
        COMPOSITIONS,
        "self.write_kv(rotated if rotate_keys else k, v, cache, slots)",
        "self.write_kv(rotated, v, cache, slots)",
        "tests/kv_cache/test_attention_sinks.py -k quantized",
    ),
    Fault(
        "fp8 keys are widened without their sign",
        "minillm/kv_cache/layer_cache.py",
        "codes.view(torch.int8).to(torch.int16) << 7",
        "codes.view(torch.uint8).to(torch.int16) << 7",
        "tests/engine/test_quantized_cache.py -k 'fp8 and perplexity'",
    ),
    Fault(
        "an attention window has one key too many",
        REFERENCE,
        "(distance >= 0) & (distance < window) if window",
        "(distance >= 0) & (distance <= window) if window",
        "tests/ops/test_cpu.py -k equals_its_definition",
    ),
    Fault(
        "a query attends to the key after its own",
        REFERENCE,
        "if window else distance >= 0",
        "if window else distance >= -1",
        "tests/ops/test_cpu.py -k equals_its_definition",
    ),
    Fault(
        "top_p drops the token that reaches the threshold",
        REFERENCE,
        "before = probabilities.cumsum(dim=-1) - probabilities",
        "before = probabilities.cumsum(dim=-1)",
        "tests/runner/test_sampler.py -k 'distribution and top_p'",
    ),
    Fault(
        "gate and up are swapped",
        REFERENCE,
        "gate, up = gate_up.chunk(2, -1)",
        "up, gate = gate_up.chunk(2, -1)",
        "tests/ops/test_cpu.py -k gate_is_the_first_half",
    ),
    Fault(
        "rows of equal lengths attend to one key before their window",
        CPU,
        "first = max(0, length - options.window) if options.window else 0",
        "first = max(0, length - options.window - 1) if options.window else 0",
        "tests/ops/test_cpu.py -k decode_attention",
    ),
    Fault(
        "a chunk's queries get positions from the start of the row",
        CPU,
        "torch.arange(length - queries, length)",
        "torch.arange(queries)",
        "tests/ops/test_cpu.py -k prefill_attention",
    ),
    Fault(
        "the queries of a row get each other's masks",
        CPU,
        "hidden.repeat_interleave(group, 1)",
        "hidden.repeat(1, group, 1)",
        "tests/ops/test_cpu.py -k decode_attention",
    ),
    Fault(
        "scores are capped at 1 instead of the soft cap",
        CPU,
        "scores.div_(cap).tanh_().mul_(cap)",
        "scores.div_(cap).tanh_()",
        "tests/ops/test_cpu.py -k caps_scores",
    ),
    Fault(
        "the norm leaves out eps",
        CPU,
        "torch.addcmul(_scalar(eps),",
        "torch.addcmul(_scalar(0.0),",
        "tests/ops/test_cpu.py -k rms_norm",
    ),
    Fault(
        "greedy rows are sampled when other rows are",
        CPU,
        "return torch.where(greedy, logits.argmax(-1), drawn) if mixed else drawn",
        "return drawn",
        "tests/runner/test_sampler.py -k greedy",
    ),
    Fault(
        "an int8 matrix product leaves out the scales",
        CPU,
        ".mul_(weight.scales.to(wide))",
        "",
        "tests/quantization/test_models.py -k cpus_implementations",
    ),
    Fault(
        "a stream's keys are rotated by one position too few",
        CPU,
        "_rotated(k, rotary[: k.shape[1]])",
        "_rotated(k, rotary[: k.shape[1]].roll(1, 0))",
        "tests/ops/test_cpu.py -k stored_unrotated",
    ),
    Fault(
        "a fused kernel runs although the activation in it is replaced",
        COMPOSITIONS,
        'self.are_own("gated_activation", "linear")',
        'self.are_own("linear")',
        "tests/ops/test_compositions.py -k what_replaces",
    ),
    Fault(
        "the norm before a fused product leaves out the sum with the residual",
        "minillm/ops/triton.py",
        "    if x is None:\n        codes, scales =",
        "    if x is None or True:\n        codes, scales =",
        "tests/ops/test_compositions.py -k bits_of_separate",
    ),
    Fault(
        "products of codes ignore a static scale",
        ON_CODES,
        "return Rounding(dtype, weight.input_scale)",
        "return Rounding(dtype, None)",
        "tests/ops/test_compositions.py -k 'bits_of_separate and static'",
    ),
    Fault(
        "inputs are rounded to fp8 on GPUs that cannot multiply it",
        ON_CODES,
        "if dtype == float8_e4m3fn and not has_fp8(x.device):",
        "if False:",
        "tests/ops/test_compositions.py -k gpus_without_fp8",
    ),
    Fault(
        "products of codes leave out the bias",
        ON_CODES,
        "        out += weight.bias",
        "        pass",
        "tests/ops/test_compositions.py -k 'bits_of_separate and (w8a8 or fp8)'",
    ),
)
