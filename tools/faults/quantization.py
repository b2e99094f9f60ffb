"""Faults in quantized weights: codes, scales, rows, recipes."""

from . import Fault

INT8, RECIPE = "minillm/quantization/int8.py", "minillm/quantization/recipe.py"
FP4, SPARSE = "minillm/quantization/fp4.py", "minillm/quantization/sparse.py"
HADAMARD = "minillm/quantization/methods/hadamard.py"

FAULTS = (
    Fault(
        "entries of a Hadamard matrix are rounded to half precision with their scale",
        HADAMARD,
        "2**halvings\n        return left, right.to(device, dtype), 2**halvings / math.sqrt(order)",
        "math.sqrt(order)\n        return left, right.to(device, dtype), 1",
        "tests/quantization/test_hadamard.py -k half_precision",
    ),
    Fault(
        "all rows share one scale",
        INT8,
        "steps = weight.abs().amax(dim=1, keepdim=True)",
        "steps = weight.abs().amax().expand(len(weight), 1)",
        "tests/quantization/test_int8.py",
    ),
    Fault(
        "codes are truncated instead of rounded",
        INT8,
        ".round().clamp(-HIGHEST, HIGHEST)",
        ".trunc().clamp(-HIGHEST, HIGHEST)",
        "tests/quantization/test_int8.py -k nearest",
    ),
    Fault(
        "every part of a matrix overwrites its first rows",
        "minillm/quantization/quantized.py",
        "start = rows.start",
        "start = 0",
        "tests/quantization/test_int8.py -k part",
    ),
    Fault(
        "selected rows get the scales of the first rows",
        "minillm/quantization/quantized.py",
        "Codes(self.codes[which], self.scales[which][:, None])",
        "Codes(self.codes[which], self.scales[: len(self.codes[which])][:, None])",
        "tests/quantization/test_int8.py -k rows_equal",
    ),
    Fault(
        "two int4 codes swap places in their byte",
        "minillm/quantization/int4.py",
        "return unsigned[:, 0::2] | unsigned[:, 1::2] << 4",
        "return unsigned[:, 1::2] | unsigned[:, 0::2] << 4",
        "tests/quantization/test_int4.py -k packing",
    ),
    Fault(
        "zero points are off by one",
        "minillm/quantization/int4.py",
        "(LOWEST - low / scales).round()",
        "(LOWEST - low / scales + 1).round()",
        "tests/quantization/test_int4.py -k zero_points",
    ),
    Fault(
        "all tokens share one scale",
        "minillm/quantization/activations.py",
        "most = wide.abs().amax(-1, keepdim=True)",
        "most = wide.abs().amax().expand(*x.shape[:-1], 1)",
        "tests/quantization/test_fp8.py -k each_token",
    ),
    Fault(
        "modules with one FP8 scale each share the first one's",
        "minillm/quantization/quantized.py",
        "self.scales[span] = codes.scales",
        "self.scales[:] = codes.scales[:1]",
        "tests/quantization/test_fp8.py -k module",
    ),
    Fault(
        "awq's clipping never widens a group's range",
        "minillm/quantization/methods/awq.py",
        "for step in range(20, 44) if step != 40",
        "for step in range(20, 40)",
        "tests/quantization/test_calibrated_methods.py -k wider_range",
    ),
    Fault(
        "packed zero points are read in the order of their groups",
        "minillm/quantization/checkpoints/compressed_tensors.py",
        "unpack_numbers(zeros.t()).t()[: len(packed)]",
        "unpack_numbers(zeros).reshape(-1, zeros.shape[1])[: len(packed)]",
        "tests/quantization/test_compressed_tensors.py -k library_compressed",
    ),
    Fault(
        "the last matching pattern wins instead of the first",
        RECIPE,
        "in self.rules.items() if fnmatchcase",
        "in reversed(self.rules.items()) if fnmatchcase",
        "tests/quantization/test_recipe.py",
    ),
    Fault(
        "samples are the first rows of the first steps",
        "minillm/quantization/methods/statistics.py",
        "chosen = torch.randperm(len(x), generator=self._generator)[:keep]",
        "chosen = torch.arange(len(x))[:: max(1, len(x) // 16)][:keep]",
        "tests/calibration/test_quantize.py -k distinct",
    ),
    Fault(
        "zero points of GPTQ's version 1 are read as they are stored",
        "minillm/quantization/checkpoints/gptq.py",
        "if self.minus_one:",
        "if not self.minus_one:",
        "tests/quantization/test_checkpoints.py -k 'tool_says and gptq'",
    ),
    Fault(
        "symmetric zero points are what the label says, whatever the file holds",
        "minillm/quantization/checkpoints/gptq.py",
        "check_zero_points_are((-1, 0), zeros",
        "check_zero_points_are((-1 if self.minus_one else 0,), zeros",
        "tests/quantization/test_checkpoints.py -k whatever_the_label",
    ),
    Fault(
        "a zero point of 0 does not borrow",
        "minillm/quantization/checkpoints/gptq.py",
        """            numbers = numbers + ONE_EACH[settings.bits]
        return unpack_numbers(numbers, settings.bits)[:, :rows].t()""",
        """            return ((unpack_numbers(numbers, settings.bits)[:, :rows].t() + 9) & 15) - 8
        return unpack_numbers(numbers, settings.bits)[:, :rows].t()""",
        "tests/quantization/test_checkpoints.py -k borrows",
    ),
    Fault(
        "the rows of AWQ's numbers are taken in the order of packing instead of back",
        "minillm/quantization/checkpoints/awq.py",
        "PLACES = (0, 4, 1, 5, 2, 6, 3, 7)",
        "PLACES = (0, 2, 4, 6, 1, 3, 5, 7)",
        "tests/quantization/test_checkpoints.py -k 'tool_says and awq'",
    ),
    Fault(
        "leaving out layer 1 leaves out layer 10",
        "minillm/quantization/checkpoints/awq.py",
        'f".{name}." in f".{module}."',
        "name in module",
        "tests/quantization/test_checkpoints.py -k whole_parts",
    ),
    Fault(
        "halfway between two values of FP4, the larger is taken",
        FP4,
        "size = (size / step).round() * step",
        "size = (size / step + 0.5).floor() * step",
        "tests/quantization/test_fp4.py -k nearest",
    ),
    Fault(
        "NVFP4's codes are rounded for scales that are not yet rounded to e4m3",
        FP4,
        ".to(torch.float8_e4m3fn).float()\n",
        "\n",
        "tests/quantization/test_fp4.py -k to_the_bit",
    ),
    Fault(
        "pruning ranks the weights of a row",
        SPARSE,
        """        largest = matrix.abs().flatten().argsort(dim=0, descending=True, stable=True)[:count]
        kept = torch.zeros(matrix.numel(), dtype=torch.bool, device=matrix.device)
        return kept.index_fill_(0, largest, True).view_as(matrix)""",
        """        largest = matrix.abs().argsort(dim=1, descending=True, stable=True)[:, : count // len(matrix)]
        return torch.zeros_like(matrix, dtype=torch.bool).scatter_(1, largest, True)""",
        "tests/quantization/test_sparse.py -k whole_matrix",
    ),
    Fault(
        "the first column of a bitmask has the highest bit",
        "minillm/quantization/checkpoints/bitmask.py",
        "(padded << torch.arange(8, device=bits.device))",
        "(padded << 7 - torch.arange(8, device=bits.device))",
        "tests/quantization/test_sparse.py -k older_compressed_tensors",
    ),
    Fault(
        "fake quantization passes no gradient",
        "minillm/quantization/methods/straight_through.py",
        "return gradients[0], None",
        "return gradients[0] * 0, None",
        "tests/quantization/test_straight_through.py -k gradient",
    ),
    Fault(
        "modules that share an input get the last of their scales",
        "minillm/model/loader.py",
        "torch.maximum(self.weight.input_scale, scale.to(self.weight.input_scale), out=self.weight.input_scale)",
        "self.weight.input_scale.copy_(scale)",
        "tests/quantization/test_what_changes_nothing.py -k largest_of_their",
    ),
    Fault(
        "a zero point of a symmetric weight is dropped",
        "minillm/quantization/checkpoints/compressed_tensors.py",
        "is not None and zeros.float().any():",
        "is None:",
        "tests/quantization/test_what_changes_nothing.py -k change_results",
    ),
)
