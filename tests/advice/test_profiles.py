"""Profiles: options for the hardware found. GPUs are simulated: torch is asked only for a name and its memory."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from minillm import LLM, cli, server
from minillm.advice import profiles
from minillm.advice.choosing import GPUS, Traffic, recommend
from minillm.errors import ConfigError
from minillm.model.config import PRESETS
from minillm.model.loader import EMBEDDED

GEMMA_2B = PRESETS["gemma-2b"]


@pytest.fixture
def on_gpu(monkeypatch):
    """Let torch find a GPU of a name with so many bytes."""

    def found(name: str = "NVIDIA H200", nbytes: float = 141e9) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=nbytes))

    return found


def names(choice: profiles.ProfileChoice) -> list[str]:
    return [each.name for each in choice.profiles]


def test_without_a_gpu_nothing_is_rounded():
    choice = profiles.find(device="cpu")
    assert names(choice) == ["exact"] and choice.chosen.name == "exact"
    assert choice.chosen.options["dtype"] == "float32" and "gpu_memory_utilization" not in choice.chosen.options
    assert "Found no GPU" in str(choice) and "on a CPU the weights keep their dtype" in str(choice)
    with LLM(num_blocks=8, **choice.chosen.options) as llm:  # they are the engine's options
        assert choice.chosen.weight_bytes == llm.engine.model.nbytes


def test_a_large_gpu_takes_the_exact_profile_and_lists_those_for_other_purposes(on_gpu):
    on_gpu()
    choice = profiles.find("gemma-2b")
    assert names(choice) == ["exact", "latency", "throughput", "compact"] and choice.chosen.name == "exact"
    exact, latency, throughput, compact = choice.profiles
    assert exact.options == {
        "device": "cuda", "dtype": "bfloat16", "quantization": None, "quantized_head": None, "kv_cache_dtype": "auto",
        "gpu_memory_utilization": 0.9,
    }  # fmt: skip
    for profile, requests in ((latency, 1), (throughput, 1024)):
        best = recommend(GEMMA_2B, GPUS["H200"], Traffic(requests, 512, 256))
        found = profile.options
        assert (found["quantization"], found["quantized_head"]) == (best.quantization, best.quantized_head)
        assert (found["kv_cache_dtype"], profile.speed) == (best.kv_cache_dtype, best.best.speed)
    assert compact.weight_bytes <= min(each.weight_bytes for each in choice.profiles)
    assert compact.options["kv_cache_dtype"] == "fp8" and compact.requests > 1.9 * exact.requests
    lines = str(choice).splitlines()
    assert [line[:2] for line in lines[1:5]] == ["> ", "  ", "  ", "  "]
    assert "Found NVIDIA H200 with 141 GB, of which weights, steps and cache may take 90%." in lines


def test_a_gpu_too_small_for_the_exact_weights_takes_the_compact_profile(on_gpu):
    on_gpu(nbytes=4.5e9)
    choice = profiles.find("gemma-2b")
    assert choice.chosen.name == "compact" and choice.chosen.requests > 0
    assert choice.profiles[0].requests == 0
    assert "exact leaves no room for a request of 8,192 tokens, so auto takes compact" in str(choice)


def test_options_that_were_set_stay_in_every_profile(on_gpu):
    on_gpu()
    choice = profiles.find("gemma-2b", max_model_len=512, kv_cache_dtype="int8", gpu_memory_utilization=0.5)
    assert {each.options["kv_cache_dtype"] for each in choice.profiles} == {"int8"}
    assert {each.options["gpu_memory_utilization"] for each in choice.profiles} == {0.5}
    assert choice.profiles[0].requests > profiles.find("gemma-2b").profiles[0].requests


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gemma-2b", {"quantization": "int8", "quantized_head": "int8"}),
        (EMBEDDED.parent / "checkpoints" / "gptq-v2", {}),
    ],
    ids=["set", "checkpoint"],
)
def test_weights_that_have_a_format_leave_nothing_to_choose(model, options, on_gpu):
    on_gpu()
    choice = profiles.find(model, **options)
    assert names(choice) == ["given"] and choice.named("auto") is choice.chosen
    assert choice.chosen.options["quantization"] == options.get("quantization")
    assert 0 < choice.chosen.weight_bytes < 2.6e9


def test_an_unknown_gpu_has_the_exact_profile_only(on_gpu):
    on_gpu("GeForce 256")
    choice = profiles.find("gemma-2b")
    assert names(choice) == ["exact"] and "the rates of GeForce 256 are not known" in str(choice)
    with pytest.raises(ConfigError, match="no profile 'latency' here; choose from exact, auto; .*GeForce 256"):
        choice.named("latency")
    with pytest.raises(ConfigError, match="no profile 'fast' here; choose from exact, auto$"):
        choice.named("fast")


# ---- minillm serve


@pytest.fixture
def invoke() -> Iterator:
    """Run a command; the log that it sets up is taken down again."""
    package = logging.getLogger("minillm")
    handlers, level = package.handlers, package.level
    yield lambda *words: CliRunner().invoke(cli.app, words)
    package.handlers, package.level = handlers, level


def test_serve_lists_profiles_and_exits(monkeypatch, invoke):
    monkeypatch.setattr(server, "serve", lambda *model, **options: pytest.fail("it must not serve"))
    done = invoke("serve", "--list-profiles", "--device", "cpu")
    assert done.exit_code == 0 and "> exact  float32" in done.output


def test_serve_passes_the_profiles_name_on_and_its_options_are_taken_but_those_that_are_set_win(
    monkeypatch, on_gpu, invoke, caplog
):
    on_gpu()
    served: dict = {}
    monkeypatch.setattr(server, "serve", lambda model, **options: served.update(options, model=model))
    words = ["serve", "gemma-2b", "--profile", "throughput", "--kv-cache-dtype", "int8", "--max-num-seqs", "64"]
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    assert (served["model"], served["profile"]) == ("gemma-2b", "throughput")
    given = {"kv_cache_dtype": "int8", "max_num_seqs": 64}
    assert given.items() <= served.items() and "quantization" not in served
    with caplog.at_level(logging.INFO, "minillm"):
        taken = profiles.apply("gemma-2b", "throughput", given)
    want = profiles.find("gemma-2b", **given).named("throughput").options
    assert taken["quantization"] == want["quantization"] is not None
    assert given.items() <= taken.items() and "profile throughput: " in caplog.text


def test_an_unknown_profile_is_an_error(invoke):
    done = invoke("serve", "--profile", "fast", "--device", "cpu")
    assert done.exit_code == 2 and "no profile 'fast' here; choose from exact, auto" in done.output
