"""The ablation changes one thing at a time, restores it, and its torch attention is correct."""

import json
from dataclasses import replace

import pytest
import torch

from minillm import LLM
from minillm.bench import ablation
from minillm.bench.ablation import Setting
from minillm.kv_cache import LayerCache
from minillm.ops import AttentionOptions, Rows, on, reference


def test_every_setting_is_measured_on_every_workload_here(model_directory, tmp_path, capsys):
    path = tmp_path / "ablation.json"
    options = {"scale": 32, "requests": 3, "repeat": 2, "load_format": "dummy", "device": "cpu"}
    record = ablation.run(model_directory, **options, json_path=path)
    assert record == json.loads(path.read_text()) == json.loads(capsys.readouterr().out.splitlines()[-1])
    found = {(row["workload"], row["group"], row["name"]) for row in record["results"]}
    names = {("run-ahead", "0"), ("run-ahead", "1"), ("run-ahead", "3")}
    names |= {("operations", "reference"), ("operations", "fast CPU")}
    assert found == {(work, *name) for work in ("single_128_256_x1", "chat_128_128_x3000") for name in names}
    assert {row["requests"] for row in record["results"]} == {1, 3}
    for row in record["results"]:
        assert len(row["runs"]) == 2
        assert row["output_tokens_per_s"] == pytest.approx(row["output_tokens"] / row["seconds"], rel=0.1)


def test_on_a_gpu_settings_of_a_group_differ_in_one_thing():
    with LLM(device="cpu") as llm:
        config = llm.model_config
    for requests in (1, 256):
        for group, settings in ablation.groups("cuda", config, requests).items():
            values = [vars(setting) for setting in settings.values()]
            differing = {name for name in values[0] if len({each[name] for each in values}) > 1}
            # Fusion has two steps: from plain torch to one kernel per operation, and for one request to the fused step.
            steps = [("fusion", 1), ("CUDA graphs", requests)]  # no graphs, decodes alone, prompts too
            assert len(differing) == (2 if (group, requests) in steps else 1), group
            decodes = Setting(prompts_in_graphs=False)
            assert {Setting(), decodes, replace(decodes, single_row=False)} & set(settings.values())


def test_a_setting_determines_its_requests_sampling_parameters(model_directory, monkeypatch):
    asked = []

    def generate(llm, prompts, params):
        asked.append(params)
        return own(llm, prompts, params)

    own = LLM.generate
    monkeypatch.setattr(LLM, "generate", generate)
    settings = (Setting(temperature=0.0), Setting(sampling="top_p of one"), Setting(sampling="5 log-probabilities"))
    monkeypatch.setattr(ablation, "groups", lambda *_: {"asked": {str(i): each for i, each in enumerate(settings)}})
    options = {"workload": ["chat"], "requests": 3, "scale": 64, "repeat": 1, "load_format": "dummy", "device": "cpu"}
    ablation.run(model_directory, quiet=True, **options)
    assert len(asked) == 6, "each setting warms up and runs once"
    found = [[(each.temperature, each.top_p, each.logprobs) for each in params] for params in asked[::2]]
    plain = (1.0, 1.0, None)
    assert found == [[(0.0, 1.0, None)] * 3, [(1.0, 0.95, None), plain, plain], [(1.0, 1.0, 5)] * 3]


def test_a_setting_applies_only_inside_its_block(model_directory):
    with LLM(model_directory, load_format="dummy", device="cpu") as llm:
        before = llm.engine.config, llm.engine.executor.runner.graphs
        with ablation.applied(llm, Setting(run_ahead=3, operations="reference", graphs=False)):
            assert llm.engine.config.run_ahead == 3
            assert not on("cpu").engines_own and on("cpu").capturable
        assert (llm.engine.config, llm.engine.executor.runner.graphs) == before
        assert on("cpu").engines_own


@pytest.mark.parametrize("window", [None, 5])
def test_the_ablations_torch_attention_equals_the_reference(window):
    torch.manual_seed(0)
    cache = LayerCache(torch.randn(9, 4, 2, 16), torch.randn(9, 4, 2, 16))
    table = torch.tensor([[3, 1, 7, 0], [2, 8, 0, 0], [5, 6, 4, 1], [0, 0, 0, 0]], dtype=torch.int32)
    lengths = torch.tensor([9, 5, 16, 0], dtype=torch.int32)
    q = torch.randn(4, 1, 6, 16)
    options = AttentionOptions(0.25, window)
    rows = Rows.decoding(table, lengths)
    found = ablation.torch_attention(q, cache, rows, options)
    wanted = reference.decode_attention(q, cache, rows, options)
    torch.testing.assert_close(found[:3], wanted[:3])
    torch.testing.assert_close(found[3, 0], cache.v[0, 0].repeat_interleave(3, 0), msg="padding sees one key: no NaN")


def test_at_least_one_run_is_required(model_directory):
    with pytest.raises(ValueError, match="repeat must be"):
        ablation.run(model_directory, repeat=0)
