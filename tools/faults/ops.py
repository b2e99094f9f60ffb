"""Faults in the operations in plain PyTorch: masks, axes, scales."""

from . import Fault

CPU, REFERENCE = "minillm/ops/cpu.py", "minillm/ops/reference.py"

FAULTS = (
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
)
