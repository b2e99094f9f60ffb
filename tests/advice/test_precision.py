"""`quantization="auto"` is replaced by a method that suits the model, the GPU and its traffic."""

import logging
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from minillm import LLM, cli
from minillm.advice import precision
from minillm.advice.choosing import GPUS, Traffic, recommend
from minillm.config import EngineConfig
from minillm.errors import ConfigError
from minillm.model.config import PRESETS
from minillm.model.loader import EMBEDDED

AUTO = {"quantization": "auto"}
GEMMA_2B = PRESETS["gemma-2b"]


@pytest.fixture
def on_gpu(monkeypatch):
    """Let torch find a GPU of a name with so many bytes."""

    def found(name: str = "NVIDIA H200", nbytes: float = 141e9) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=nbytes))

    return found


def chosen(place="gemma-2b", device="cuda", traffic=None, **options) -> tuple[str | None, str | None]:
    config = precision.resolved(EngineConfig.of(**{**AUTO, **options}), place, device, traffic)
    return config.quantization, config.quantized_head


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.INFO, "minillm.advice.precision")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("rows", [1, 16, 1024])
def test_it_is_what_is_recommended_for_so_many_requests(rows, on_gpu, logged):
    on_gpu()
    wanted = recommend(GEMMA_2B, GPUS["H200"], Traffic(rows, 512, 256), kv_cache_dtype="auto")
    assert chosen(max_num_seqs=rows) == (wanted.quantization, wanted.quantized_head)
    (line,) = logged()
    assert line.startswith(
        f"quantization=auto chose {wanted.best.name} for {rows:,} requests (max_num_seqs) of 512 + 256 tokens, "
        f"{wanted.best.speed:.2f} times as fast as bf16 by estimate. In bf16 on NVIDIA H200, "
    )


def test_one_request_and_many_get_different_methods(on_gpu):
    on_gpu()
    assert chosen(max_num_seqs=1)[1] is not None, "one request reads the head in every step"
    assert chosen(max_num_seqs=1) != chosen()


def test_the_traffic_of_a_plan_counts(on_gpu, logged):
    on_gpu()
    chosen(traffic=Traffic(3, 100, 20))
    assert "for 3 requests (max_num_seqs) of 100 + 20 tokens" in logged()[0]


def test_requests_are_as_short_as_the_model_demands(on_gpu, logged):
    on_gpu()
    chosen(max_model_len=300)
    assert "of 150 + 150 tokens" in logged()[0]


def test_a_format_of_the_head_that_was_set_stays(on_gpu):
    on_gpu()
    assert chosen(max_num_seqs=1, quantized_head="fp8") == (chosen(max_num_seqs=1)[0], "fp8")


def test_the_memory_of_this_gpu_counts(on_gpu):
    on_gpu(nbytes=3.5e9)
    assert chosen(max_num_seqs=64)[0] is not None, "bf16 weights take 5 GB"
    on_gpu(nbytes=1e9)
    with pytest.raises(ConfigError, match="no precision with loss='low' leaves room for a request on NVIDIA H200"):
        chosen()


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("NVIDIA H200", {"device": "cpu"}, "on a CPU the weights keep their dtype"),
        ("NVIDIA H200", {"dtype": "float16"}, "the weights stay in float16, since kernels for quantized ones need"),
        ("GeForce 256", {}, "the weights stay in bfloat16, since the rates of GeForce 256 are not known"),
    ],
)
def test_weights_stay_as_they_are_where_a_reason_is_against_it(name, options, why, on_gpu, logged):
    on_gpu(name)
    assert chosen(**options) == (None, None)
    assert logged()[0].startswith(f"quantization=auto: {why}")


def test_a_quantized_checkpoint_stays_as_it_is(on_gpu, logged):
    on_gpu()
    place = EMBEDDED.parent / "checkpoints" / "gptq-v2"
    assert chosen(place, dtype="bfloat16") == (None, None)
    assert logged() == ["quantization=auto: gptq-v2 is quantized already and stays as it is"]


def test_other_values_are_not_touched(on_gpu):
    config = EngineConfig.of(quantization="int8")
    assert precision.resolved(config, "gemma-2b", "cuda") is config


def test_an_engine_on_a_cpu_keeps_its_dtype(logged):
    with LLM(device="cpu", num_blocks=8, **AUTO) as llm:
        assert llm.config.quantization is None
        assert {weight.format.name for weight in llm.engine.model.weights()} == {"dense"}
    assert len(logged()) == 1


def test_a_command_says_what_was_chosen_next_to_its_output():
    package = logging.getLogger("minillm")
    handlers, level = package.handlers, package.level
    try:
        words = ["generate", "Once upon", "--max-tokens", "3", "--quantization", "auto", "--device", "cpu"]
        done = CliRunner().invoke(cli.app, words)
    finally:
        package.handlers, package.level = handlers, level
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith("quantization=auto: on a CPU") and "quantization" not in done.stdout
