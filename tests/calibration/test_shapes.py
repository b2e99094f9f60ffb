"""Methods with their defaults on shapes that 128 does not divide, and static scales of tokens unlike the others."""

import pytest
import torch
from typer.testing import CliRunner

from minillm import LLM
from minillm.calibration import quantize as module
from minillm.calibration.methods import Method, MethodRecipe
from minillm.calibration.quantize import check_methods, fitted, quantize, quantize_calibrated
from minillm.cli import app
from minillm.errors import ConfigError
from minillm.model import Model, load_model
from minillm.model.config import ModelConfig
from minillm.model.decoder import PROJECTIONS
from minillm.quantization import Int4
from minillm.quantization.methods.statistics import InputStatistics
from tests import models

SHAPES = {  # hidden, intermediate, heads, head_dim -> the largest group that divides the inputs of all matrices
    (576, 1536, 9, 64): 64,  # SmolLM2-135M
    (960, 2560, 15, 64): 64,  # SmolLM2-360M
    (2048, 16384, 8, 256): 128,  # Gemma 2B
    (640, 2048, 4, 256): 128,
    (512, 1024, 6, 80): 32,  # heads of 80: attention_out reads 480
    (896, 4864, 14, 64): 128,
}


def empty(hidden, inner, heads, head_dim, **more):
    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=96, hidden_size=hidden, intermediate_size=inner, num_layers=2,
        num_heads=heads, num_kv_heads=1, head_dim=head_dim, max_model_len=64, **more,
    )  # fmt: skip
    return Model(config, dtype=torch.float32, device="meta", max_model_len=64)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_group_is_by_default_as_large_as_divides_all_inputs(shape):
    for name in ("int4", "awq", "gptq", "w4a8"):
        assert (
            fitted(empty(*shape), MethodRecipe.of(Method(name))).at("layers.1.down").format().group_size
            == (SHAPES[shape])
        )


def test_each_rule_of_a_recipe_has_the_group_that_fits_its_own_weights():
    rules = {"*.down": Method("int4"), "layers.0.*": Method("awq"), "layers.*": Method("gptq", group_size=16)}
    found = fitted(empty(576, 1536, 9, 64), MethodRecipe(rules))
    sizes = {address: found.at(f"layers.{address}").group_size for address in ("0.down", "1.down", "0.qkv", "1.qkv")}
    assert sizes == {"0.down": 128, "1.down": 128, "0.qkv": 64, "1.qkv": 16}


def test_inputs_that_no_default_divides_are_refused_with_a_group_that_does():
    with pytest.raises(ConfigError, match="layers.0.qkv: .* 48 inputs .*; powers of two that do: 16"):
        fitted(empty(48, 80, 2, 24), MethodRecipe.of(Method("int4")))


def test_the_command_and_the_engine_run_int4_with_their_defaults_on_such_a_shape(tmp_path):
    shape = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 16}
    models.make("gemma-multi-head-untied", **shape).save_pretrained(tmp_path / "dense")
    words = ["quantize", str(tmp_path / "dense"), "--method", "int4", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert load_model(tmp_path / "out", dtype="float32").layers[0].down.format == Int4(64)
    with LLM(tmp_path / "dense", quantization="int4", device="cpu") as llm:
        assert llm.engine.model.layers[0].down.format == Int4(64)


@pytest.mark.parametrize(("kind", "largest", "warned"), [("w8a8", 2.0, 0), ("w8a8", 100.0, 4), ("fp8", 100.0, 0)])
def test_a_static_scale_that_leaves_a_typical_token_few_steps_is_warned_about(kind, largest, warned, caplog):
    model = load_model(dtype="float32")
    methods = check_methods(model, MethodRecipe.of(Method(kind, static=True)))
    seen = {}
    for name in PROJECTIONS:
        x = torch.randn(400, getattr(model.layers[0], name).shape[1], generator=torch.Generator().manual_seed(0))
        x = x.clamp(-1, 1)
        x[0, 0] = largest
        seen[name] = InputStatistics(x.shape[1], x.device)
        seen[name].add(x, keep=64)
    with torch.inference_mode():
        quantize_calibrated(model, 0, methods, seen, torch.float32)
    assert len(caplog.messages) == warned
    if warned:
        assert caplog.messages[0].startswith("layers.0.qkv: the largest input is 100 times that of a typical token")
        assert "on the 1.3 lowest steps" in caplog.messages[0] and "Without static" in caplog.messages[0]


@pytest.mark.parametrize(("large", "rows"), [(10**9, 64), (1, 16)])
def test_a_large_model_is_calibrated_on_fewer_rows_on_a_cpu(large, rows, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "LARGE", large)
    monkeypatch.setattr(module, "CalibrationRun", lambda model, ids: pytest.fail(f"{len(ids)} rows"))
    for given, wanted in ((None, rows), (3, 3)):
        with pytest.raises(pytest.fail.Exception, match=f"^{wanted} rows"):
            quantize(None, MethodRecipe.of(Method("awq")), tmp_path / "out", rows=given, device="cpu")


def test_static_scales_with_dynamic_down_projections_are_a_recipe(tmp_path):
    rules = '{"layers.*.down": "w8a8", "layers.*": {"method": "w8a8", "static": true}}'
    (tmp_path / "recipe.json").write_text(rules, encoding="utf-8")
    quantize(None, MethodRecipe.read(tmp_path / "recipe.json"), tmp_path / "out", rows=1, length=32)
    layer = load_model(tmp_path / "out", dtype="float32").layers[0]
    static = {name: getattr(layer, name).format.activations.static for name in PROJECTIONS}
    assert static == {"qkv": True, "attention_out": True, "gate_up": True, "down": False}
