"""Faults in quantized weights: codes, scales, rows, recipes."""

from . import Fault

INT8, RECIPE = "minillm/quantization/int8.py", "minillm/quantization/recipe.py"

FAULTS = (
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
        INT8,
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
        "int4 codes are rounded for scales that are not those stored",
        "minillm/quantization/int4.py",
        "scale_dtype = self.format.scale_dtype or self.scales.dtype",
        "scale_dtype = self.format.scale_dtype",
        "tests/quantization/test_int4.py -k as_they_are_stored",
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
        "minillm/quantization/fp8.py",
        "self.scales[span] = codes.scales",
        "self.scales[:] = codes.scales[:1]",
        "tests/quantization/test_fp8.py -k module",
    ),
    Fault(
        "gptq updates the columns before instead of those after",
        "minillm/quantization/methods/gptq.py",
        "work[:, stop:] -= errors @ factor[start:stop, stop:]",
        "work[:, stop:] += errors @ factor[start:stop, stop:]",
        "tests/quantization/test_calibrated_methods.py -k papers_equations",
    ),
    Fault(
        "awq keeps the strongest scales instead of the best",
        "minillm/quantization/methods/awq.py",
        "if best is None or error < best[0]:",
        "if best is None or True:",
        "tests/quantization/test_calibrated_methods.py -k best_of_the_strengths",
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
        "return unpack(packed.t().contiguous().view(torch.uint8)).t()[:rows].contiguous()",
        "return unpack(packed.contiguous().view(torch.uint8)).reshape(-1, packed.shape[1])[:rows].contiguous()",
        "tests/quantization/test_compressed_tensors.py -k library_compressed",
    ),
    Fault(
        "ignored modules are read as quantized",
        "minillm/quantization/checkpoints/compressed_tensors.py",
        "if any(_rank(name, module) != NO_MATCH for name in self.ignored):",
        "if any(name == module == '' for name in self.ignored):",
        "tests/quantization/test_compressed_tensors.py -k ignored",
    ),
    Fault(
        "the last matching pattern wins instead of the first",
        RECIPE,
        "in self.rules.items() if fnmatchcase",
        "in reversed(self.rules.items()) if fnmatchcase",
        "tests/quantization/test_recipe.py",
    ),
    Fault(
        "every piece of a tensor overwrites the first piece",
        "minillm/quantization/weight.py",
        "done += len(piece)",
        "done += 0",
        "tests/model/test_loader.py -k read_in_pieces",
    ),
    Fault(
        "samples are the first rows of the first steps",
        "minillm/quantization/methods/statistics.py",
        "chosen = torch.randperm(len(x), generator=self._generator)[:keep]",
        "chosen = torch.arange(len(x))[:: max(1, len(x) // 16)][:keep]",
        "tests/calibration/test_quantize.py -k distinct",
    ),
    Fault(
        "int4 codes are rounded for scales in the precision of calibration",
        "minillm/quantization/int4.py",
        "self.format.scale_dtype or self.scales.dtype",
        "self.scales.dtype",
        "tests/calibration/test_quantize.py -k as_they_are_saved",
    ),
)
