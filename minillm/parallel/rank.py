"""The process of one rank: it loads its shard, and runs the steps that the engine sends.

Three threads: one reads messages, so that the engine never waits to send one; one runs them, in order; one waits for
the results of steps and sends them, so that the next step is launched meanwhile.
"""

import ctypes
import os
import pickle
import signal
import sys
import threading
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch

from minillm.errors import ConfigError
from minillm.runner.executor import LocalExecutor
from minillm.runner.launched import LaunchedStep, Results
from minillm.scheduler.step import Step

from .collectives import Group
from .messages import PING, Answered, Failed, LoadShard, Pong, Ran, Replace, StepOfStages
from .replacements import Replacements
from .stages import StageGroup

PR_SET_PDEATHSIG = 1


def checksum(results: Results) -> int:
    """Return a number that differs, almost surely, if the tokens of a step do."""
    return zlib.crc32(results.tokens.tobytes())


class Rank:
    """Serves one engine, and ends with it. device: "cpu", or the GPU, as "cuda:1"."""

    def __init__(self, connection: Connection, rank: int, size: int, meeting: str, device: str):
        self.connection, self.rank = connection, rank
        self.group: Group | None = None
        self.executor: LocalExecutor | None = None
        self.replacements = Replacements()
        self.working = False
        self._failed = threading.Event()
        self._messages: SimpleQueue[Any] = SimpleQueue()
        self._answers: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._sending = threading.Lock()
        threading.Thread(target=self._read, name="minillm-messages", daemon=True).start()
        threading.Thread(target=self._answer, args=(device,), name="minillm-answers", daemon=True).start()
        self.group = self.world = Group.join(rank, size, meeting, torch.device(device))

    def run(self) -> None:
        """Do what the messages say, until the engine is gone. After a failure, only pings are answered.

        The other ranks would take what this one sends in a later step for a part of the step that failed.
        """
        while True:
            message = self._messages.get()
            if self._failed.is_set():
                continue
            self.working = True
            try:
                self._answers.put(self._do(message))
            except Exception as error:
                self._failed.set()
                self._answers.put(_raising(error))
            self.working = False

    def _do(self, message: Any) -> Callable[[], Any]:
        """Carry out a message. Returns what waits for its answer."""
        assert self.group is not None, "messages are read once it is there"
        if isinstance(message, StepOfStages):
            assert self.executor is not None, "a model is loaded before there are steps"
            if not self.group.stage.last:
                for sampled in message.sampled:
                    self.executor.runner.put(*sampled)
            message = message.step
        if isinstance(message, Step):
            assert self.executor is not None, "a model is loaded before there are steps"
            launched = self.executor.launch(message)
            used, group = self.replacements.used(), self.group
            if not group.stage.last:
                return lambda: _finished(launched, Ran(None, used) if group.rank == 0 else None)
            return lambda: Ran(launched.wait(), used) if group.rank == 0 else checksum(launched.wait())
        if isinstance(message, Replace):
            problem = self.replacements.follow(message)
            return lambda: problem
        if isinstance(message, LoadShard):
            if self.executor is not None:
                self.executor.close()
            stages = message.config.pipeline_parallel_size
            self.group = self.world if stages == 1 else StageGroup(self.world, stages)
            self.group.split_pages(message.config.decode_context_parallel_size)
            if problem := self.replacements.follow(message.replace):
                raise ConfigError(problem)
            self.executor = LocalExecutor(message.source, message.config, parallel=self.group)
            facts = self.executor.facts
            return lambda: facts
        assert self.executor is not None, "a model is loaded before kernels are warmed up"
        self.executor.warm_up()
        return lambda: None

    # ---- on threads of their own

    def _read(self) -> None:
        while True:
            try:
                message = pickle.loads(self.connection.recv_bytes())
            except (EOFError, OSError):  # the engine is gone; the other threads may be inside a collective
                os._exit(0)
            if message == PING:
                entered, waiting = (-1, False) if self.group is None else (self.group.entered, self.group.waiting)
                self._send(Pong(entered, self.working and not waiting))
            else:
                self._messages.put(message)

    def _answer(self, device: str) -> None:
        if device.startswith("cuda"):  # each thread has a current device of its own, which is cuda:0 at first
            torch.cuda.set_device(device)
        while True:
            wait = self._answers.get()
            try:
                self._send(Answered(wait()))
            except Exception as error:
                self._failed.set()
                self._send(Failed.of(error))
                return

    def _send(self, message: Any) -> None:
        with self._sending:
            try:
                self.connection.send_bytes(pickle.dumps(message))
            except OSError:
                os._exit(0)


def _finished(launched: LaunchedStep, answer: Any) -> Any:
    launched.finish()
    return answer


def _raising(error: Exception) -> Callable[[], Any]:
    def wait() -> Any:
        raise error

    return wait


def main() -> None:
    """Run a rank whose owner has given the socket to it as the first argument, then what `Rank` takes."""
    if sys.platform == "linux":  # it ends with the thread that started it, even if all of its own are stuck
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection, rank, size, meeting, device = sys.argv[1:]
    Rank(Connection(int(connection)), int(rank), int(size), meeting, device).run()


if __name__ == "__main__":
    main()
