"""Products with quantized weights on a GPU equal the reference's, which dequantizes."""

import pytest
import torch

from minillm.ops import reference
from minillm.quantization import Activations, Fp8, Int4, Int8

triton = pytest.importorskip("minillm.ops.triton", reason="triton is not installed here")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here")
FORMATS = {
    "fp8 by channel": Fp8(activations=Activations("fp8")),
    "fp8 by tensor": Fp8("tensor", Activations("fp8")),
    "fp8, static": Fp8(activations=Activations("fp8", static=True)),
    "fp8 weights only": Fp8(),
    "int8": Int8(Activations("int8")),
    "int8, static": Int8(Activations("int8", static=True)),
    "int8 weights only": Int8(),
    "int4": Int4(64),
    "int4 with zero points": Int4(32, symmetric=False),
    "int4 with an order": Int4(32, act_order=True),
    "int4, small groups": Int4(16),
    "int4 with fp8 inputs": Int4(64, activations=Activations("fp8")),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 64, 65, 200])
@pytest.mark.parametrize("format", FORMATS)
def test_a_quantized_product_equals_the_reference(format, rows, bias):
    generator = torch.Generator("cuda").manual_seed(rows)
    weight = FORMATS[format].empty(96, 64, bias, dtype=torch.bfloat16, device=torch.device("cuda"))
    weight.randomize(generator)
    x = torch.randn(rows, 64, generator=generator, device="cuda").bfloat16()
    if format == "int4 with an order":
        weight.order = torch.randperm(64, generator=generator, device="cuda")
    if weight.input_scale is not None:
        weight.input_scale.fill_(0.02)
    found, wanted = triton.linear(x, weight), reference.linear(x, weight)
    assert found.dtype == torch.bfloat16 and found.shape == (rows, 96)
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
    assert triton.linear(x[None], weight).shape == (1, rows, 96)


@pytest.mark.parametrize("format", ["int8 weights only", "fp8 weights only", "int4"])
def test_rows_of_a_quantized_table_equal_the_reference(format):
    weight = FORMATS[format].empty(96, 64, False, dtype=torch.bfloat16, device=torch.device("cuda"))
    weight.randomize(torch.Generator("cuda").manual_seed(0))
    ids = torch.tensor([95, 0, 3, 3], device="cuda")
    found, wanted = triton.embedding(ids, weight, 8.0), reference.embedding(ids, weight, 8.0)
    torch.testing.assert_close(found, wanted, rtol=0.01, atol=0)
