"""Faults in quantized weights: codes, scales, rows, recipes."""

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
        "codes are truncated instead of rounded",
        INT8,
        ".round().to(torch.int8)",
        ".to(torch.int8)",
        "tests/quantization/test_int8.py -k nearest",
    ),
    Fault(
        "every part of a matrix overwrites its first rows",
        INT8,
        "start = rows.start",
        "start = 0",
        "tests/quantization/test_int8.py -k part",
    ),
    Fault(
        "selected rows get the scales of the first rows",
        INT8,
        "scales = self.scales[rows]",
        "scales = self.scales[: len(rows)]",
        "tests/quantization/test_int8.py -k rows_equal",
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
)
