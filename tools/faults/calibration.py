"""Faults in quantizing a model: statistics, folded scales, methods, what is saved."""

from . import Fault

FOLDING, QUANTIZE = "minillm/calibration/folding.py", "minillm/calibration/quantize.py"
ROTATION, ROTATIONS = "minillm/calibration/rotation.py", "tests/calibration/test_rotation.py"
FORWARD = "minillm/calibration/forward.py"
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
        '    if consumer == "down":\n        # A rotation',
        "    if consumer:\n        # A rotation",
        f"{TESTS} -k unchanged",
    ),
    Fault(
        "statistics leave out the last calibration rows",
        FORWARD,
        "for part in ids.split(max(1, STEP_TOKENS // ids.shape[1]))]",
        "for part in ids.split(max(1, STEP_TOKENS // ids.shape[1]))[:-1]]",
        f"{TESTS} -k statistics",
    ),
    Fault(
        "all layers are calibrated on the first layer's inputs",
        FORWARD,
        "self.streams[index] = residual + x",
        "pass",
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
        "a rotation is folded into products before their norm's weights are",
        ROTATION,
        "_rotate(matrix_of(reads), norm.double() * stream)",
        "_rotate(matrix_of(reads), stream)",
        f"{ROTATIONS} -k computes_the_same",
    ),
    Fault(
        "biases that are added to the residual stream are not rotated",
        ROTATION,
        "            if writes.bias is not None:",
        "            if False and writes.bias is not None:",
        f"{ROTATIONS} -k computes_the_same",
    ),
    Fault(
        "values are rotated, but their biases are not",
        ROTATION,
        "    if layer.qkv.bias is not None:",
        "    if False and layer.qkv.bias is not None:",
        f"{ROTATIONS} -k computes_the_same",
    ),
    Fault(
        "an untied head's rotation forgets the final norm's weights",
        ROTATION,
        "model.final_norm.double() * stream",
        "stream",
        f"{ROTATIONS} -k computes_the_same",
    ),
    Fault(
        "a rotated embedding is not rounded to the dtype in which it is saved",
        ROTATION,
        "_rotate(matrix_of(model.embedding), stream, dtype)",
        "_rotate(matrix_of(model.embedding), stream)",
        f"{ROTATIONS} -k one_that_is_saved",
    ),
    Fault(
        "the inputs of down projections are rotated even if they are not int8",
        QUANTIZE,
        "down=_has_int8_inputs(dense, methods)",
        "down=True",
        f"{ROTATIONS} -k 'transformers or twin'",
    ),
    Fault(
        "scales of the down projection's inputs are folded through a rotation",
        FOLDING,
        'return torch.ones_like(scales) if "down" in config.rotations else scales',
        "return scales",
        f"{ROTATIONS} -k undo_planted_outliers",
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
        "a name's -rotate is accepted, but the model is not rotated",
        "minillm/calibration/names.py",
        "rotate=ROTATE in parts",
        "rotate=False",
        "tests/calibration/test_names.py -k rotated_first",
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
    Fault(
        "a recipe's groups fit all weights of the model instead of its own",
        "minillm/calibration/methods.py",
        "for address, count in inputs.items() if self.at(address) is method]",
        "for address, count in inputs.items()]",
        "tests/calibration/test_shapes.py -k each_rule",
    ),
    Fault(
        "a model rounded while it is read has groups of 128 whatever its inputs are",
        "minillm/quantization/recipe.py",
        "replace(found, group_size=fitting_group_size(inputs))",
        "found",
        "tests/calibration/test_shapes.py -k defaults_on_such",
    ),
    Fault(
        "static FP8 scales are warned about as INT8's are",
        QUANTIZE,
        'if format.activations.kind == "int8" and inputs.samples:',
        "if inputs.samples:",
        "tests/calibration/test_shapes.py -k few_steps",
    ),
)
