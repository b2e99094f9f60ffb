"""Compositions call the current operations, and run a device's kernels only in place of the engine's own."""

import json

import pytest
import torch

import minillm
from minillm import ops
from minillm.calibration.forward import hidden_states
from minillm.kv_cache.layer_cache import CacheSpec
from minillm.model.loader import load_model
from minillm.ops import reference
from minillm.ops.compositions import COMPOSITIONS
from minillm.ops.table import _sets
from minillm.quantization import Activations, Dense, Fp8, Int4, Int8, Recipe
from tests.kernels.compare import rotations
from tests.proofs import pairwise

pytestmark = pytest.mark.key

kernels = pytest.importorskip("minillm.ops.triton", reason="triton is not installed here")
from minillm.kernels import paged_attention, quantized_inputs  # noqa: E402  needs triton
from minillm.ops import triton_linear  # noqa: E402
from tests.proofs import only_in_proofs  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where kernels run; interpreted on a CPU
BF16 = torch.bfloat16
W8A8, FP8 = Int8(Activations("int8")), Activations("fp8")
ON_CODES = {
    "w8a8": W8A8,
    "w8a8, static": Int8(Activations("int8", static=True)),
    "w4a8": Int4(32, activations=Activations("int8")),
    "w4a8 with fp8": Int4(32, act_order=True, activations=FP8),
    "fp8": Fp8(activations=FP8),
    "fp8, static": Fp8("tensor", Activations("fp8", static=True)),
}
EVERY = ON_CODES | {"dense": Dense(), "int8": Int8(), "int4": Int4(32), "fp8 weights": Fp8()}
IN, OUT = 64, 32


@pytest.fixture
def on_gpu(monkeypatch) -> ops.OperationSet:
    """A GPU's operations, in the table for this test; interpreted if there is no GPU."""
    made = ops.OperationSet.of("cuda")
    monkeypatch.setitem(_sets, ("cuda", False), made)
    return made


def weight_of(format, dtype=BF16, bias=True):
    generator = torch.Generator(DEVICE).manual_seed(0)
    weight = format.empty(OUT, IN, bias, dtype=dtype, device=torch.device(DEVICE))
    weight.randomize(generator)
    if weight.input_scale is not None:
        weight.input_scale.fill_(0.02)
    if getattr(weight, "order", None) is not None:
        weight.order = torch.randperm(IN, generator=generator, device=DEVICE)
    return weight


def rows(tokens, columns=IN, dtype=BF16):
    return torch.randn(tokens, columns, device=DEVICE).to(dtype)


def norm():
    return torch.rand(IN, device=DEVICE) + 0.5


def every_composition(operations, weight, tokens=3):
    """The results of all of them: without an addition before the norm, with one, and of the gated activation."""
    torch.manual_seed(1)
    x, residual, gate_up = rows(tokens, dtype=weight.dtype), rows(tokens, dtype=weight.dtype), rows(tokens, 2 * IN)
    return (
        *operations.normed_linear(None, residual, norm(), 1e-6, weight),
        *operations.normed_linear(x, residual, norm(), 1e-6, weight),
        operations.gated_linear(gate_up.to(weight.dtype), "gelu_tanh", weight),
    )


@pytest.fixture
def quantized_alone(monkeypatch) -> list:
    """Shapes of the rows that a kernel of its own quantized."""
    shapes = []

    def quantize_rows(x, *rounding):
        shapes.append(tuple(x.shape))
        return quantized_inputs.quantize_rows(x, *rounding)

    monkeypatch.setattr(triton_linear, "quantize_rows", quantize_rows)
    return shapes


def same_bits(found, wanted):
    return all(one.equal(other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("tokens", [1, 3, *only_in_proofs(65)])  # few rows and many have products of their own
@pytest.mark.parametrize("format", ON_CODES)
def test_fused_kernels_give_the_bits_of_separate_ones(format, tokens, on_gpu, quantized_alone):
    weight = weight_of(ON_CODES[format])
    fused = every_composition(on_gpu, weight, tokens)
    assert not quantized_alone
    on_gpu.fused = {}
    assert same_bits(fused, every_composition(on_gpu, weight, tokens))
    assert quantized_alone == [(tokens, IN)] * 3
    by_reference = every_composition(ops.OperationSet.of("meta"), weight, tokens)
    # The interpreter cuts FP8 numbers off. On a GPU, norms that differ in their last bit can round to neighboring FP8
    # numbers, which are up to an eighth apart.
    bound = {"cpu": 0.2, "cuda": 0.1}[DEVICE] if "fp8" in format else 0.02
    for found, wanted in zip(fused, by_reference, strict=True):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        assert (found - wanted).norm() <= bound * wanted.norm()


@pairwise(
    {
        "format": list(EVERY),
        "name": ["rms_norm", "add_rms_norm", "gated_activation", "linear"],
        "capturable": [False, True],
    }
)
def test_what_replaces_a_part_of_a_composition_is_called(format, name, capturable, on_gpu):
    weight = weight_of(EVERY[format])
    with minillm.using(capturable=capturable, **{name: getattr(reference, name)}) as used:
        every_composition(on_gpu, weight)
    assert used.calls == {name: 3 if name == "linear" else 1}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_replacement_decides_the_result(device, on_gpu):
    weight = weight_of(W8A8)
    with minillm.using(linear=lambda x, weight: x + 1):
        normed, total = ops.on(device).normed_linear(rows(2), rows(2) * 0 + 2, norm(), 1e-6, weight)
        gated = ops.on(device).gated_linear(torch.zeros(2, 2 * IN, dtype=BF16, device=DEVICE), "silu", weight)
    assert normed.shape == total.shape == (2, IN) and (gated == 1).all()


def test_a_stub_falls_back_to_the_engines_own(on_gpu):
    def stub(gate_up, activation):
        raise minillm.NotSolvedYet("gate")

    weight = weight_of(W8A8)
    wanted = every_composition(on_gpu, weight)
    with minillm.using(gated_activation=stub) as used:
        found = every_composition(on_gpu, weight)
    assert used.not_solved == {"gated_activation": "gate"}
    assert same_bits(found, wanted)


def test_a_format_with_its_own_linear_gets_numbers(on_gpu, monkeypatch):
    """Registering another implementation for a class replaces all of the engine's for it."""
    seen = []

    def mine(x, weight):
        seen.append(x.dtype)
        return reference.linear(x, weight)

    weight = weight_of(W8A8)
    monkeypatch.setitem(triton_linear.linear.versions, type(weight), mine)
    every_composition(on_gpu, weight)
    assert seen == [BF16] * 3


@pytest.mark.parametrize("case", ["float32", "no rows", "rows longer than a program holds"])
def test_what_the_fused_kernels_cannot_do_runs_separately(case, on_gpu, monkeypatch):
    dtype = torch.float32 if case == "float32" else BF16
    weight = weight_of(W8A8, dtype)
    if case.startswith("rows"):
        monkeypatch.setattr(kernels.gated, "MOST_COLUMNS", IN - 1)
        assert kernels.gated_linear(rows(2, 2 * IN), "silu", weight) is None
    tokens = 0 if case == "no rows" else 2
    found = every_composition(on_gpu, weight, tokens)
    wanted = every_composition(ops.OperationSet.of("meta"), weight, tokens)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert (one - other).norm() <= 0.02 * other.norm()


@pytest.mark.parametrize("format", ["w4a8 with fp8", "fp8", "fp8, static", W8A8])
def test_gpus_without_fp8_or_int8_multiply_what_the_codes_stand_for(format, on_gpu, quantized_alone, monkeypatch):
    lacking = "has_int8" if format == W8A8 else "has_fp8"
    monkeypatch.setattr(triton_linear, lacking, lambda _: False)
    weight = weight_of(format if format == W8A8 else ON_CODES[format])
    found = every_composition(on_gpu, weight)
    assert triton_linear.on_codes(rows(2), weight) is None and not quantized_alone
    for one, other in zip(found, every_composition(ops.OperationSet.of("meta"), weight), strict=True):
        assert (one - other).norm() <= 0.1 * other.norm()


@pytest.mark.parametrize("replaced", [None, "rotary_embedding", "write_kv"])
@pytest.mark.parametrize("cache", ["auto", "int8", "fp8"])
def test_rotation_and_cache_write_are_one_kernel_unless_one_is_replaced(cache, replaced, on_gpu, monkeypatch):
    fused = []
    own = on_gpu.fused["rotary_write"]
    on_gpu.fused["rotary_write"] = lambda *given: (fused.append(1), own(*given))[1]
    spec = CacheSpec.of(cache, 1, 32, BF16)
    held = [spec.allocate(1, 4, torch.device(DEVICE)) for _ in "ab"]
    given = (
        *(torch.randn(3, heads, 32, device=DEVICE).to(BF16) for heads in (2, 1, 1)),
        rotations(3, 32, DEVICE).to(BF16),
    )
    slots = torch.arange(3, device=DEVICE)
    with minillm.using(**{replaced: getattr(reference, replaced)} if replaced else {}) as used:
        found, keys = on_gpu.rotary_write(*given, held[0], slots, True, True)
    assert len(fused) == (replaced is None) and list(used.calls.values()) == [1] * (replaced is not None)
    wanted, wanted_keys = ops.OperationSet.of("meta").rotary_write(*given, held[1], slots, True, True)
    assert (found - wanted).norm() <= 0.01 * wanted.norm()
    assert (keys - wanted_keys).norm() <= 0.01 * wanted_keys.norm()
    block = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    for one, other in zip(*(each.read(block) for each in held), strict=True):
        assert other.float().norm() > 0 and (one.float() - other.float()).norm() <= 0.05 * other.float().norm()


@pytest.mark.parametrize("replaced", [None, "write_kv", "prefill_attention"])
@pytest.mark.parametrize("cache", ["auto", "int8"])
@pytest.mark.parametrize("whole", [0, 1])
def test_new_prompts_attend_to_the_keys_that_were_computed_unless_the_cache_has_others(
    whole, cache, replaced, on_gpu, monkeypatch
):
    seen = []
    own = paged_attention.prefill_attention
    monkeypatch.setattr(paged_attention, "prefill_attention", lambda *given: seen.append(given[4:]) or own(*given))
    held = CacheSpec.of(cache, 1, 32, BF16).allocate(1, 4, torch.device(DEVICE))
    q, k, v = (torch.randn(3, heads, 32, device=DEVICE).to(BF16) for heads in (2, 1, 1))
    reference.write_kv(k, v, held, torch.arange(3, device=DEVICE))
    ints = {"dtype": torch.int32, "device": DEVICE}
    rows = ops.Rows(torch.zeros(1, 1, **ints), torch.tensor([3], **ints), torch.tensor([0, 3], **ints), 3, whole)
    options = ops.AttentionOptions(0.2)
    with minillm.using(**{replaced: getattr(reference, replaced)} if replaced else {}) as used:
        found = on_gpu.prompt_attention(q, k, v, held, rows, options)
    assert sum(used.calls.values()) == (replaced == "prefill_attention")
    assert seen == [] if replaced == "prefill_attention" else len(seen) == 1
    from_new = whole == 1 and cache == "auto" and replaced is None
    assert (seen == [((k, v),)]) if from_new else seen in ([], [()])
    wanted = reference.prefill_attention(q, held, rows, options)
    assert (found.float() - wanted.float()).norm() <= 0.02 * wanted.float().norm()


def test_heads_without_a_kernel_are_rotated_and_written_one_after_the_other(on_gpu):
    cache = CacheSpec.of("int8", 1, 12, BF16).allocate(1, 4, torch.device(DEVICE))
    q, k, v, angles = (torch.randn(3, heads, 12, device=DEVICE).to(BF16) for heads in (2, 1, 1, 2))
    slots = torch.arange(3, device=DEVICE)
    assert on_gpu.fused["rotary_write"](q, k, v, angles, cache, slots, True, True) is None
    assert on_gpu.rotary_write(q, k, v, angles, cache, slots, True, False)[0].shape == q.shape
    assert cache.k_scale.flatten()[:3].gt(0).all()


def test_compositions_are_no_operations():
    assert not {"normed", *COMPOSITIONS} & {
        *ops.names(),
        *(row["name"] for row in ops.table()),
    }
    with (
        pytest.raises(minillm.overrides.OverrideError, match="no part is called 'gated_linear'"),
        minillm.using(gated_linear=print),
    ):
        pass


@pytest.fixture(scope="module", params=["gemma", "norms after", "rotated"])
def small(request, tmp_path_factory):
    """A model of two layers in W8A8: Gemma; with norms after attention and MLP; or with a rotation before `down`."""
    config = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64,
    }  # fmt: skip
    config["architectures"] = ["Gemma2ForCausalLM" if request.param == "norms after" else "GemmaForCausalLM"]
    if request.param == "rotated":
        config["rotations"] = ["down"]
    directory = tmp_path_factory.mktemp("small")
    (directory / "config.json").write_text(json.dumps(config))
    model = load_model(
        directory, load_format="dummy", dtype="bfloat16", device=DEVICE, recipe=Recipe({"layers.*": W8A8})
    )
    for norm in model.norms():
        norm.uniform_(0.5, 1.5)
    return request.param, model


def run(model):
    with torch.inference_mode():
        return hidden_states(model, torch.arange(6, device=DEVICE).view(2, 3))


def test_a_model_quantizes_the_inputs_of_three_products_in_the_kernel_before_them(
    small, on_gpu, quantized_alone, monkeypatch
):
    kind, model = small
    monkeypatch.setattr(model, "ops", on_gpu)
    fused = run(model)
    attended, activated = (6, 64), (6, 96)
    assert quantized_alone == ([attended, activated] if kind == "rotated" else [attended]) * 2
    monkeypatch.setattr(on_gpu, "fused", {})
    assert run(model).equal(fused)
    assert len(quantized_alone) > 8


def test_a_model_calls_each_replaced_operation_as_often_as_before(small, on_gpu, monkeypatch):
    kind, model = small
    monkeypatch.setattr(model, "ops", on_gpu)
    names = ("rms_norm", "add_rms_norm", "gated_activation", "linear", "hadamard")
    with minillm.using(**{name: getattr(reference, name) for name in names}) as used:
        run(model)
    afterwards = 4 if kind == "norms after" else 0
    wanted = {"rms_norm": 1 + afterwards, "add_rms_norm": 4, "gated_activation": 2, "linear": 8}
    assert used.calls == wanted | {"hadamard": 2 if kind == "rotated" else 0}
