"""Functions of a user's that run in the processes of a divided model, and those that cannot."""

import sys
import threading

import pytest
import torch

import minillm
from minillm import LLM, NotSolvedYet, SamplingParams
from minillm.errors import ConfigError
from minillm.model import modules, parallel
from minillm.overrides import OverrideError, Used
from minillm.parallel.replacements import packed
from minillm.quantization import Shard

from . import forked

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
OPTIONS = {"dtype": "float64", "num_blocks": 16}
PROMPTS = [[5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def two():
    with forked.ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def wanted():
    with LLM(device="cpu", cpu_threads=1, **OPTIONS) as llm:
        return tokens(llm)


def tokens(llm):
    return [each.token_ids for each in llm.generate(PROMPTS, GREEDY)]


# Functions that are made here cannot be imported by a rank's process: they are sent by value, with what they use.


def make_sum(calls=None):
    def summed(x, ranks):
        got = {ranks.rank: x}
        for step in range(1, ranks.size):
            source = (ranks.rank - step) % ranks.size
            got[source] = ranks.exchange(x, (ranks.rank + step) % ranks.size, source)
        if calls is not None:
            calls.append(1)
        return sum(got[rank] for rank in sorted(got))

    return summed


def make_argmax(offset=0):
    def argmax(logits, ranks):
        largest, token = parallel.sharded_argmax(logits, ranks)
        return largest, token + offset

    return argmax


def make_shard(reverse=False):
    def shard(module, rank, size):
        return tuple(modules.shard(module, size - 1 - rank if reverse else rank, size))

    return shard


def test_ranks_run_the_users_functions_and_count_them(two, wanted):
    calls = []
    with (
        minillm.using(shard=make_shard(), all_reduce=make_sum(calls), sharded_argmax=make_argmax()) as used,
        forked.engine(two, **OPTIONS) as llm,
    ):
        assert tokens(llm) == wanted
        steps = used.calls["sharded_argmax"]
        layers = llm.engine.facts.model.num_layers
        assert used.calls == {"shard": 7 * layers + 1, "all_reduce": steps * (2 * layers + 1), "sharded_argmax": steps}
        assert steps >= 6 and not used.not_solved and calls == [], "a rank has a copy of what a function uses"


def test_messages_reach_the_ranks_that_they_are_sent_to(wanted):
    with forked.ranks(4) as four, forked.engine(four, **OPTIONS) as llm, minillm.using(all_reduce=make_sum()):
        assert tokens(llm) == wanted


def test_what_a_function_does_is_what_comes_out_until_its_block_ends(two, wanted):
    with forked.engine(two, **OPTIONS) as llm:
        with minillm.using(sharded_argmax=make_argmax(1)):
            assert tokens(llm) != wanted
            with minillm.using(sharded_argmax=make_argmax()) as inner:
                assert tokens(llm) == wanted
            assert inner.calls["sharded_argmax"] > 0 and tokens(llm) != wanted
        assert tokens(llm) == wanted


def test_operations_are_sent_too(two, wanted):
    def embedding(ids, weight, scale):
        return weight[ids] * scale

    with forked.engine(two, **OPTIONS) as llm, minillm.using(embedding=embedding) as used:
        assert tokens(llm) == wanted and used.calls["embedding"] > 0


def test_a_stub_falls_back_in_every_rank(two, wanted):
    def stub(x, ranks):
        raise NotSolvedYet("all_reduce: write it")

    with minillm.using(all_reduce=stub) as used, forked.engine(two, **OPTIONS) as llm:
        assert tokens(llm) == wanted
    assert used == Used({"all_reduce": 0}, {"all_reduce": "all_reduce: write it"})


def test_a_shard_is_used_when_the_model_is_loaded(two, wanted):
    """Both ranks hold the other's shard: vocabulary and heads are in another order then."""
    with forked.engine(two, **OPTIONS) as llm, minillm.using(shard=make_shard(reverse=True)):
        assert tokens(llm) == wanted
    with minillm.using(shard=make_shard(reverse=True)), forked.engine(two, **OPTIONS) as llm:
        assert tokens(llm) != wanted


def test_a_shard_of_another_size_is_refused():
    def shard(module, rank, size):
        return Shard(range(len(module.rows)), range(module.inputs))

    says = r"shard gave 4096 rows and 256 columns of model.embed_tokens for rank [01] of 2: it must give 2048 and 256$"
    refused = pytest.raises(ConfigError, match=says)
    with forked.ranks(2) as ranks, minillm.using(shard=shard), refused, forked.engine(ranks, **OPTIONS):
        pass


def test_what_cannot_be_sent_is_refused_and_the_next_request_runs(two, wanted):
    lock = threading.Lock()

    def locked(x, ranks):
        with lock:
            return x

    with forked.engine(two, **OPTIONS) as llm:
        says = r"^locked cannot replace all_reduce with tensor_parallel_size=2: .* own, and it cannot be sent to them "
        with minillm.using(all_reduce=locked), pytest.raises(OverrideError, match=says + r"\(cannot pickle"):
            llm.generate(PROMPTS, GREEDY)
        assert tokens(llm) == wanted


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    refused = pytest.raises(OverrideError, match="install the package cloudpickle, which sends functions to other")
    with minillm.using(all_reduce=make_sum()), refused:
        packed(minillm.overrides.blocks(), ["cpu"] * 2)


class OnlyHere:
    """An object that another process cannot make."""

    def __call__(self, x, ranks):
        return x

    def __reduce__(self):
        return getattr, (torch, "not_there")


def test_what_ranks_cannot_make_is_refused_and_the_next_request_runs(two, wanted):
    with forked.engine(two, **OPTIONS) as llm:
        says = "^what `using` replaces cannot run in the ranks' processes: AttributeError"
        with minillm.using(all_reduce=OnlyHere()), pytest.raises(OverrideError, match=says):
            llm.generate(PROMPTS, GREEDY)
        assert tokens(llm) == wanted


def test_several_gpus_run_no_functions_of_the_users():
    with minillm.using(embedding=make_sum(), policy=minillm.scheduler.policies.ShortestPromptFirst):
        blocks = minillm.overrides.blocks()
        with pytest.raises(OverrideError, match="^embedding cannot be replaced on several GPUs"):
            packed(blocks, ["cuda:0", "cuda:1"])


def test_attention_over_divided_pages_is_not_replaced():
    with minillm.using(decode_attention=lambda q, cache, rows, options: q):
        blocks = minillm.overrides.blocks()
        with pytest.raises(OverrideError, match="^decode_attention cannot be replaced with decode_context_parallel_s"):
            packed(blocks, ["cpu"] * 2, 2)


def test_modules_are_found_where_the_engine_finds_them(two, wanted, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text(
        "def none(logits, ranks):\n    return logits[:, 0], logits[:, 0].long() * 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from only_here import none  # ranks import it too

    with forked.engine(two, **OPTIONS) as llm, minillm.using(sharded_argmax=none):
        assert tokens(llm) == [[0] * 6] * 2
