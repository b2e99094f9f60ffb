"""The executor of an engine on several GPUs: every rank runs every step, and one that samples has its results."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from minillm import cores
from minillm.config import DeviceConfig
from minillm.errors import ConfigError
from minillm.model.loader import read_config
from minillm.model.parallel import PipelineStage
from minillm.model.split_attention import check_split
from minillm.overrides import Block, OverrideError, Used
from minillm.runner.executor import Executor, Facts
from minillm.runner.launched import Results
from minillm.scheduler.step import Step

from .messages import WARM_UP, LoadShard, StepOfStages, YieldedTokens
from .rank import checksum
from .ranks import Ranks
from .replacements import count, in_ranks, packed


class ParallelExecutor(Executor):
    """Runs steps in processes of their own, one for each GPU.

    The ranks get the same steps and draw the same random numbers, which depend on seeds and positions only. So they
    sample the same tokens; that they do is checked in every step. The last stage of a pipeline samples; the others
    learn its tokens with the next step. Raises ConfigError for a model that they cannot share or load, and RankFailed
    if one of their processes fails.
    """

    def __init__(self, source: Path | str, config: DeviceConfig):
        self._share, self._stages = config.tensor_parallel_size, config.pipeline_parallel_size
        config = replace(config, trace=None)  # the engine's own
        if config.device == "cpu":
            most = min(cores.available(), torch.get_num_threads())  # of all ranks together
            config = replace(config, cpu_threads=config.cpu_threads or max(1, most // config.ranks))
        described = read_config(source)  # refused before processes start
        described.shard(self._share)
        check_split(described, self._share, config.decode_context_parallel_size)
        PipelineStage(0, self._stages).layers(described.num_layers)
        self._unanswered: deque[SentStep] = deque()
        self._used: list[list[Used]] = []  # of each stage: what it has counted in the blocks of `using` that it knows
        self._know(in_ranks())
        self._split_pages = config.decode_context_parallel_size
        on = devices(config.device, self._share, self._stages)
        functions = packed(self._blocks, on, self._split_pages)
        self._sampled: list[YieldedTokens] = []  # what the first stages have not been told
        self.ranks = Ranks(on)
        try:
            self.ranks.send(*(LoadShard(source, replace(config, device=each), functions) for each in on))
            facts: list[Facts] = self.ranks.collect(limited=False)
        except BaseException:
            self.ranks.close()
            raise
        self.facts = replace(facts[0], weight_bytes=sum(each.weight_bytes for each in facts))

    @property
    def failure(self) -> str | None:
        return self.ranks.failure or self.ranks.ended()

    def launch(self, step: Step) -> "SentStep":
        self._replace()
        with self.ranks.whole():
            if self._stages == 1:
                self.ranks.send(step)
            else:
                self.ranks.send(StepOfStages(step, self._sampled))
                self._sampled = []
            self._unanswered.append(SentStep(step, self))
            return self._unanswered[-1]

    def warm_up(self) -> None:
        self._take_answers()
        with self.ranks.whole():
            self.ranks.send(WARM_UP)
            self.ranks.collect(limited=False)

    def close(self) -> None:
        self.ranks.close()

    def take_answer(self) -> None:
        """Wait for the results of the oldest step without any. The engine may have given that step up."""
        self.ranks.wait()  # an interrupt leaves the step unanswered, and the next wait takes its answers
        with self.ranks.whole():
            answers, oldest = self.ranks.take(), self._unanswered.popleft()
        for i, ran in enumerate(answers[:: self._share]):
            count(self._blocks, self._used[i], ran.used)
            self._used[i] = ran.used
        results, checksums = answers[-self._share].results, answers[len(answers) - self._share + 1 :]
        first, *others = self.ranks.members[-self._share :]
        for member, reported in zip(others, checksums, strict=True):
            if reported != checksum(results):
                self.ranks.lose(
                    f"{member} sampled other tokens than rank {first.rank} in step {oldest.step.number}: their caches "
                    "may differ"
                )
        oldest.results = results

    def tell(self, step: Step, results: Results) -> None:
        """Let the first stages of a pipeline know, before the next step, what the last one sampled in this step.

        Not called for a step that the engine gave up after a failure: other requests may have its rows then.
        """
        if self._stages > 1:
            yielded = step.drafted[step.samples] + 1
            tokens = results.tokens[np.arange(results.tokens.shape[1]) < yielded[:, None]]
            self._sampled.append(YieldedTokens(step.token_rows, step.for_each_token(step.ends), tokens))

    def _take_answers(self) -> None:
        while self._unanswered:
            self.take_answer()

    def _replace(self) -> None:
        """Let the ranks run what `using` replaces now. Raises OverrideError, and the engine's own parts run then."""
        blocks = in_ranks()
        if blocks == self._blocks:
            return
        message = packed(blocks, self.ranks.devices, self._split_pages)
        self._take_answers()
        with self.ranks.whole():
            self._know(())
            self.ranks.send(message)
            problem = next(filter(None, self.ranks.collect()), None)
            if problem is None:
                self._know(blocks)
        if problem is not None:
            raise OverrideError(problem)

    def _know(self, blocks: Sequence[Block]) -> None:
        """Remember the blocks that the ranks know, and that nothing has been counted in them."""
        nothing = [Used(dict.fromkeys(each.used.calls, 0)) for each in blocks]
        self._blocks, self._used = blocks, [nothing] * self._stages


class SentStep:
    """A step that all ranks have been sent. `results` are None until they arrive."""

    def __init__(self, step: Step, executor: ParallelExecutor):
        self.step, self._executor = step, executor
        self.results: Results | None = None

    def wait(self) -> Results:
        """As `StepInFlight.wait`. Raises RankFailed."""
        while self.results is None:
            self._executor.take_answer()
        self._executor.tell(self.step, self.results)
        return self.results


def _sizes(share: int, stages: int) -> dict[str, int]:
    """Return the options of more than 1 that divide the model, by their names."""
    sizes = {"tensor_parallel_size": share, "pipeline_parallel_size": stages}
    return {name: size for name, size in sizes.items() if size > 1}


def devices(device: str, share: int, stages: int) -> list[str]:
    """Return the devices of all ranks: `share` for each stage. The first is `device`.

    Raises ConfigError if there are not as many.
    """
    kind, _, index = device.partition(":")
    size = share * stages
    if kind == "cpu":
        return [kind] * size
    first, there = int(index or 0), torch.cuda.device_count()
    if first + size > there:
        options = " and ".join(f"{name}={count}" for name, count in _sizes(share, stages).items())
        raise ConfigError(f"{options} from device={device!r} on needs {first + size} GPUs, and there are {there}")
    return [f"{kind}:{first + rank}" for rank in range(size)]
