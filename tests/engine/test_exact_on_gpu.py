"""With `exact`, kernels and graphs of a real GPU give a position's logits the same bits in every batch."""

import pytest

from minillm import LLM, SamplingParams
from minillm.errors import ConfigError
from minillm.model.loader import EMBEDDED
from tests import models
from tests.engine.bits import Bits
from tests.engine.test_exact import computed


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "name", ["gemma-multi-query", "gemma2-grouped-untied", "gemma3-multi-query", "llama3-tied-head-dim"]
)
def test_logits_have_the_same_bits_on_a_gpu_however_a_request_is_computed(name, dtype, eager, tmp_path):
    models.make(name).save_pretrained(tmp_path)
    made = {"device": "cuda", "dtype": dtype, "exact": True, "enforce_eager": eager}
    bits, tokens = computed(tmp_path, ["alone", "together", "in chunks", "drafted"], 60, **made)
    assert bits.others == [] and bits.repeated > 300
    assert all(each == tokens["alone"] for each in tokens.values())


def test_the_shape_of_gemma_2b_has_the_same_bits_in_every_batch():
    made = {"device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "max_model_len": 4096, "exact": True}
    prompts = [[7 + i % 5, *range(10, 10 + 31 * i)] for i in range(64)]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    bits = Bits()
    for rows, budget in ((1, 16384), (8, 256), (64, 16384)):
        with bits.recorded(), LLM("gemma-2b", max_num_seqs=rows, max_num_batched_tokens=budget, **made) as llm:
            llm.generate(prompts, params)
    assert bits.others == [] and bits.repeated > 300


def test_what_has_no_kernel_is_refused_on_a_gpu(tmp_path):
    models.make("gemma3-multi-head-untied").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no attention kernel for heads of 12 numbers"):
        LLM(tmp_path, device="cuda", exact=True, max_model_len=64)
    with pytest.raises(ConfigError, match="no kernels for float64 on a GPU"):
        LLM(EMBEDDED, device="cuda", exact=True, dtype="float64")
