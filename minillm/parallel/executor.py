"""The executor of an engine on several GPUs: every rank runs every step, and rank 0's results are the step's."""

from collections import deque
from dataclasses import replace
from pathlib import Path

import torch

from minillm import cores, ops
from minillm.config import DeviceConfig
from minillm.errors import ConfigError
from minillm.model.loader import read_config
from minillm.overrides import OverrideError
from minillm.runner.executor import Executor, Facts
from minillm.runner.launched import Results
from minillm.runner.plan import Plan
from minillm.scheduler.step import Step

from .messages import WARM_UP, LoadShard
from .rank import checksum
from .ranks import Ranks


class ParallelExecutor(Executor):
    """Runs steps in processes of their own, one for each GPU.

    The ranks get the same steps and draw the same random numbers, which depend on seeds and positions only. So they
    sample the same tokens; that they do is checked in every step. Raises ConfigError for a model that they cannot
    share or load, and RankFailed if one of their processes fails.
    """

    def __init__(self, place: Path | str, config: DeviceConfig, plan: Plan | None = None):
        assert plan is None, "options with a plan are those of one GPU"
        size = config.tensor_parallel_size
        config = replace(config, trace=None)  # the engine's own
        if config.device == "cpu":
            config = replace(config, cpu_threads=config.cpu_threads or max(1, cores.available() // size))
        read_config(place).shard(size)  # refused before processes start
        self._unanswered: deque[SentStep] = deque()
        self.ranks = Ranks(devices(config.device, size))
        try:
            self.ranks.send(*(LoadShard(place, replace(config, device=device)) for device in self.ranks.devices))
            found: list[Facts] = self.ranks.collect(limited=False)
        except BaseException:
            self.ranks.close()
            raise
        self.facts = replace(found[0], weight_bytes=sum(facts.weight_bytes for facts in found))

    @property
    def failure(self) -> str | None:
        return self.ranks.failure or self.ranks.ended()

    def launch(self, step: Step) -> "SentStep":
        operations = ops.on(torch.device(self.ranks.devices[0]).type)
        if not operations.engines_own:
            mine = ", ".join(name for name in operations.names if operations.origin[name][0] == "yours")
            size = len(self.ranks.devices)
            raise OverrideError(
                f"{mine} cannot be replaced with tensor_parallel_size={size}: the model runs in processes of its own, "
                "and a function of yours is only in this one; use tensor_parallel_size=1"
            )
        self.ranks.send(step)
        self._unanswered.append(SentStep(step, self))
        return self._unanswered[-1]

    def warm_up(self) -> None:
        while self._unanswered:
            self.take_answer()
        self.ranks.send(WARM_UP)
        self.ranks.collect(limited=False)

    def close(self) -> None:
        self.ranks.close()

    def take_answer(self) -> None:
        """Wait for the results of the oldest step without any. The engine may have given that step up."""
        oldest = self._unanswered.popleft()
        results, *checksums = self.ranks.collect()
        for member, found in zip(self.ranks.members[1:], checksums, strict=True):
            if found != checksum(results):
                self.ranks.lose(
                    f"{member} sampled other tokens than rank 0 in step {oldest.step.number}: their caches may differ"
                )
        oldest.results = results


class SentStep:
    """A step that all ranks have been sent. `results` are None until they arrive."""

    def __init__(self, step: Step, executor: ParallelExecutor):
        self.step, self._executor = step, executor
        self.results: Results | None = None

    def wait(self) -> Results:
        """As `StepInFlight.wait`. Raises RankFailed."""
        while self.results is None:
            self._executor.take_answer()
        return self.results


def devices(device: str, size: int) -> list[str]:
    """The devices of `size` ranks, of which the first is `device`. Raises ConfigError if there are not as many."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return [kind] * size
    first, there = int(index or 0), torch.cuda.device_count()
    if first + size > there:
        raise ConfigError(
            f"tensor_parallel_size={size} from device={device!r} on needs {first + size} GPUs, and there are {there}"
        )
    return [f"{kind}:{first + rank}" for rank in range(size)]
