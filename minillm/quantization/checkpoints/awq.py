"""AWQ's layout: that of AutoAWQ ("gemm") and auto-round.  Lesson 06.

A module's tensors:

    qweight  [in, rows / 8] int32       codes from 0 to 15; a number holds eight rows of one input
    qzeros   [groups, rows / 8] int32   zero points, in the same order
    scales   [groups, rows]

The eight rows of a number are not in order: from its lowest bits, they are 0, 2, 4, 6, 1, 3, 5, 7, which suits a kernel
that converts two codes at a time. Read in plain order, rows get each other's codes, and nothing in the file shows it.

Fields: `bits` and `group_size` (older files: `w_bit` and `q_group_size`), `zero_point` (false: symmetric, all zero
points are 8), `version`, and `modules_to_not_convert`, whose entries are whole parts of names: "layers.1" does not mean
"layers.10". They are in config.json, in quant_config.json, or in both.
https://github.com/casper-hansen/AutoAWQ, modules/linear/gemm.py; Lin et al. 2023, "AWQ"
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.quantization.dense import Dense
from minillm.quantization.int4 import Int4
from minillm.quantization.weight import Codes, Format
from minillm.values import shown

from .fields import check_groups, check_no_bias, flag, gather, group_size, names
from .layout import SCALES, Layout, Stored
from .packing import check_zero_points_are, unpack_numbers

METHOD, FILE = "awq", "quant_config.json"
FIELDS = {
    "bits": ("bits", "w_bit"),
    "group_size": ("group_size", "q_group_size"),
    "zero_point": ("zero_point",),
    "sym": ("sym",),
    "version": ("version", "checkpoint_format", "format"),
    "lm_head": ("lm_head",),
    "modules_to_not_convert": ("modules_to_not_convert",),
}
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the rows in a number, the first row first


class Awq(Layout):
    """The layout that AWQ configurations describe. configs: where each was read -> its fields. Raises ConfigError."""

    def __init__(self, configs: Mapping[str, Mapping[str, Any]]):
        config = gather(configs, FIELDS)
        if type(config.get("bits")) is not int or config["bits"] != 4:
            raise ConfigError(f"bits must be 4, not {shown(config.get('bits'))}; other widths are not supported")
        version = config.get("version", "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            raise ConfigError(
                f"version {shown(version)} is not supported; supported is gemm: convert the checkpoint with the tool "
                "that wrote it"
            )
        self.symmetric = not flag(config, "zero_point", True)
        if flag(config, "sym", self.symmetric) != self.symmetric:
            raise ConfigError(
                f"sym and zero_point are both {shown(config['sym'])}, but they are opposites: correct one"
            )
        self.group_size = group_size(config, -1)
        self.with_head = flag(config, "lm_head", False)
        self.ignored = names(config, "modules_to_not_convert")

    def format(self, module: str, inputs: int) -> Format:
        if module.endswith("embed_tokens") or (module == "lm_head" and not self.with_head):
            return Dense()
        if any(f".{name}." in f".{module}." for name in self.ignored):
            return Dense()
        size = inputs if self.group_size == -1 else self.group_size
        check_groups(size, inputs, module)
        return Int4(size, self.symmetric)

    def tensors(self, module: str, rows: int, inputs: int) -> dict[str, Stored]:
        groups = 1 if self.group_size == -1 else inputs // self.group_size
        return {
            "qweight": Stored((inputs, -(-rows // 8)), (torch.int32,)),
            "qzeros": Stored((groups, -(-rows // 8)), (torch.int32,)),
            "scales": Stored((groups, rows), SCALES),
            "bias": Stored((rows,), SCALES, required=False),
        }

    def codes(self, module: str, inputs: int, tensors: Mapping[str, Tensor]) -> Codes:
        check_no_bias(module, tensors.get("bias"))
        scales = tensors["scales"].t()
        codes, zeros = (_unpack_rows(tensors[name], len(scales)) for name in ("qweight", "qzeros"))
        if self.symmetric:
            check_zero_points_are((0,), zeros, module, stored=8)
        return Codes(codes, scales, None if self.symmetric else zeros)


def _unpack_rows(numbers: Tensor, rows: int) -> Tensor:
    """[n, rows / 8] int32 -> [rows, n] int8, from -8 to 7."""
    unpacked = unpack_numbers(numbers).view(len(numbers), -1, 8)[:, :, PLACES]
    return unpacked.flatten(1)[:, :rows].t().contiguous()
