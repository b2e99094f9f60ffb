"""Lesson 99: one load for the engine's parts, a learner's, and each of these alone."""

import pytest

from minillm import LLM, ops, overrides
from minillm.course.lesson_99 import under_load
from minillm.course.lesson_99.under_load import Outcome
from minillm.kv_cache import BlockPool
from minillm.ops import reference
from minillm.server import running

LOAD = {"workload": "chat", "scale": 32, "concurrency": 2, "requests": 4, "warmup": 2, "quiet": False}


def run(speed, ttft=0.25, itl=0.5, p99=0.75):
    waits = {"ttft_s": {"p50": ttft, "p99": p99}, "itl_s": {"p50": itl, "p99": p99}}
    return {"output_tokens_per_s": speed, **waits}


@pytest.fixture(scope="module")
def url():
    with LLM(device="cpu", num_blocks=32, max_num_seqs=2) as llm, running(llm) as server:
        yield server.url


def norm(*args):
    return reference.rms_norm(*args)


def broken(*args):
    raise ZeroDivisionError("by me")


class Pool(BlockPool):
    pass


def test_each_engine_serves_the_load_and_one_that_fails_ends_no_other(url):
    engines = {"the engine": {}, "broken": {"rms_norm": broken}, "yours": {"rms_norm": norm, "block_pool": Pool}}
    engines |= under_load.control("cpu") | {"tokenizer": {"bpe_merge": lambda symbols, ranks: symbols}}
    found = under_load.send(url, engines, rounds=2, **LOAD)
    assert list(found) == list(engines)
    assert "the engine failed: by me" in found["broken"].problem and found["broken"].runs == []
    for name in ("the engine", "yours", under_load.CONTROL):
        assert found[name].problem is None and found[name].idle == []
        assert [each["output_tokens"] for each in found[name].runs] == [16, 16], "two rounds of the same load"
    assert min(found["yours"].calls.values()) > 0 and found["tokenizer"].idle == ["bpe_merge"]
    assert not overrides.any_replaced()


def test_a_part_that_cannot_replace_anything_has_a_problem_too(url):
    found = under_load.send(url, {"wrong": {"no_such_part": norm}, "not callable": {"rms_norm": 3}}, **LOAD)
    assert "no part is called 'no_such_part'" in found["wrong"].problem
    assert "must be a function" in found["not callable"].problem


def test_engines_take_turns_and_a_failed_one_is_not_asked_again(monkeypatch):
    asked = []

    def answer(url, **load):
        name = overrides_now()
        asked.append(name)
        if name == "broken":
            raise under_load.serve.LoadError("4 of 4 requests failed\nmore")
        return {"results": [run(len(asked))]}

    def overrides_now():
        functions = dict(zip(ops.on("cpu").names, ops.on("cpu").functions, strict=True))
        return getattr(functions["rms_norm"], "function", None).__name__ if overrides.any_replaced() else "engine"

    monkeypatch.setattr(under_load.serve, "run", answer)
    engines = {"a": {}, "b": {"rms_norm": broken}, "c": {"rms_norm": norm}}
    found = under_load.send("url", engines, rounds=3)
    assert asked == ["engine", "broken", "norm", "engine", "norm", "engine", "norm"]
    assert found["b"].problem == "4 of 4 requests failed"
    assert [each["output_tokens_per_s"] for each in found["a"].runs] == [1, 4, 6] and found["a"].tokens_per_s == 4


def test_all_parts_are_sent_together_and_alone_but_the_tokenizers():
    plain, kernels = dict.fromkeys(("bpe_merge", "rms_norm", "decode_attention"), norm), {"decode_attention": broken}
    found = under_load.engines("cpu", plain, kernels)
    assert list(found.pop(under_load.CONTROL)) == ["rms_norm"]
    assert found == {
        "the engine": {},
        "yours": {"rms_norm": norm, "decode_attention": broken},
        "rms_norm": {"rms_norm": norm},
        "decode_attention": {"decode_attention": norm},
        "decode_attention, kernel": {"decode_attention": broken},
        "the engine, once more": {},
    }
    assert list(found)[-1] == under_load.AGAIN, "what has changed meanwhile shows there"


def test_without_a_part_that_a_load_calls_only_the_engine_is_sent_to():
    assert under_load.engines("cpu", {}, {}) == under_load.engines("cpu", {"bpe_merge": norm}, {}) == {"the engine": {}}


def test_the_cards_rows_are_those_of_whole_engines():
    outcomes = {name: Outcome([run(1)]) for name in (under_load.YOURS, "rms_norm", under_load.CONTROL, "the engine")}
    outcomes[under_load.AGAIN] = Outcome([run(3)])
    assert list(under_load.whole(outcomes)) == ["the engine", "yours"]
    assert under_load.whole({"rms_norm": Outcome()}) == {}
    assert under_load.whole(outcomes)["the engine"].tokens_per_s == 2 and outcomes["the engine"].tokens_per_s == 1
    assert under_load.share(under_load.whole(outcomes)) == 50
    for name in under_load.whole(outcomes):
        failed = under_load.whole(outcomes) | {name: Outcome(problem="4 of 4 failed")}
        assert under_load.share(failed) is None
    assert under_load.share(under_load.whole({"the engine": Outcome([run(1)])})) is None


def test_the_engines_two_lines_count_together_and_one_that_failed_does_not():
    good, failed = Outcome([run(100), run(200)]), Outcome(problem="4 of 4 failed")
    both = under_load.own({"the engine": good, under_load.AGAIN: Outcome([run(120), run(240)])})
    assert [each["output_tokens_per_s"] for each in both.runs] == [100, 120, 200, 240], "round by round"
    for first, last in ((good, failed), (failed, good)):
        assert under_load.own({"the engine": first, under_load.AGAIN: last}).runs == good.runs
    assert under_load.own({"the engine": failed, under_load.AGAIN: failed}).problem == "4 of 4 failed"
    assert under_load.own({"the engine": good}).runs == good.runs, "without a part of the learner's"


def test_the_control_is_the_engines_own_even_while_another_norm_is_in_place():
    before = under_load.control("cpu")[under_load.CONTROL]["rms_norm"]
    with overrides.using(rms_norm=broken):
        inside = under_load.control("cpu")[under_load.CONTROL]["rms_norm"]
    import torch

    x, weight = torch.randn(2, 8), torch.randn(8)
    torch.testing.assert_close(before(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    torch.testing.assert_close(inside(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


def test_the_table_has_medians_of_the_runs_in_milliseconds():
    outcomes = {
        "the engine": Outcome([run(3000), run(1000), run(2000, ttft=1, itl=2, p99=3)]),
        "yours": Outcome(problem="4 of 4 failed"),
    }
    head, engine, yours = under_load.table(outcomes).splitlines()
    assert head.split() == ["tokens/s", "TTFT", "p50", "ITL", "p50", "ITL", "p99", "(ms)"]
    assert engine.split() == ["the", "engine", "2,000", "250.0", "500.00", "750.00"] and len(engine) == len(head)
    assert yours.split() == ["yours", "4", "of", "4", "failed"]


def test_ratios_are_of_medians_with_those_of_each_round():
    """The engine's speed is that of both its lines: 110, 200 and 280 in the three rounds, and 200 in all of them."""
    found = {
        "the engine": Outcome([run(100), run(190), run(300)]),
        "slower": Outcome([run(90), run(100), run(150)], {"rms_norm": 7}),
        "never": Outcome([run(200)] * 3, {"policy": 0, "rms_norm": 1}),
        "failed": Outcome(problem="4 of 4 failed"),
        under_load.AGAIN: Outcome([run(120), run(210), run(260)]),
    }
    _, engine, slower, never, failed, again = under_load.ratios_table(found).splitlines()
    assert engine.split()[2:] == ["0.95", "rounds", "0.91", "to", "1.07"]
    assert slower.split() == ["slower", "0.50", "rounds", "0.50", "to", "0.82"]
    assert never.split() == ["never", "1.00", "rounds", "0.71", "to", "1.82", "did", "not", "run:", "policy"]
    assert failed.split()[1:] == ["4", "of", "4", "failed"]
    assert again.split()[4:] == ["1.05", "rounds", "0.93", "to", "1.09"]
    one = {"the engine": Outcome([run(95)]), "one": Outcome([run(50)]), under_load.AGAIN: Outcome([run(105)])}
    lines = under_load.ratios_table(one).splitlines()[1:]
    assert [line.split()[-1] for line in lines] == ["0.95", "0.50", "1.05"], "one round has no range"
    assert "4 of 4" in under_load.ratios_table({"the engine": found["failed"]})


BUSY = ". Do not compare speeds by this run; run this load again on a quiet machine."


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        ([100, 80, 100, 114], ""),
        ([123, 80, 142, 77], "This machine was busy: the engine's first and last line differ by 0.46" + BUSY),
        ([103, 247, 165, 97], "This machine was busy: the line 'yours' is 2.47" + BUSY),
    ],
)
def test_speeds_that_no_part_explains_have_a_caveat_in_the_table_and_on_the_card(speeds, said):
    names = (under_load.ENGINE, under_load.YOURS, under_load.CONTROL, under_load.AGAIN)
    found = {name: Outcome([run(speed)]) for name, speed in zip(names, speeds, strict=True)}
    assert under_load.caveat(found) == said
    runs = f"the engine's runs: {speeds[0]} and {speeds[-1]} tokens/s"
    assert under_load.engine_runs(found) == "\n".join([runs, said] if said else [runs])
    assert under_load.ratios_table(found).endswith(BUSY) == bool(said)


def test_a_part_that_failed_or_is_missing_has_no_caveat():
    failed = {"the engine": Outcome([run(100)]), "yours": Outcome(problem="4 of 4 failed")}
    assert under_load.caveat(failed) == "" and under_load.engine_runs(failed) == "the engine's runs: 100 tokens/s"
    assert under_load.caveat({"the engine": failed["yours"], "yours": Outcome([run(900)])}) == ""
