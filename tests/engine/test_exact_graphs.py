"""The kernels and graphs of a GPU with `exact`, interpreted and emulated."""

import sys

import pytest

from minillm import LLM, SamplingParams
from tests import models
from tests.emulated_graphs import emulated_graphs
from tests.engine.bits import Bits
from tests.kernels.fixed_products import products_in_order  # noqa: F401

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")
from minillm.ops import exact_triton  # noqa: E402

TABLE = sys.modules["minillm.ops.table"]  # `minillm.ops.table` is its function


@pytest.mark.proof
@pytest.mark.usefixtures("products_in_order")
def test_interpreted_kernels_give_the_same_bits_in_graphs_of_any_size(tmp_path, monkeypatch):
    models.make("gemma-multi-query").save_pretrained(tmp_path)
    prompts = [[5, 9, 2], [5, 9, 2, 7, 7, 30, 4], [61]]
    params = SamplingParams(max_tokens=4, temperature=0.7, seed=1, ignore_eos=True)
    made = {"device": "cpu", "dtype": "float32", "block_size": 4, "num_blocks": 60, "max_model_len": 48}
    bits, tokens = Bits(), []
    with emulated_graphs():
        monkeypatch.setattr(TABLE, "_module", lambda *_: (exact_triton, ""))
        monkeypatch.setattr(TABLE, "_sets", dict(TABLE._sets))
        TABLE._sets.pop(("cpu", True), None)
        for rows, budget in ((1, 64), (3, 64), (3, 5)):
            options = made | {"max_num_seqs": rows, "max_num_batched_tokens": budget, "enable_prefix_caching": rows > 1}
            with bits.recorded(), LLM(tmp_path, exact=True, **options) as llm:
                assert llm.engine.model.ops.origin["linear"][0] == "exact_triton"
                assert llm.engine.executor.runner.graphs.decodes.single_row is None
                tokens.append([each.token_ids for each in llm.generate(prompts, params)])
    assert bits.others == [] and bits.repeated >= 10
    assert tokens[0] == tokens[1] == tokens[2]
