"""The offline comparison is fair, lists all repeats, and prints the record as its last line."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import minillm
from minillm.bench import offline, peers
from minillm.bench.workloads import BenchRequest
from minillm.errors import ConfigError, MissingPackage
from minillm.kv_cache import BlockPool
from minillm.scheduler.policies import ShortestPromptFirst

TINY_GEMMA = Path(__file__).parents[2] / "data" / "tiny-gemma"
REQUESTS = [BenchRequest([5, 6, 7, 8, 9], 6), BenchRequest([11], 3), BenchRequest([20, 21], 9)]


@pytest.fixture(scope="module")
def transformers_peer(model_directory):
    torch.manual_seed(0)
    peer = peers.TransformersGenerate(model_directory, load_format="dummy")
    for parameter in peer.model.parameters():  # with default weights the output is one repeated token, whatever breaks
        torch.nn.init.normal_(parameter, std=0.3)
    return peer


@pytest.fixture(scope="module")
def saved(transformers_peer, model_directory, tmp_path_factory):
    """The peer's weights as a checkpoint that both engines load."""
    folder = tmp_path_factory.mktemp("models") / "saved"
    transformers_peer.model.save_pretrained(folder)
    (folder / "config.json").write_text((model_directory / "config.json").read_text())
    return folder


def test_the_record_lists_every_run_and_is_the_last_line(model_directory, tmp_path, capsys):
    path = tmp_path / "record.json"
    record = offline.run(
        model_directory,
        workload=["single", "mixed"],
        scale=16,
        requests=10,
        repeat=3,
        compare="transformers",
        load_format="dummy",
        device="cpu",
        json_path=path,
    )
    lines = capsys.readouterr().out.strip().splitlines()
    assert json.loads(lines[-1]) == record == json.loads(path.read_text())
    assert {"results", "machine", "commit", "command", "date", "versions"} <= set(record)
    rows = {(row["workload"], row["engine"], row.get("batch")): row for row in record["results"]}
    mixed = "mixed_100-1024_x1024"
    assert set(rows) == {
        ("single_128_256_x1", "minillm", None),
        ("single_128_256_x1", "transformers", 1),
        (mixed, "minillm", None),
        (mixed, "transformers", 8),
        (mixed, "transformers", 16),
    }
    for row in rows.values():
        assert len(row["runs"]) == 3
        assert row["seconds"] == sorted(row["runs"])[1]
        assert row["output_tokens_per_s"] == pytest.approx(row["output_tokens"] / row["seconds"], rel=0.05)
        assert (row["dtype"], row["device"], row["scale"]) == ("float32", "cpu", 16)
    ours, best = (
        rows[mixed, "minillm", None],
        max(
            (row for key, row in rows.items() if key[0] == mixed and key[1] == "transformers"),
            key=lambda row: row["output_tokens_per_s"],
        ),
    )
    assert ours["times_transformers"] == pytest.approx(best["seconds"] / ours["seconds"], abs=1e-3)
    assert ours["against_batch"] == best["batch"]
    assert sum("minillm" in line for line in lines[:-1]) == 2


def test_engines_alternate_after_two_warm_ups_of_each():
    order = []

    class Contender:
        def __init__(self, name):
            self.name = name

        def run(self, work, *rest):
            order.append((self.name, *rest[:-1]))
            return float(len(order))

    rows = offline._alternate(Contender("a"), [Contender("b")], REQUESTS, {"output_tokens": 18}, 2, 1.0)
    turn = [("a",), ("b", 8)]
    assert order[:6] == turn * 3
    assert rows[0]["unsteady_runs"][0] == 5, "the warm-ups must not be counted"
    order.clear()
    (alone,) = offline._alternate(Contender("a"), [], REQUESTS, {"output_tokens": 18}, 2, 1.0)
    assert alone["runs"] == [2, 3], "without a comparison one is enough"


@pytest.mark.parametrize(
    ("cores", "said"),
    [
        (0.0, "Runs of the same work differ by 74%, though no other program was busy. Do not"),
        (0.9, "This machine was busy: runs of the same work differ by 74%, and other programs took 0.9 of 2 cores."),
        (None, "This machine was busy: runs of the same work differ by 74%. Do not"),
    ],
)
def test_a_comparison_whose_runs_differ_warns_and_blames_only_programs_that_were_busy(cores, said):
    record = {"machine": {"cores": 2}, "results": [{"spread": 0.74, "other_programs_cores": cores}, {"spread": 0.1}]}
    assert offline.caveat(record).startswith(said)
    assert offline.caveat({"results": [{"spread": offline.STEADY}, {}]}) == ""


def test_batched_transformers_generates_the_same_tokens_as_alone(transformers_peer):
    together = transformers_peer.generate(REQUESTS)
    assert [len(tokens) for tokens in together] == [6, 3, 9]
    alone = [transformers_peer.generate([request])[0] for request in REQUESTS]
    assert together == alone
    assert len({token for tokens in alone for token in tokens}) > 4, (
        "the model repeats itself, so the test proves nothing"
    )


def test_both_engines_are_given_the_same_work(saved):
    """With greedy sampling both give the same tokens: equal prompts and lengths, no early stop, no padding."""
    peer = peers.TransformersGenerate(saved, dtype="float32")
    engine = offline.Minillm(saved, dtype="float32", device="cpu")
    from minillm import SamplingParams

    params = [SamplingParams(max_tokens=r.output_tokens, temperature=0, ignore_eos=True) for r in REQUESTS]
    ours = [c.token_ids for c in engine.llm.generate([r.prompt for r in REQUESTS], params)]
    engine.llm.close()
    assert ours == peer.generate(REQUESTS)


@pytest.mark.proof
def test_ctranslate2_runs_the_same_weights_and_lengths_and_has_a_ratio_of_its_own():
    peer = peers.CTranslate2Generate(TINY_GEMMA)
    others = peers.TransformersGenerate(TINY_GEMMA)
    texts = [BenchRequest([2, *range(300 + 7 * i, 310 + 8 * i)], length) for i, length in enumerate((24, 5, 40))]
    found = peer.generate(texts)
    assert found == others.generate(texts) and [len(each) for each in found] == [24, 5, 40]
    assert len({token for tokens in found for token in tokens}) > 10
    sampled = [peer.generate(texts, temperature=1.0) for _ in range(2)]
    assert sampled[0] != sampled[1], "sampled, not greedy"
    work, facts = texts[:1], {"workload": "x", "output_tokens": 24}
    ours = SimpleNamespace(name="minillm", run=lambda work, temperature: 1.0)
    slow, slower = (
        SimpleNamespace(name=name, run=lambda *_, s=s: s) for name, s in (("transformers", 3.0), (peer.name, 2.0))
    )
    row, *_ = offline._alternate(ours, [slow, slower], work, facts, 1, 0.0)
    assert (row["times_transformers"], row["times_ctranslate2"]) == (3.0, 2.0)
    assert (row["against_batch"], row["against_ctranslate2_batch"]) == (1, 1)


@pytest.mark.parametrize("wrong", [{"device": "cuda"}, {"load_format": "dummy"}], ids=str)
def test_ctranslate2_needs_a_cpu_and_weights(wrong):
    with pytest.raises(ConfigError, match="compared on a CPU, with the weights"):
        peers.CTranslate2Generate(TINY_GEMMA, **wrong)


def test_a_missing_ctranslate2_is_named(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match="pip install ctranslate2"):
        peers.CTranslate2Generate(TINY_GEMMA)


def test_transformers_never_stops_at_an_end_token(transformers_peer):
    greedy = transformers_peer.generate(REQUESTS)[0]
    model = transformers_peer.model
    before = model.config.eos_token_id
    try:
        model.config.eos_token_id = greedy[0]
        assert transformers_peer.generate(REQUESTS)[0] == greedy
    finally:
        model.config.eos_token_id = before


def test_repetitions_are_not_served_from_the_prefix_cache(model_directory):
    engine = offline.Minillm(model_directory, load_format="dummy", device="cpu")
    work = [BenchRequest(list(range(64)), 2)]
    engine.run(work, 1.0)
    engine.run(work, 1.0)
    assert engine.llm.stats()["prefix_hit_tokens"] == 0
    engine.llm.close()


def test_the_benchmark_uses_user_supplied_policies_and_block_pools(model_directory):
    with minillm.using(policy=ShortestPromptFirst, block_pool=lambda blocks: BlockPool(blocks)) as used:
        offline.run(model_directory, workload="single", repeat=1, load_format="dummy", scale=16, quiet=True)
    assert min(used.calls.values()) > 0 and not used.not_solved


def test_static_batches_are_tried_up_to_the_workloads_size():
    assert peers.batch_sizes(1) == (1,)
    assert peers.batch_sizes(3) == (8,)
    assert peers.batch_sizes(16) == (8, 16)
    assert peers.batch_sizes(1000) == (8, 16, 32, 64)


def test_invalid_settings_are_rejected_before_anything_runs(model_directory):
    for wrong in ({"repeat": 0}, {"compare": "vllm"}, {"workload": "chatty"}):
        with pytest.raises(ValueError):
            offline.run(model_directory, load_format="dummy", quiet=True, **wrong)
