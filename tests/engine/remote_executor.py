"""An executor whose model is in another process: steps travel there through a pipe, and results come back."""

import io
import multiprocessing
import pickle
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from minillm.runner.executor import LocalExecutor
from minillm.scheduler import Step

PATIENCE = 120  # seconds that a busy machine may take for a step
VALUES = {"Step", "NewRow", "SamplingParams", "DeviceConfig"}  # the classes of minillm that messages are made of


class Reader(pickle.Unpickler):
    """Reads a message that holds values only: no request of the scheduler's, no matcher, no tensor."""

    def find_class(self, module, name):
        if module.split(".")[0] not in ("numpy", "pathlib") and name not in VALUES:
            raise pickle.UnpicklingError(f"a message with a {module}.{name}")
        return super().find_class(module, name)


@contextmanager
def other_process() -> Iterator[multiprocessing.connection.Connection]:
    """One end of a pipe; at the other end, `serve` runs in a process of its own until the block ends."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that this process sees the end of the pipe when the other one ends
    try:
        with pipe:
            yield pipe
        process.join(PATIENCE)
    finally:
        process.kill()


def serve(pipe: multiprocessing.connection.Connection) -> None:
    """Answer (source, config) with a new executor's facts, and each step with its results or its error."""
    torch.set_num_threads(1)
    executor = None
    with suppress(EOFError):
        while True:
            received = pipe.recv_bytes()
            try:
                message = Reader(io.BytesIO(received)).load()
                if isinstance(message, Step):
                    answer = executor.launch(message).wait()
                else:
                    executor = LocalExecutor(*message)
                    answer = executor.facts
            except Exception as error:
                answer = error
            pipe.send_bytes(pickle.dumps(answer))


class RemoteExecutor:
    """Raises what the other process raises, EOFError if it has ended, and TimeoutError."""

    def __init__(self, pipe, source, config, patience=PATIENCE):
        self.pipe, self.patience = pipe, patience
        self.unanswered = deque()
        self.steps = 0
        self._send((source, config))
        self.facts = self._receive()

    def launch(self, step):
        self._send(step)
        self.steps += 1
        self.unanswered.append(SentStep(step, self))
        return self.unanswered[-1]

    def warm_up(self):
        raise AssertionError("there is nothing to capture")

    def close(self):
        while self.unanswered:
            self.take_answer()

    def take_answer(self):
        """Wait for the answer to the oldest step without one. The engine may have given that step up."""
        self.unanswered.popleft().answer = self._receive(raises=False)

    def _send(self, message):
        self.pipe.send_bytes(pickle.dumps(message))

    def _receive(self, raises=True):
        if not self.pipe.poll(self.patience):
            raise TimeoutError(f"no answer for {self.patience} seconds")
        answer = pickle.loads(self.pipe.recv_bytes())
        if raises and isinstance(answer, Exception):
            raise answer
        return answer


class SentStep:
    def __init__(self, step, executor):
        self.step, self.executor, self.answer = step, executor, None

    def wait(self):
        while self.answer is None:
            self.executor.take_answer()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer
