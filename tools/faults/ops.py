"""Faults in the operations in plain PyTorch: masks, axes, scales."""

from . import Fault

CPU, REFERENCE = "minillm/ops/cpu.py", "minillm/ops/reference.py"
EXACT = "minillm/ops/exact.py"
COMPOSITIONS, ON_CODES = "minillm/ops/compositions.py", "minillm/ops/triton_linear.py"

FAULTS = (
    Fault(
        "an exact product has as many rows as the step",
        EXACT,
        "    tiles = x.new_zeros(max(1, -(-len(rows) // TILE)), TILE, x.shape[-1])\n",
        "    tiles = x.new_zeros(1, max(1, len(rows)), x.shape[-1])\n",
        "tests/ops/test_exact.py -k products",
    ),
    Fault(
        "exact attention's chunks begin with the window",
        EXACT,
        "keys = (since // KEYS * KEYS)[:, None] + torch.arange(chunks * KEYS)",
        "keys = since[:, None] + torch.arange(chunks * KEYS)",
        "tests/ops/test_exact.py -k attention",
    ),
    Fault(
        "exact attention adds chunks in halves",
        EXACT,
        "    return reduce(torch.add, chunks.unbind())",
        "    return chunks[: len(chunks) // 2].sum(0) + chunks[len(chunks) // 2 :].sum(0)",
        "tests/ops/test_exact.py -k attention",
    ),
    Fault(
        "exact engines use torch's activations",
        EXACT,
        "        gated = x / (1 + torch.exp(-x))",
        "        gated = F.silu(x.contiguous())",
        "tests/ops/test_exact.py -k activation",
    ),
    Fault(
        "exact engines run operations of a user",
        "minillm/ops/table.py",
        "        if self.exact:\n            function = _refused(name)\n",
        "",
        "tests/engine/test_exact.py -k operations_of_a_user",
    ),
    Fault(
        "fp8 keys are widened without their sign",
        "minillm/kv_cache/layer_cache.py",
        "codes.view(torch.int8).to(torch.int16) << 7",
        "codes.view(torch.uint8).to(torch.int16) << 7",
        "tests/engine/test_quantized_cache.py -k 'fp8 and perplexity'",
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
        "the norm leaves out eps",
        CPU,
        "torch.addcmul(_scalar(eps),",
        "torch.addcmul(_scalar(0.0),",
        "tests/ops/test_cpu.py -k rms_norm",
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
        "products of codes ignore a static scale",
        ON_CODES,
        "(product, Rounding(dtype, weight.input_scale))",
        "(product, Rounding(dtype, None))",
        "tests/ops/test_compositions.py -k 'bits_of_separate and static'",
    ),
)
