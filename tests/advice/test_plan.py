"""A plan records what it was made for and is rejected anywhere else."""

from dataclasses import replace

import pytest

from minillm import LLM
from minillm.advice import plan
from minillm.advice.plan import Plan
from minillm.config import EngineConfig, Traffic
from minillm.errors import ConfigError
from minillm.kernels import launch_configs
from minillm.model.loader import EMBEDDED, read_config

TINY = read_config(EMBEDDED)
TRAFFIC = Traffic(concurrency=6, input_len=40, output_len=24)
OPTIONS = {"dtype": "float64", "max_num_seqs": 6, "max_num_batched_tokens": 96, "block_size": 8}
H200 = {"name": "NVIDIA H200", "capability": "9.0", "memory_gib": 140}
DECODE = {
    "kernel": "decode_attention",
    "sizes": {"dim": 64, "dtype": "float64", "rows": 16, "programs": 6, "longest": 64},
    "launch": {"rows": 16, "keys": 32, "warps": 4, "stages": 2, "splits": 2},
}


def made(**changes) -> Plan:
    return replace(Plan.made_here(TINY, TRAFFIC, OPTIONS, "cpu"), **changes)


def test_a_plan_survives_being_written_and_read(tmp_path):
    written = made(gpu=H200, graphs=[[6, 16], [4, 16]], launches=[DECODE], memory={"weights": 7})
    written.write(tmp_path / "a.plan.json")
    assert Plan.read(tmp_path / "a.plan.json") == written


def test_a_plans_options_become_the_engines_options(tmp_path):
    made().write(tmp_path / "a.plan.json")
    with LLM(device="cpu", plan=str(tmp_path / "a.plan.json")) as llm:
        assert {name: getattr(llm.config, name) for name in OPTIONS} == OPTIONS
        assert llm.generate("Once", progress=False)[0].token_ids


def test_an_option_that_contradicts_the_plan_is_rejected_by_name():
    assert made().configure(EngineConfig(seed=3, max_num_seqs=6), TINY, "cpu").max_num_batched_tokens == 96
    with pytest.raises(ConfigError, match="made for max_num_seqs=6, not 7: leave max_num_seqs out, or build another"):
        made().configure(EngineConfig(max_num_seqs=7), TINY, "cpu")


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (H200, None),
        (None, H200),
        (H200, {**H200, "name": "NVIDIA L4"}),
        (H200, {**H200, "memory_gib": 70}),
        (H200, {**H200, "capability": "8.9"}),
    ],
)
def test_a_plan_for_another_gpu_is_rejected_with_both_gpus_named(there, here, monkeypatch):
    monkeypatch.setattr(plan, "gpu_here", lambda device: here)
    with pytest.raises(ConfigError) as refused:
        made(gpu=there).check(TINY, "cuda")
    for words in (plan._words(there), f"(here: {plan._words(here)})", "--input-len 40 --output-len 24 --concurrency 6"):
        assert words in str(refused.value)
    made(gpu=here).check(TINY, "cuda")


@pytest.mark.parametrize("package", ["torch", "triton", "minillm"])
def test_a_plan_for_other_versions_is_rejected(package):
    old = made(versions=plan.versions_here() | {package: "0.0.1"})
    with pytest.raises(ConfigError, match=rf"made for {package} 0.0.1 \(here: "):
        old.check(TINY, "cpu")


def test_a_plan_for_another_model_shape_is_rejected_before_weights_are_read(tmp_path):
    made().write(tmp_path / "a.plan.json")
    with pytest.raises(ConfigError) as refused:  # the preset has no weights: reading them would raise a different error
        LLM("gemma-2b", device="cpu", plan=str(tmp_path / "a.plan.json"))
    assert f"hidden_size {TINY.hidden_size} (this one: 2048)" in str(refused.value)
    with pytest.raises(ConfigError, match="windows"):
        made().check(replace(TINY, windows=(8,) * TINY.num_layers), "cpu")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "is not JSON"),
        (lambda text: "[1]", "has format None"),
        (
            lambda text: text.replace('"format": 2', '"format": 9'),
            "has format 9, but this minillm reads",
        ),
        (lambda text: text.replace('"graphs"', '"grahps"'), "is damaged .*grahps"),
        (
            lambda text: text.replace('"input_len": 40', '"input_len": "40"'),
            "is damaged .input_len must be a whole",
        ),
        (lambda text: text.replace('"max_num_seqs": 6', '"max_num_seqs": -6'), "is damaged .max_num_seqs must be"),
        (lambda text: text.replace('"block_size"', '"blok_size"'), "is damaged .*blok_size"),
        (lambda text: text.replace('"keys": 32', '"keys": 33'), "decode_attention has the invalid keys 33"),
        (lambda text: text.replace('"dim": 64', '"dim": [64]'), "is damaged .the sizes of decode_attention"),
    ],
)
def test_a_damaged_plan_file_is_rejected_with_a_remedy(damage, message, tmp_path):
    made(launches=[DECODE]).write(tmp_path / "a.plan.json")
    whole = (tmp_path / "a.plan.json").read_text()
    assert damage(whole) != whole
    (tmp_path / "a.plan.json").write_text(damage(whole))
    with pytest.raises(ConfigError, match=message) as refused:
        Plan.read(tmp_path / "a.plan.json")
    assert "a.plan.json" in str(refused.value) and "`minillm build`" in str(refused.value)


def test_a_missing_plan_file_names_the_command_that_writes_one(tmp_path):
    with pytest.raises(ConfigError, match="none.json .No such file.*`minillm build` writes one"):
        Plan.read(tmp_path / "none.json")


def test_a_plans_launches_are_the_ones_the_kernels_use():
    paged_attention = pytest.importorskip("minillm.kernels.paged_attention", reason="triton is not installed here")
    (key,) = made(launches=[DECODE]).table()
    assert key == launch_configs.problem("decode_attention", **DECODE["sizes"])
    with launch_configs.using(made(launches=[DECODE]).table()):
        chosen = launch_configs.tuned(
            "decode_attention", paged_attention.AttentionConfig(16, 16, 4, 2), **DECODE["sizes"]
        )
    assert chosen == paged_attention.AttentionConfig(**DECODE["launch"])
    for wrong in ({"kernel": "rms_norm"}, {"launch": {"tile": 4}}):
        with pytest.raises(ConfigError, match="no kernel has a launch"):
            made(launches=[DECODE | wrong]).table()
