"""`minillm build` on a GPU: the plan is used and changes no tokens."""

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.errors import ConfigError
from minillm.tuning import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here")


def test_a_measured_plan_is_used_and_changes_no_tokens(tmp_path):
    path = str(tmp_path / "tiny.plan.json")
    plan = build.run(input_len=40, output_len=24, concurrency=3, dtype="float32", out=path)
    assert plan.gpu["name"] == torch.cuda.get_device_name()
    assert plan.measured["problems"] > 0 and plan.measured["launches_tried"] > plan.measured["problems"]
    assert all(plan.memory[part] > 0 for part in ("weights", "workspace", "graphs", "cache"))
    prompts = [list(range(start, start + 40)) for start in range(5, 805, 100)]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with LLM(dtype="float32", device="cuda") as llm:
        expected = [completion.token_ids for completion in llm.generate(prompts, params)]
    with LLM(plan=path) as llm:
        graphs = llm.engine.executor.runner.graphs.captured.decodes
        ready = set(graphs)
        assert {tuple(shape) for shape in plan.graphs} <= ready, "captured before the first request"
        found = [completion.token_ids for completion in llm.generate(prompts, params)]
        assert set(graphs) == ready, "warm-up should have captured all graphs for this traffic"
    assert sum(f == e for f, e in zip(found, expected, strict=True)) >= 7, "at most one near-tie may differ"
    text = (tmp_path / "tiny.plan.json").read_text()
    (tmp_path / "other.plan.json").write_text(text.replace(plan.gpu["name"], "NVIDIA L4"))
    with pytest.raises(ConfigError, match="made for GPU NVIDIA L4"):
        LLM(plan=str(tmp_path / "other.plan.json"))
