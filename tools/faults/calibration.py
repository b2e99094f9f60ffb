"""Faults in quantizing a model: statistics, folded scales, methods, what is saved."""

from . import Fault

FOLDING, QUANTIZE = "minillm/calibration/folding.py", "minillm/calibration/quantize.py"
TESTS = "tests/calibration/test_quantize.py"

FAULTS = (
    Fault(
        "scales folded into the down projection divide the gate's rows",
        FOLDING,
        "slice(config.intermediate_size, None), scales",
        "slice(config.intermediate_size), scales",
        f"{TESTS} -k unchanged",
    ),
    Fault(
        "heads that read the same values get different scales",
        FOLDING,
        '    if consumer == "down":\n        return scales',
        "    if consumer:\n        return scales",
        f"{TESTS} -k unchanged",
    ),
    Fault(
        "statistics leave out the last calibration rows",
        "minillm/calibration/forward.py",
        "ids[start : start + step], layers)",
        "ids[start : start + step][:-1], layers)",
        f"{TESTS} -k statistics",
    ),
    Fault(
        "all layers are calibrated on the first layer's inputs",
        "minillm/calibration/forward.py",
        "shallow.layers = model.layers[:layers]",
        "shallow.layers = model.layers[:1] * len(model.layers[:layers])",
        f"{TESTS} -k statistics",
    ),
    Fault(
        "a recipe's last matching pattern wins",
        "minillm/calibration/methods.py",
        "next((each for pattern, each in self.rules.items()",
        "next((each for pattern, each in reversed(self.rules.items())",
        f"{TESTS} -k recipe_file",
    ),
    Fault(
        "the seed does not choose the calibration text",
        QUANTIZE,
        "generator = torch.Generator().manual_seed(seed)",
        "generator = torch.Generator().manual_seed(0)",
        f"{TESTS} -k seeds",
    ),
    Fault(
        "gptq rounds to the nearest",
        QUANTIZE,
        "return lambda part: PARTS.gptq(part, compensation, format)",
        "return format.empty(0, inputs.inputs, False, dtype=inputs.dtype, device=inputs.device).round",
        f"{TESTS} -k diverge",
    ),
    Fault(
        "a model that is quantized already is quantized again",
        QUANTIZE,
        "if isinstance(place, str) or read_layout(place) is not None:",
        "if isinstance(place, str):",
        f"{TESTS} -k before_any_work",
    ),
    Fault(
        "scales are searched as if norms were stored exactly",
        FOLDING,
        "return foldable(getattr(layer, NORMS[consumer]), scales, config.norm_offset, dtype)[1].to(scales)",
        "return scales",
        f"{TESTS} -k can_be_folded",
    ),
    Fault(
        "biases that scales were folded into are not rounded as in the file",
        FOLDING,
        "/ divisors.double()).to(dtype))",
        "/ divisors.double()))",
        f"{TESTS} -k one_that_is_saved",
    ),
    Fault(
        "a static scale of inputs that are always zero is zero",
        QUANTIZE,
        "largest if largest > 0 else 1.0",
        "largest",
        f"{TESTS} -k all_zero",
    ),
    Fault(
        "the head gets a calibrated method's name without calibration",
        QUANTIZE,
        'if method.calibrated and address in ("head", "embedding"):',
        'if method.calibrated and address == "embedding":',
        f"{TESTS} -k before_any_work",
    ),
)
