"""Rounding agrees with gguf's and torchao's, kept in data/checkpoints/rounding.safetensors."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minillm.quantization import Int4, int8
from minillm.quantization.int4 import round_to_int4, scales_of

THEIRS = load_file(Path(__file__).resolve().parents[2] / "data" / "checkpoints" / "rounding.safetensors")
WEIGHT = THEIRS["weight"]  # [8, 32]: one group in each row


def test_int8_codes_and_scales_equal_torchaos():
    found = int8.quantize(WEIGHT)
    assert found.codes.equal(THEIRS["torchao.int8.codes"])
    torch.testing.assert_close(found.scales.flatten(), THEIRS["torchao.int8.scales"].flatten(), rtol=1e-6, atol=0)


def test_int8_codes_equal_ggufs_whose_scales_are_rounded_to_half_precision():
    found, scales = int8.quantize(WEIGHT), THEIRS["gguf.Q8_0.scales"].float()
    torch.testing.assert_close(found.scales, scales, rtol=2**-11, atol=0)
    assert found.codes.equal((THEIRS["gguf.Q8_0"] / scales).round().to(torch.int8))


@pytest.mark.parametrize(("kind", "symmetric"), [("int4", True), ("int4-zeros", False)])
def test_int4_codes_scales_and_zero_points_equal_torchaos(kind, symmetric):
    grouped = WEIGHT.view(8, 1, 32)
    scales, zeros = scales_of(grouped, Int4(32, symmetric))
    torch.testing.assert_close(scales.flatten(), THEIRS[f"torchao.{kind}.scales"].flatten(), rtol=1e-6, atol=0)
    if zeros is not None:
        assert zeros.flatten().equal(THEIRS[f"torchao.{kind}.zeros"].flatten().to(torch.int8))
    differs = round_to_int4(grouped, scales, zeros).view(8, 32) != THEIRS[f"torchao.{kind}.codes"]
    # A row's largest weight is 7.5 symmetric steps from zero, as near to 7 as to 8; torchao multiplies by 1 / scale.
    steps = (WEIGHT / scales).abs()[differs]
    torch.testing.assert_close(steps, torch.full_like(steps, 7.5))
    assert len(steps) <= (8 if symmetric else 0)


def test_int4_codes_equal_ggufs_for_its_scales():
    """Q4_0 lets the largest weight be exactly -8 steps from zero, so its scales may be negative."""
    scales = THEIRS["gguf.Q4_0.scales"].float()
    found = round_to_int4(WEIGHT.view(8, 1, 32), scales, None).view(8, 32)
    assert (scales < 0).any() and (scales > 0).any()
    assert found.equal((THEIRS["gguf.Q4_0"] / scales).round().to(torch.int8))
