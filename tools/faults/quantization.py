"""Faults in quantized weights: codes, scales, which rows they belong to."""

from . import Fault

INT8, RECIPE = "minillm/quantization/int8.py", "minillm/quantization/recipe.py"

FAULTS = (
    Fault(
        "all rows share one scale",
        INT8,
        "largest = weight.abs().amax(dim=1)",
        "largest = weight.abs().amax().repeat(len(weight))",
        "tests/quantization/test_int8.py",
    ),
    Fault(
        "codes are cut off instead of rounded",
        INT8,
        ".round().to(torch.int8)",
        ".to(torch.int8)",
        "tests/quantization/test_int8.py -k nearest",
    ),
    Fault(
        "a part of a matrix is written over its first rows",
        INT8,
        "start = rows.start",
        "start = 0",
        "tests/quantization/test_int8.py -k part",
    ),
    Fault(
        "chosen rows get the scales of the first ones",
        INT8,
        "scales = self.scales[rows]",
        "scales = self.scales[: len(rows)]",
        "tests/quantization/test_int8.py -k rows_equal",
    ),
    Fault(
        "the last pattern that matches decides",
        RECIPE,
        "in self.rules.items() if fnmatchcase",
        "in reversed(self.rules.items()) if fnmatchcase",
        "tests/quantization/test_recipe.py",
    ),
    Fault(
        "each piece of a tensor is written where the first one went",
        "minillm/quantization/weight.py",
        "done += len(piece)",
        "done += 0",
        "tests/model/test_loader.py -k read_in_pieces",
    ),
)
