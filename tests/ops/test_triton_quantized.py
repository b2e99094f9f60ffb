"""Products on FP8 and integer tensor cores equal the reference's, which dequantizes."""

import pytest
import torch

from minillm.ops import reference
from minillm.quantization import Activations, Fp8, Int8

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
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 100])
@pytest.mark.parametrize("format", FORMATS)
def test_a_quantized_product_equals_the_reference(format, rows, bias):
    generator = torch.Generator("cuda").manual_seed(rows)
    weight = FORMATS[format].empty(96, 64, bias, dtype=torch.bfloat16, device=torch.device("cuda"))
    weight.randomize(generator)
    x = torch.randn(rows, 64, generator=generator, device="cuda").bfloat16()
    if weight.input_scale is not None:
        weight.input_scale.fill_(0.02)
    found, wanted = triton.linear(x, weight), reference.linear(x, weight)
    assert found.dtype == torch.bfloat16 and found.shape == (rows, 96)
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
    assert triton.linear(x[None], weight).shape == (1, rows, 96)
