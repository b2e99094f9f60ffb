"""A rank that dies, hangs, fails or goes another way: the requests end with its name, and nothing waits for it."""

import asyncio
import os
import signal
import threading
import time
from collections import deque
from contextlib import closing
from dataclasses import replace
from functools import partial
from unittest.mock import MagicMock

import pytest
import torch

from minillm import SamplingParams
from minillm.engine.async_llm import AsyncLLM
from minillm.errors import ConfigError, RankFailed
from minillm.parallel.collectives import PeerLost
from minillm.parallel.messages import Failed
from minillm.parallel.ranks import Ranks
from minillm.runner import executor
from minillm.runner.executor import LocalExecutor

from . import forked

SOME = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8, 9]]


class Altered:
    """A step with other tokens than the model sampled."""

    def __init__(self, launched):
        self.launched = launched

    def wait(self):
        results = self.launched.wait()
        return replace(results, tokens=results.tokens + 1)


def diverges(launch):
    return Altered(launch())


def hangs(launch):
    time.sleep(10_000)


def is_stopped(launch):
    os.kill(os.getpid(), signal.SIGSTOP)
    return launch()


def dies(launch):
    os.kill(os.getpid(), signal.SIGKILL)


def exits(launch):
    os._exit(3)


def runs_out_of_memory(launch):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def in_rank_1(fault, rank, step=7):
    """Plant a fault in the steps from this one on."""
    launch = LocalExecutor.launch

    def planted(self, message):
        return fault(partial(launch, self, message)) if message.number >= step else launch(self, message)

    if rank == 1:
        LocalExecutor.launch = planted


PATIENCE = 2.0  # seconds: every collective of a step counts as progress
FAULTS = [
    (diverges, r"sampled other tokens than rank 0 in step \d+: their caches may differ"),
    (hangs, r"hangs: the others have waited for it for \d+ s"),
    (is_stopped, r"has not answered for \d+ s: it is stopped or hangs"),
    (dies, "was killed by SIGKILL, as the system does when memory runs out"),
    (exits, "ended with exit status 3"),
    (runs_out_of_memory, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
]


@pytest.mark.parametrize(("fault", "says"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_rank_that_fails_ends_the_requests_and_is_named(fault, says):
    with (
        forked.ranks(2, partial(in_rank_1, fault), PATIENCE) as ranks,
        forked.engine(ranks, num_blocks=16) as llm,
    ):
        assert llm.engine.executor.failure is None
        with pytest.raises(RankFailed, match=rf"^rank 1 \(process {ranks.members[1].process.pid}\):? {says}"):
            llm.generate(PROMPTS, SOME)
        assert not llm.engine.has_work
        with pytest.raises(RankFailed, match=r"rank 1 .*; this engine cannot run any more: make a new one"):
            llm.generate(PROMPTS, SOME)
        assert not llm.engine.has_work and "rank 1" in llm.engine.executor.failure
    for member in ranks.members:
        assert member.process.wait(60) is not None


def test_the_rank_that_failed_first_is_named_even_if_another_reports_first():
    gone = PeerLost("a collective failed: Connection closed by peer")
    failures = [Failed.of(gone), Failed.of(OSError("the device is gone")), Failed.of(gone)]
    ranks = object.__new__(Ranks)
    ranks.failure, ranks.patience, ranks._over = None, 1, threading.Event()
    ranks.members = [MagicMock(inbox=deque([failed])) for failed in failures]
    for rank, member in enumerate(ranks.members):
        member.__str__.return_value = f"rank {rank}"
    with pytest.raises(RankFailed, match="^rank 1: OSError: the device is gone$"):
        ranks.collect()
    assert all(member.process.kill.called for member in ranks.members)


def test_all_clients_are_told_and_the_server_learns_of_it():
    async def ask(served):
        return await asyncio.gather(*(served.generate(each, SOME) for each in PROMPTS), return_exceptions=True)

    with (
        forked.ranks(2, partial(in_rank_1, dies)) as ranks,
        forked.engine(ranks, num_blocks=16) as llm,
        closing(AsyncLLM(engine=llm)) as served,
    ):
        assert served.failure is None
        found = asyncio.run(ask(served))
        assert [type(each) for each in found] == [RankFailed] * 2 and "SIGKILL" in str(found[0])
        assert "rank 1" in served.failure


def test_a_rank_that_ends_while_nothing_runs_is_noticed():
    with forked.ranks(2) as ranks, forked.engine(ranks, num_blocks=16) as llm:
        assert llm.engine.executor.failure is None
        os.kill(ranks.members[1].process.pid, signal.SIGKILL)
        ranks.members[1].process.wait(60)
        assert llm.engine.executor.failure == f"{ranks.members[1]} was killed by SIGKILL, as the system does when " + (
            "memory runs out"
        )


def cannot_load(error, rank):
    def load_model(*arguments, **options):
        raise error

    if rank == 1:
        executor.load_model = load_model


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ConfigError("cuda:1 has no memory left"), ConfigError), (OSError("the disk is gone"), RankFailed)],
    ids=["expected", "other"],
)
def test_a_rank_that_cannot_load_its_shard_is_named_while_the_others_wait(error, expected):
    named = pytest.raises(expected, match=rf"^rank 1 \(process \d+\): (OSError: )?{error}$")
    with forked.ranks(2, partial(cannot_load, error)) as ranks, named, forked.engine(ranks, num_blocks=16):
        pass


def test_what_all_ranks_refuse_is_refused_as_on_one_device():
    refused = pytest.raises(ConfigError, match="^max_model_len=9999999 is more than this model")
    with forked.ranks(2) as ranks, refused, forked.engine(ranks, max_model_len=9_999_999):
        pass
