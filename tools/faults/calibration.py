"""Faults in quantizing a model: statistics, folded scales, methods, what is saved."""

from . import Fault

FOLDING, QUANTIZE = "minillm/calibration/folding.py", "minillm/calibration/quantize.py"
ROTATION, ROTATIONS = "minillm/calibration/rotation.py", "tests/calibration/test_rotation.py"
FORWARD = "minillm/calibration/forward.py"
TESTS = "tests/calibration/test_quantize.py"

FAULTS = (
    Fault(
        "heads that read the same values get different scales",
        FOLDING,
        '    if consumer == "down":\n        # A rotation',
        "    if consumer:\n        # A rotation",
        f"{TESTS} -k unchanged",
    ),
    Fault(
        "act-order gives a format with an order of its own",
        "minillm/calibration/methods.py",
        "Int4(size, self.symmetric, activations=fp8",
        "Int4(size, self.symmetric, self.act_order, activations=fp8",
        f"{TESTS} -k act_order_changes",
    ),
    Fault(
        "statistics leave out the last calibration rows",
        FORWARD,
        "for part in ids.split(max(1, STEP_TOKENS // ids.shape[1]))]",
        "for part in ids.split(max(1, STEP_TOKENS // ids.shape[1]))[:-1]]",
        f"{TESTS} -k statistics",
    ),
    Fault(
        "layers are calibrated on the unquantized layers before them",
        QUANTIZE,
        """            strengths |= quantize_layer(dense, index, methods, run, target)
            if run is not None and index < last:
                run.advance(dense.layers[index])
""",
        """            before = replace(dense.layers[index])
            strengths |= quantize_layer(dense, index, methods, run, target)
            if run is not None and index < last:
                run.advance(before)
""",
        f"{TESTS} -k the_quantized_layers_before",
    ),
    Fault(
        "the inputs of down projections are rotated even if they are not int8",
        QUANTIZE,
        "down=_has_int8_inputs(dense, methods)",
        "down=True",
        f"{ROTATIONS} -k 'transformers or twin'",
    ),
    Fault(
        "a model with norms after attention and MLP is rotated",
        ROTATION,
        '{"after_attention_norm", "after_mlp_norm"}',
        "set()",
        f"{ROTATIONS} -k refused_by_name",
    ),
    Fault(
        "planted outliers are in one channel only",
        "minillm/calibration/outliers.py",
        "[: -(-size // share)]",
        "[:1]",
        f"{ROTATIONS} -k planted_outliers_change",
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
        "scales are searched as if norms were stored exactly",
        FOLDING,
        "return foldable(getattr(layer, NORMS[consumer]), scales, config.norm_offset, dtype)[1].to(scales)",
        "return scales",
        f"{TESTS} -k can_be_folded",
    ),
    Fault(
        "the head gets a calibrated method's name without calibration",
        QUANTIZE,
        'if method.calibrated and address in ("head", "embedding"):',
        'if method.calibrated and address == "embedding":',
        f"{TESTS} -k before_any_work",
    ),
)
