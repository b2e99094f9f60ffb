"""`minillm build`: the plan it writes, the memory it reports, and how it chooses; timing itself needs a GPU."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from minillm import LLM, cli
from minillm.advice import precision, sizing
from minillm.advice.plan import Plan
from minillm.config import Traffic
from minillm.errors import ConfigError
from minillm.model.config import PRESETS
from minillm.model.loader import EMBEDDED, read_config
from minillm.tuning import build

TINY = read_config(EMBEDDED)


def run(*arguments: str):
    return CliRunner().invoke(cli.app, ["build", *arguments, "--device", "cpu"])


def rows(text: str) -> dict[str, str]:
    """The table's rows by name."""
    parted = [line.rsplit("  ", 1) for line in text.splitlines() if "  " in line]
    return {name.strip(): value.strip() for name, value in parted}


def test_without_a_gpu_it_prints_the_memory_and_writes_a_usable_plan(tmp_path):
    out = tmp_path / "tiny.plan.json"
    done = run("--input-len", "30", "--output-len", "20", "--concurrency", "5", "--block-size", "8", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "Workspace, CUDA graphs and launches were not measured without a GPU." in done.stdout
    plan = Plan.read(out)
    assert (plan.gpu, plan.graphs, plan.launches) == (None, [], [])
    assert plan.traffic == Traffic(5, 30, 20)
    assert plan.options == {"block_size": 8, "dtype": "float32", "max_num_seqs": 5, "max_num_batched_tokens": 2048}
    words = ("generate", "Once upon", "--plan", str(out), "--device", "cpu")
    used = CliRunner().invoke(cli.app, [*words, "--max-tokens", "4"])
    assert used.exit_code == 0, used.output
    refused = CliRunner().invoke(cli.app, [*words, "--block-size", "32"])
    assert refused.exit_code == 2 and "made for block_size=8, not 32" in refused.stderr


def test_a_plan_holds_the_precision_that_was_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "resolved", lambda config, *_: replace(config, quantization="int8"))
    out = tmp_path / "tiny.plan.json"
    done = run("--quantization", "auto", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert Plan.read(out).options["quantization"] == "int8"


def test_the_memory_reported_for_a_cpu_equals_what_the_engine_uses(tmp_path):
    plan = Plan.made_here(TINY, Traffic(5, 30, 20), {"dtype": "float32", "block_size": 8, "max_num_seqs": 5}, "cpu")
    reported = build.on_cpu(TINY, plan)
    with LLM(device="cpu", dtype="float32", block_size=8, max_num_seqs=5) as llm:
        runner = llm.engine.executor.runner
        assert reported.weight_bytes == llm.engine.model.nbytes
        assert reported.cache_bytes == sum(cache.k.nbytes + cache.v.nbytes for cache in runner.caches)
        assert reported.requests == runner.num_blocks // 7, "50 tokens are 7 blocks of 8"


def test_the_memory_reported_for_a_gpu_equals_the_sizing_module(tmp_path):
    out = tmp_path / "gemma.plan.json"
    done = run("gemma-2b", "--gpu-gb", "80", "--gpu-memory-utilization", "0.8", "--out", str(out))
    assert done.exit_code == 0, done.output
    wanted = sizing.fit(PRESETS["gemma-2b"], 80e9, 1280, utilization=0.8)
    assert str(wanted) in done.stdout
    plan = Plan.read(out)
    measured = build.on_gpu(PRESETS["gemma-2b"], plan, 80e9)
    assert measured.cache_bytes < wanted.cache_bytes, "float32 on a CPU"
    taken = {"workspace": 2_000_000_000, "graphs": 500_000_000}
    less = build.on_gpu(PRESETS["gemma-2b"], plan.__class__(**{**vars(plan), "memory": taken}), 80e9)
    assert measured.cache_bytes - less.cache_bytes == sum(taken.values())
    assert rows(str(less))["CUDA graphs"] == "500.00 MB" and "CUDA graphs" not in rows(str(wanted))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input-len", "2000", "--output-len", "99999"], "max_model_len is"),
        (["--concurrency", "0"], "concurrency must be a whole number from 1, not 0"),
        (["--plan", "x.json"], "build writes a plan"),
        (["no/such/model"], "no such model directory"),
    ],
)
def test_what_cannot_be_planned_is_rejected_with_a_one_line_error(arguments, message, tmp_path):
    done = run(*arguments, "--out", str(tmp_path / "p.json"))
    assert done.exit_code == 2
    assert message in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_compare_runs_one_request_and_all_requests_with_and_without_the_plan(tmp_path, capsys):
    build.run(
        input_len=6, output_len=3, concurrency=2, out=tmp_path / "p.json", compare=True, json_path=tmp_path / "r.json",
        device="cpu", max_model_len=32,
    )  # fmt: skip
    record = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert [(row["engine"], row["requests"], row["output_tokens"]) for row in record["results"]] == [
        ("default", 1, 3),
        ("planned", 1, 3),
        ("default", 2, 6),
        ("planned", 2, 6),
    ]
    assert all(len(row["runs"]) == 3 for row in record["results"])
    assert record["plan"]["traffic"]["concurrency"] == 2
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == record


def test_invalid_options_are_rejected_before_anything_is_measured():
    with pytest.raises(ConfigError, match="dtype must be one of"):
        build.run(dtype="int8")
