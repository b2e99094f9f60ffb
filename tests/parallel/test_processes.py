"""Ranks in processes that are started as users start them."""

import json
import os
import signal
import subprocess
import sys

import psutil

from minillm import LLM, SamplingParams
from tests.server.processes import commands_below
from tests.waiting import wait_until

OWNER = """
import os, sys
from minillm import LLM, SamplingParams
llm = LLM(device="cpu", num_blocks=16, tensor_parallel_size=2)
print(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))[0].token_ids, flush=True)
print(*(member.process.pid for member in llm.engine.executor.ranks.members), flush=True)
sys.stdin.readline()
"""


def ranks_of(engine: int) -> list[int]:
    """The process ids of an engine's ranks, in their order."""
    return [pid for pid, words in commands_below(engine).items() if "minillm.parallel.rank" in words]


def test_ranks_end_with_their_owner_even_those_that_are_stopped():
    """It needs no `if __name__ == "__main__"`."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", OWNER], **pipes) as owner:
        try:
            assert owner.stdout is not None
            found, pids = json.loads(owner.stdout.readline()), [*map(int, owner.stdout.readline().split())]
            assert sorted(pids) == sorted(ranks_of(owner.pid))
            os.kill(pids[1], signal.SIGSTOP)
        finally:
            owner.kill()
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))
    with LLM(device="cpu", num_blocks=16) as llm:
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        assert llm.generate([[5, 6, 7]], params)[0].token_ids == found
