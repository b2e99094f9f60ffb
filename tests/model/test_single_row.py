"""The fused single-row decode step gives the logits, keys and values of the unfused step."""

import copy
import itertools

import numpy as np
import pytest
import torch

from minillm import SamplingParams
from minillm.adapters.peft import read_adapter
from minillm.adapters.slots import AdapterSlots
from minillm.model.decoder import PROJECTIONS
from minillm.model.loader import load_model
from minillm.quantization import Recipe
from minillm.scheduler.step import NewRow
from tests import models, peft_files
from tests.model.test_decoder import Paged
from tests.proofs import only_in_proofs

single_row = pytest.importorskip("minillm.model.single_row", reason="triton is not installed here")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here: test_engine_on_gpu.py runs the fused step"
)
FITTING = ("gemma-multi-query", "gemma-multi-head-untied", "llama3-tied-head-dim", "mistral-no-window")
# With norms of queries and keys or of layers' outputs, windows, soft caps, local angles, and biases.
WITH_MORE_PARTS = (
    "gemma2-multi-query", "gemma2-grouped-untied", "gemma3-multi-query", "gemma3-grouped-scaled", "qwen3-grouped",
    "qwen3-sliding-tied",
)  # fmt: skip


def changes_of(name: str) -> dict:
    """A first layer and a last one are enough where all layers are alike."""
    return {"num_hidden_layers": 2} if name in FITTING else {}


def load(name: str, folder, recipe=None, **changes):
    models.make(name, **changes).save_pretrained(folder)
    return load_model(folder, dtype="float32", recipe=recipe)


@pytest.mark.parametrize("name", models.CONFIGS)
def test_models_fit_if_their_head_dim_is_a_power_of_two_from_16(name, tmp_path):
    assert single_row.SingleRow.fits(load(name, tmp_path)) == (name in FITTING + WITH_MORE_PARTS)


INT4 = {"format": "int4", "group_size": 32}
WITH_ZEROS = INT4 | {"symmetric": False}


RULES = [
    {"*.attention_out": INT4, "head": "int8"},
    {"*.attention_out": WITH_ZEROS},
    {"layers.*": {"format": "int8", "activations": "int8"}},
    {"*": {"format": "fp8", "activations": "fp8"}},
    {"*.down": {"format": "fp8", "scales": "tensor", "activations": "fp8"}, "*": "int8"},
]
PARTS = [{"*.down": "int8", "head": "int8"}, {"*": "fp8"}]  # formats that occur above with others


SHORT = [
    (FITTING[0], {}),
    (FITTING[0], RULES[1]),
    ("gemma3-grouped-scaled", {}),
]
MORE = [
    *itertools.product(FITTING, [{}, {"*": "int8"}]),
    *((FITTING[0], rules) for rules in RULES + PARTS),
    *((name, {}) for name in WITH_MORE_PARTS),
    ("qwen3-sliding-tied", {"*": "int8"}),
    ("gemma2-multi-query", {"*": {"format": "fp8", "activations": "fp8"}}),
]


@pytest.mark.parametrize(("name", "rules"), SHORT + only_in_proofs(*(case for case in MORE if case not in SHORT)))
def test_logits_keys_and_values_equal_those_of_the_unfused_step(name, rules, tmp_path):
    equal_to_the_unfused_step(load(name, tmp_path, Recipe(rules), **changes_of(name)))


@pytest.mark.parametrize("rules", [{}, *only_in_proofs({"*": "int8"}, {"*": "fp8"})])
def test_biases_of_all_projections_are_added(rules, tmp_path):
    """Also that of a down projection with rows too long for registers."""
    model = load("llama-biases", tmp_path, Recipe(rules), head_dim=16, intermediate_size=4128, num_hidden_layers=1)
    layers = [getattr(layer, name) for layer in model.layers for name in PROJECTIONS]
    assert all(weight.bias is not None and weight.bias.any() for weight in layers)
    equal_to_the_unfused_step(model, tokens=(7,))


def equal_to_the_unfused_step(model, adapters=None, tokens=(7, 50)):
    """tokens: one of each step. adapters: slots of which the row has the first, the second, and none, in turns."""
    assert single_row.SingleRow.fits(model)
    paged = Paged(model)
    row = paged.admit()
    paged.forward({}, {row: list(range(5, 45))})
    fused = single_row.SingleRow(model, adapters and adapters.factors)
    for step, token in enumerate(tokens):
        caches, batch = copy.deepcopy(paged.caches), paged.batch({row: [token]}, {})
        if adapters is not None:
            slot = (1, 2, 0)[step]
            adapters.occupy([NewRow(0, np.zeros(0), 0, SamplingParams(), 0, (), (slot, slot))])
            batch.adapted = adapters.of_tokens(torch.tensor([0]), adapters.reach(np.array([0])))
        wanted = model.logits(model.forward(batch, paged.caches))
        found = fused.logits(batch, caches)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        for mine, theirs in zip(caches, paged.caches, strict=True):
            torch.testing.assert_close(mine.k, theirs.k, rtol=1e-4, atol=1e-4, equal_nan=True)
            torch.testing.assert_close(mine.v, theirs.v, rtol=1e-4, atol=1e-4, equal_nan=True)


ADAPTED = ("gemma-multi-query", "gemma2-grouped-untied", "qwen3-grouped")


@pytest.mark.parametrize("name", [ADAPTED[0], *only_in_proofs(*ADAPTED[1:])])
def test_what_an_adapter_adds_is_in_the_same_launches(name, tmp_path):
    model = load(name, tmp_path / "model", **changes_of(name))
    equal_to_the_unfused_step(model, slots(model, tmp_path), tokens=(7, 50, 9))


@pytest.mark.proof
def test_what_an_adapter_adds_to_long_rows_and_before_biases(tmp_path):
    changes = {"head_dim": 16, "intermediate_size": 4128, "num_hidden_layers": 1}
    model = load("llama-biases", tmp_path / "model", **changes)
    equal_to_the_unfused_step(model, slots(model, tmp_path), tokens=(7, 50, 9))


def test_adapters_of_quantized_weights_are_for_the_unfused_step(tmp_path):
    model = load("gemma-multi-query", tmp_path / "model", Recipe({"layers.1.down": "int8"}))
    adapters = slots(model, tmp_path)
    fused, paged = single_row.SingleRow(model, adapters.factors), Paged(model)
    assert not fused.takes_adapters
    batch = paged.batch({paged.admit(): [7]}, {})
    batch.adapted = adapters.of_tokens(torch.tensor([0]), adapters.reaches[-1])
    with pytest.raises(ValueError, match="adapters of dense weights"):
        fused.logits(batch, paged.caches)


def slots(model, folder):
    """Two adapters of a model in `folder`, of ranks 12 and 5, the second of some modules alone."""
    targets = {1: peft_files.PROJECTIONS, 2: ("q_proj", "v_proj", "up_proj", "down_proj")}
    adapters = AdapterSlots(model, 1, 2, 12)
    for load, rank in ((1, 12), (2, 5)):
        place = folder / f"adapter-{load}"
        peft_files.write(place, folder / "model", load, targets=targets[load], rank=rank)
        adapters.add(load, read_adapter(place, model.config))
    return adapters


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype"),
    [
        ("gemma-multi-query", "int8"),
        *only_in_proofs(*itertools.product(["llama3-tied-head-dim"], ["int8", "fp8"]), ("gemma-multi-query", "fp8")),
    ],
)
def test_a_quantized_cache_gets_the_codes_of_the_unfused_step(name, kv_cache_dtype, tmp_path):
    models.make(name, **changes_of(name)).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32", kv_cache_dtype=kv_cache_dtype)
    assert single_row.SingleRow.fits(model)
    paged = Paged(model)
    blocks, block_size = paged.caches[0].k.shape[:2]
    paged.caches = [model.cache_spec.allocate(blocks, block_size, model.device) for _ in paged.caches]
    row = paged.admit()
    paged.forward({}, {row: list(range(5, 45))})
    caches, batch = copy.deepcopy(paged.caches), paged.batch({row: [7]}, {})
    wanted = model.logits(model.forward(batch, paged.caches))
    found = single_row.SingleRow(model).logits(batch, caches)
    # Sums in another order may round a number to the next code.
    assert (found - wanted).norm() <= 0.02 * wanted.norm()
    every = torch.arange(blocks)[None]
    for mine, theirs in zip(caches, paged.caches, strict=True):
        assert not mine.k_scale.equal(torch.zeros_like(mine.k_scale))
        for one, other in zip(mine.read(every), theirs.read(every), strict=True):
            assert (one - other).norm() <= 0.02 * other.norm()


def test_a_model_with_any_weight_in_another_format_does_not_fit(tmp_path):
    models.make("gemma-multi-query").save_pretrained(tmp_path)
    inputs, others_inputs = ({"format": a, "activations": b} for a, b in (("int8", "fp8"), ("fp8", "int8")))
    ordered, small = INT4 | {"act_order": True}, INT4 | {"group_size": 16}
    others = {
        "layers.1.qkv": "pruned",
        "layers.1.down": inputs,
        "layers.0.down": others_inputs,
        "head": "sparse24",
        "*.attention_out": ordered,
        "*.down": small,
    }
    for address, format in others.items():
        model = load_model(tmp_path, dtype="float32", recipe=Recipe({address: format}))
        assert not single_row.SingleRow.fits(model), address
