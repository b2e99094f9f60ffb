"""`minillm quantize --rotate`: the same model, without outliers of activations; and models with planted outliers."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from typer.testing import CliRunner

import minillm
from minillm import LLM, SamplingParams
from minillm.calibration import quantize as module
from minillm.calibration.forward import CalibrationRun, hidden_states
from minillm.calibration.methods import Method, MethodRecipe
from minillm.calibration.outliers import LARGER, plant_outliers
from minillm.calibration.quantize import calibration_rows, quantize
from minillm.calibration.rotation import rotate
from minillm.cli import app
from minillm.errors import ConfigError
from minillm.evaluate import load_text
from minillm.model import load_model
from minillm.model.decoder import PROJECTIONS
from minillm.model.loader import EMBEDDED
from minillm.model.saver import save_model
from minillm.model.single_row import SingleRow
from minillm.quantization import Activations, Int8, Recipe
from minillm.tokenizer import Tokenizer
from tests import models
from tests.proofs import only_in_proofs
from tests.quantization.test_models import logits, twin

ROTATED = [name for name in models.CONFIGS if not name.startswith(("gemma2", "gemma3"))]
REFUSED = [name for name in models.CONFIGS if name.startswith(("gemma2", "gemma3"))]


def norm(x, weight, eps):
    """An RMS norm in x's dtype; the engine's is float32 in every dtype."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def exact():
    """Run float64 models in float64 throughout."""
    return minillm.using(rms_norm=norm, add_rms_norm=lambda x, r, weight, eps: (norm(x + r, weight, eps), x + r))


def made(family, place):
    models.make(family).save_pretrained(place)
    return load_model(place, dtype="float64")


def ids(rows=2, length=20, vocab=96):
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(0))


def outputs(model, rows):
    with torch.inference_mode():
        return model.logits(hidden_states(model, rows))


def divergence(model, rows):
    """The mean KL divergence of the embedded model's next tokens from another's."""
    wanted, found = (outputs(each, rows).log_softmax(-1) for each in (load_model(dtype="float32"), model))
    return (wanted.exp() * (wanted - found)).sum(-1).mean().item()


@pytest.fixture(scope="module")
def held_out():
    tokenizer = Tokenizer.from_pretrained(EMBEDDED)
    return calibration_rows(tokenizer, load_text(), 4, 256, seed=5)


@pytest.fixture(scope="module")
def outliers(tmp_path_factory):
    """The embedded model with planted outliers."""
    model, place = load_model(dtype="float32"), tmp_path_factory.mktemp("planted") / "outliers"
    plant_outliers(model)
    save_model(model, EMBEDDED, place, torch.float32)
    return place


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("family", ROTATED)
def test_a_rotated_model_computes_the_same_with_other_weights(family, down, tmp_path):
    model = made(family, tmp_path)
    before = {address: weight.weight.clone() for address, weight in model.addressed().items()}
    with exact():
        wanted = outputs(model, ids())
        rotate(model, torch.float64, down=down)
        torch.testing.assert_close(outputs(model, ids()), wanted, rtol=0, atol=1e-9)
    for address, weight in model.addressed().items():
        assert (weight.weight - before[address]).abs().mean() > 0.1 * before[address].abs().mean(), address
    tied = model.config.tie_word_embeddings
    assert (model.head is model.embedding) == tied
    assert model.config.rotations == (*["residual"] * tied, *["down"] * down)


@pytest.mark.parametrize("family", ["gemma-grouped", "llama-biases", "mistral-grouped", "qwen3-sliding-tied"])
def test_the_engine_gives_a_saved_rotated_models_tokens(family, tmp_path):
    model = made(family, tmp_path / "dense")
    rotate(model, torch.float64, down=True)
    save_model(model, tmp_path / "dense", tmp_path / "rotated")
    prompts, params = ids(5, 17).tolist(), SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    found = []
    for place in ("dense", "rotated"):
        with LLM(tmp_path / place, dtype="float64", device="cpu") as llm:
            assert ("down" in llm.engine.model.config.rotations) == (place == "rotated")
            found.append([completion.token_ids for each in prompts for completion in llm.generate(each, params)])
    assert found[0] == found[1] and len(set(map(tuple, found[0]))) == 5


def test_the_seed_chooses_the_signs(tmp_path):
    found = []
    for seed in (3, 3, 4):
        model = made("llama-biases", tmp_path)
        rotate(model, torch.float64, seed=seed, down=True)
        found.append(model.layers[0].qkv.weight)
    assert found[0].equal(found[1]) and not torch.allclose(found[0], found[2])


@pytest.mark.parametrize(
    "method",
    [
        *(Method("w8a8"), Method("int4", group_size=64), Method("smoothquant"), Method("fp8")),
        *only_in_proofs(Method("gptq", group_size=64)),
    ],
)
def test_a_rotated_quantized_engine_equals_its_dequantized_twin(method, tmp_path):
    quantize(None, MethodRecipe.of(method, head="int8", rotate=True), tmp_path / "out", rows=2, length=32)
    model = load_model(tmp_path / "out", dtype="float64")
    int8_inputs = method.name in ("w8a8", "smoothquant")
    assert model.config.rotations == (("residual", "down") if int8_inputs else ("residual",))
    quantized = logits(model)
    torch.testing.assert_close(quantized, logits(twin(model)), rtol=0, atol=1e-9)
    with minillm.using(hadamard=lambda x, inverse=False: x):
        assert not torch.allclose(quantized, logits(model), atol=0.1), "the rotations are not made"


def test_the_rotated_model_that_is_calibrated_is_the_one_that_is_saved(tmp_path, monkeypatch):
    models.make("llama-biases").to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    kept = []

    def rotated(model, *others, **options):
        rotate(model, *others, **options)
        kept.extend((model, copy.deepcopy(model.embedding.weight)))

    monkeypatch.setattr(module.rotation, "rotate", rotated)
    quantize(tmp_path / "dense", MethodRecipe.of(Method("w8a8"), rotate=True), tmp_path / "out")
    again = load_model(tmp_path / "out", dtype="float32")
    assert again.embedding.weight.equal(kept[1])
    for one, other in zip(kept[0].tensors(), again.tensors(), strict=True):
        assert one.float().equal(other.float())


def test_weight_only_methods_of_untied_models_need_no_rotation_online_and_load_in_transformers(tmp_path):
    made("llama-biases", tmp_path / "dense")
    quantize(tmp_path / "dense", MethodRecipe.of(Method("int4", group_size=16), rotate=True), tmp_path / "out")
    model = load_model(tmp_path / "out", dtype="float32")
    assert model.config.rotations == () and "rotations" not in json.loads((tmp_path / "out/config.json").read_text())
    other = models.reference(tmp_path / "out", dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = other(ids(1)).logits[0]
    torch.testing.assert_close(outputs(model, ids(1)), wanted, rtol=0, atol=2e-4)
    assert not torch.allclose(outputs(load_model(tmp_path / "dense", dtype="float32"), ids(1)), wanted, atol=1e-2)


def test_other_programs_refuse_a_model_with_rotations_online(tmp_path):
    quantize(None, MethodRecipe.of(Method("int8"), rotate=True), tmp_path / "out")
    with pytest.raises(ValueError, match="minillm-rotated"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_the_fused_step_of_one_request_does_not_take_models_with_rotations_online(tmp_path):
    model = load_model(dtype="float32")
    assert SingleRow.fits(model)
    for name in ("residual", "down"):
        model.config = replace(model.config, rotations=(name,))
        assert not SingleRow.fits(model)


@pytest.mark.parametrize("family", REFUSED)
def test_models_with_norms_after_attention_and_mlp_are_refused_by_name(family, tmp_path, monkeypatch):
    models.make(family).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(module, "quantize_layer", lambda *_: pytest.fail("work has begun"))
    words = ["quantize", str(tmp_path / "model"), "--method", "int8", "--rotate", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    assert f"Gemma{family[5]}ForCausalLM cannot be rotated: it has norms between" in " ".join(result.stderr.split())


def test_a_rotated_model_is_not_rotated_again(tmp_path):
    model = load_model(dtype="float32")
    rotate(model, torch.float32, down=False)
    save_model(model, EMBEDDED, tmp_path / "rotated", torch.float32)
    with pytest.raises(ConfigError, match="rotated already"):
        quantize(tmp_path / "rotated", MethodRecipe.of(Method("int8"), rotate=True), tmp_path / "out")


def test_an_unknown_rotation_is_refused(tmp_path):
    config = json.loads((EMBEDDED / "config.json").read_text())
    for given, message in (
        (["keys"], "rotations has 'keys'; supported are: residual, down"),
        ("down", "rotations must be a list of strings"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"rotations": given}))
        with pytest.raises(ConfigError, match=message):
            load_model(tmp_path, load_format="dummy")


def test_planted_outliers_change_no_output_and_reach_every_product(held_out, outliers):
    for dtype in ("float64", "float32"):
        plain, model = load_model(dtype=dtype), load_model(outliers, dtype=dtype)
        assert outputs(plain, held_out[:1]).equal(outputs(model, held_out[:1]))
    run, other = CalibrationRun(plain, held_out[:1]), CalibrationRun(model, held_out[:1])
    for before, after in zip(plain.layers, model.layers, strict=True):
        found = run.record(before, {name: getattr(before, name) for name in PROJECTIONS})
        planted = other.record(after, {name: getattr(after, name) for name in PROJECTIONS})
        for name in PROJECTIONS:
            ratio = planted[name].largest / found[name].largest
            assert sorted(set(ratio.tolist())) == [1.0, LARGER] and 0.01 < (ratio > 1).float().mean() < 0.02
        run.advance(before)
        other.advance(after)


@pytest.mark.proof
def test_smoothquant_and_rotation_each_undo_planted_outliers(held_out, outliers, tmp_path):
    eight_bits = Recipe({"layers.*": Int8(Activations("int8"))})
    without = divergence(load_model(dtype="float32", recipe=eight_bits), held_out)
    found = {}
    for name, method, rotated in (
        ("plain", "w8a8", False),
        ("rotated", "w8a8", True),
        ("smoothed", "smoothquant", False),
        ("both", "smoothquant", True),
    ):
        quantize(outliers, MethodRecipe.of(Method(method), rotate=rotated), tmp_path / name, rows=4, length=128)
        found[name] = divergence(load_model(tmp_path / name, dtype="float32"), held_out)
    assert found["plain"] > 10 * without, (found, without)
    assert all(found[name] < found["plain"] / 10 for name in ("rotated", "smoothed", "both")), found


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_eight_bit_activations_lose_less_after_the_rotation_of_the_down_projections_inputs(seed, held_out, tmp_path):
    found, recipe = [], Recipe({"layers.*": Int8(Activations("int8"))})
    for down in (False, True):
        model = load_model(dtype="float32")
        rotate(model, torch.float32, seed=seed, down=down)
        save_model(model, EMBEDDED, tmp_path / str(down))
        found.append(divergence(load_model(tmp_path / str(down), dtype="float32", recipe=recipe), held_out))
    assert found[1] < 0.5 * found[0], found
