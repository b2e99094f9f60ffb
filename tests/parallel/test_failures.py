"""A rank that dies, hangs, fails or goes another way: the requests end with its name, and nothing waits for it."""

import asyncio
import os
import pickle
import signal
import subprocess
import threading
import time
from collections import deque
from contextlib import closing
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from unittest.mock import MagicMock

import pytest
import torch

from minillm import SamplingParams
from minillm.engine.async_llm import AsyncLLM
from minillm.errors import ConfigError, RankFailed
from minillm.parallel import ranks as module
from minillm.parallel.collectives import PeerLost
from minillm.parallel.messages import Answered, Failed
from minillm.parallel.rank import Rank
from minillm.parallel.ranks import Ranks
from minillm.runner import executor
from minillm.runner.executor import LocalExecutor
from minillm.scheduler.step import Step
from tests.waiting import TIMEOUT, wait_until

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


def in_rank_1(fault, begun, rank, step=7, failing=1):
    """Plant a fault in one rank's steps from this one on. begun: a file that says so."""
    launch = LocalExecutor.launch

    def planted(self, message):
        if message.number < step:
            return launch(self, message)
        begun.touch()
        return fault(partial(launch, self, message))

    if rank == failing:
        LocalExecutor.launch = planted


def lose_patience(ranks, begun, fault, failing=1):
    """Let a rank count as hung after a second from now on: once one has failed, and all that answer have done so.

    So a slow machine is no hung rank before. The second answers of ranks that stand still are no progress any more.
    """
    answering = ranks.members if fault is hangs else ranks.members[:1]
    wait_until(begun.exists)
    for _ in range(2):
        since = time.monotonic()
        wait_until(lambda since=since: all(each.heard > since for each in answering))
        wait_until(lambda: not ranks.members[1 - failing].working)
    ranks.patience = 1.0


FAULTS = [
    (diverges, r"sampled other tokens than rank 0 in step \d+: their caches may differ"),
    (hangs, r"hangs: the others have waited for it for \d+ s"),
    (is_stopped, r"has not answered for \d+ s: it is stopped or hangs"),
    (dies, "was killed by SIGKILL, as the system does when memory runs out"),
    (exits, "ended with exit status 3"),
    (runs_out_of_memory, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
]


@pytest.mark.parametrize(("fault", "says"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_rank_that_fails_ends_the_requests_and_is_named(fault, says, tmp_path):
    begun = tmp_path / "begun"
    with (
        forked.ranks(2, partial(in_rank_1, fault, begun)) as ranks,
        forked.engine(ranks, num_blocks=16) as llm,
    ):
        if fault in (hangs, is_stopped):
            threading.Thread(target=lose_patience, args=(ranks, begun, fault), daemon=True).start()
        assert llm.engine.executor.failure is None
        with pytest.raises(RankFailed, match=rf"^rank 1 \(process {ranks.members[1].process.pid}\):? {says}"):
            llm.generate(PROMPTS, SOME)
        assert not llm.engine.has_work
        with pytest.raises(RankFailed, match=r"rank 1 .*; this engine cannot run any more: make a new one"):
            llm.generate(PROMPTS, SOME)
        assert not llm.engine.has_work and "rank 1" in llm.engine.executor.failure
    for member in ranks.members:
        assert member.process.wait(TIMEOUT) is not None


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("fault", [hangs, dies])
def test_a_stage_that_fails_is_named_and_not_the_one_that_waits(fault, failing, tmp_path):
    says, begun = dict(FAULTS)[fault], tmp_path / "begun"
    with (
        forked.ranks(2, partial(in_rank_1, fault, begun, failing=failing)) as ranks,
        forked.engine(ranks, num_blocks=16, pipeline_parallel_size=2) as llm,
    ):
        if fault is hangs:
            threading.Thread(target=lose_patience, args=(ranks, begun, fault, failing), daemon=True).start()
        named = rf"^rank {failing} \(process {ranks.members[failing].process.pid}\):? {says}"
        with pytest.raises(RankFailed, match=named):
            llm.generate(PROMPTS, SOME)


def test_the_rank_that_failed_first_is_named_even_if_another_reports_first():
    gone = PeerLost("a collective failed: Connection closed by peer")
    failures = [Failed.of(gone), Failed.of(OSError("the device is gone")), Failed.of(gone)]
    ranks = object.__new__(Ranks)
    ranks.failure, ranks.patience, ranks._over = None, 1, threading.Event()
    ranks.members = [MagicMock(inbox=deque([failed]), closed=False) for failed in failures]
    for rank, member in enumerate(ranks.members):
        member.__str__.return_value = f"rank {rank}"
    with pytest.raises(RankFailed, match="^rank 1: OSError: the device is gone$"):
        ranks.collect()
    assert all(member.process.kill.called for member in ranks.members)


class Ended:
    """A process, and how it ends."""

    def __init__(self, pid, status):
        self.pid, self.status = pid, status

    def kill(self):
        if self.status is None:
            self.status = -signal.SIGKILL

    def wait(self, timeout=None):
        if self.status is None:
            raise subprocess.TimeoutExpired("rank", timeout)
        return self.status


def blamed(*ranks):
    """Why ranks are lost that have sent these messages and ended with these statuses; None: they still run."""
    ends = []

    def start(theirs, arguments):
        messages, status = ranks[len(ends)]
        ends.append(Connection(theirs.dup().detach()))
        for message in messages:
            ends[-1].send_bytes(pickle.dumps(message))
        if status is not None:
            ends[-1].close()
        return Ended(100 + len(ends), status)

    found = Ranks(["cpu"] * len(ranks), start=start)
    with pytest.raises(RankFailed) as raised:
        while True:
            found.collect()
    found.close()
    for end in ends:
        end.close()
    return str(raised.value)


OWN, ANSWER = Failed.of(MemoryError("no room")), Answered(None)


def test_a_failure_is_found_behind_an_answer_before_processes_that_it_ended():
    says = blamed(([ANSWER, OWN], None), ([ANSWER], -signal.SIGABRT), ([], None))
    assert says.startswith("rank 0 ") and says.endswith("MemoryError: no room")


@pytest.mark.parametrize(
    "first, says", [(-signal.SIGKILL, "was killed by SIGKILL"), (3, "ended with exit status 3"), (-11, "SIGSEGV")]
)
def test_of_processes_that_ended_the_one_is_named_that_no_library_aborted(first, says):
    found = blamed(([], -signal.SIGABRT), ([], first), ([], -signal.SIGABRT))
    assert found.startswith("rank 1 ") and says in found


def test_a_process_that_was_killed_is_named_before_others_that_ended():
    assert blamed(([], 1), ([OWN], None), ([], -signal.SIGKILL)).startswith("rank 2 ")


def test_processes_that_only_aborted_are_named_all_the_same(monkeypatch):
    monkeypatch.setattr(module, "GRACE", 0.01)
    assert "rank 1 (process 102) was killed by SIGABRT" in blamed(([], None), ([], -signal.SIGABRT))


class Over(BaseException):
    pass


def bare_rank(messages):
    rank = object.__new__(Rank)
    rank.working, rank._failed = False, threading.Event()
    rank._messages, rank._answers = MagicMock(), SimpleQueue()
    rank._messages.get.side_effect = [*messages, Over]
    return rank


def test_a_rank_that_failed_carries_out_nothing_more():
    rank, done = bare_rank([1, 2, 3]), []

    def do(message):
        done.append(message)
        if message == 2:
            raise MemoryError("no room")
        return lambda: message

    rank._do = do
    with pytest.raises(Over):
        rank.run()
    assert done == [1, 2] and rank._answers.qsize() == 2


def test_a_rank_whose_results_failed_answers_and_carries_out_nothing_more():
    rank, sent = bare_rank([1]), []
    rank._do, rank._send = sent.append, sent.append
    rank._answers.put(MagicMock(side_effect=OSError("the device is gone")))
    rank._answers.put(lambda: 5)
    rank._answer("cpu")
    with pytest.raises(Over):
        rank.run()
    assert [each.message for each in sent] == ["OSError: the device is gone"]


def test_answers_are_waited_for_on_the_ranks_own_gpu(monkeypatch):
    rank, found = bare_rank([]), []
    rank._send = found.append
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    rank._answers.put(MagicMock(side_effect=OSError("the device is gone")))
    rank._answer("cuda:1")
    assert found[0] == "cuda:1" and isinstance(found[1], Failed)


def test_a_stage_answers_once_its_device_has_run_the_step():
    rank = bare_rank([])
    rank.group, rank.executor, rank.replacements = MagicMock(), MagicMock(), MagicMock()
    rank.group.stage.last, rank.group.rank = False, 0
    answer = rank._do(Step(0, *[None] * 5))
    assert not rank.executor.launch().finish.called
    assert answer().results is None and rank.executor.launch().finish.called


def test_all_clients_are_told_and_the_server_learns_of_it(tmp_path):
    async def ask(served):
        return await asyncio.gather(*(served.generate(each, SOME) for each in PROMPTS), return_exceptions=True)

    with (
        forked.ranks(2, partial(in_rank_1, dies, tmp_path / "begun")) as ranks,
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
        ranks.members[1].process.wait(TIMEOUT)
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
