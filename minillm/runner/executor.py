"""The interface between an engine and its device: steps go in, results come out.  Lesson 10.

The engine uses an executor only through this interface, so steps can also run in another process: see
`tests/engine/remote_executor.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from minillm.adapters.peft import Adapter
from minillm.adapters.slots import loaded
from minillm.config import DeviceConfig
from minillm.cores import OtherPrograms
from minillm.errors import ConfigError
from minillm.kernels import launch_configs
from minillm.kv_cache.attention_sinks import Stream
from minillm.model.config import ModelConfig
from minillm.model.cut_head import cut_head
from minillm.model.loader import load_model, rounded
from minillm.model.parallel import OneDevice, Parallel
from minillm.scheduler.step import Step

from .cuda_graph import DecodeShape
from .launched import LaunchedStep, StepInFlight
from .runner import Runner
from .threads import Threads


@dataclass(frozen=True)
class Facts:
    """Describes a model and its device to the engine; constant once an executor has started."""

    model: ModelConfig  # as it was loaded
    dtype: str  # of its activations: "float32"
    kv_cache_dtype: str  # of the cache: a dtype, or int8 or fp8
    weight_bytes: int
    num_blocks: int  # cache blocks
    max_model_len: int  # what was asked for, or fewer tokens where the cache holds no such request
    windows: tuple[int | None, ...]  # per layer group: how many tokens a query sees; None: all
    stream: Stream | None  # what a row keeps if requests may be longer than max_model_len
    captures: bool  # whether steps are captured as CUDA graphs, and can be warmed up


class Executor(Protocol):
    """Loads a model and runs steps in launch order."""

    facts: Facts

    @property
    def failure(self) -> str | None:
        """Return why no further step can run, if a process was lost; None while steps can run."""
        return None

    def launch(self, step: Step) -> StepInFlight:
        """Run a step. Returns before it has finished if the device is asynchronous."""
        ...

    def warm_up(self) -> None:
        """Compile the kernels and capture the graphs that the first steps need."""
        ...

    def load_adapter(self, load: int, adapter: Adapter) -> None:
        """Make an adapter ready, for steps whose rows name this load; any thread may call it. Raises ConfigError."""
        raise ConfigError(f"{type(self).__name__} loads no adapters while it runs: name them when the engine starts")

    def unload_adapter(self, load: int) -> None:
        """Forget an adapter that no later row names."""
        return None

    def close(self) -> None:
        """Free the model, the cache and the graphs."""
        ...


class WatchedExecutor(Executor):
    """Passes every call to another executor. A subclass overrides what it wants to see."""

    def __init__(self, executor: Executor):
        self.executor, self.facts = executor, executor.facts

    def launch(self, step: Step) -> StepInFlight:
        return self.executor.launch(step)

    def warm_up(self) -> None:
        self.executor.warm_up()

    def load_adapter(self, load: int, adapter: Adapter) -> None:
        self.executor.load_adapter(load, adapter)

    def unload_adapter(self, load: int) -> None:
        self.executor.unload_adapter(load)

    def close(self) -> None:
        self.executor.close()


class LocalExecutor(Executor):
    """Runs steps in this process, on one device.

    source: the model, as `minillm.model.loader.resolve` returns it. kernel_configs: measured launch configurations.
    graphs: decode steps to capture at once, as (rows, blocks of a row). head: the tokens to which the head is cut;
    None: all. parallel: the ranks that share the model, of which this process is one. Raises ConfigError for a
    model that cannot be loaded, and if memory is too small for the options.
    """

    def __init__(
        self,
        source: Path | str,
        config: DeviceConfig,
        *,
        kernel_configs: launch_configs.Table | None = None,
        graphs: Sequence[Sequence[int]] = (),
        head: Sequence[int] | None = None,
        parallel: Parallel = OneDevice(),
    ):
        others = OtherPrograms()  # measured while the model loads
        model = load_model(
            source,
            dtype=config.dtype,
            device=config.device,
            load_format=config.load_format,
            max_model_len=config.max_model_len,
            seed=config.seed,
            recipe=rounded(source, config.quantization, config.quantized_head),
            kv_cache_dtype=config.kv_cache_dtype,
            parallel=parallel,
            exact=config.exact,
        )
        if head is not None:
            cut_head(model, torch.tensor(head, device=model.device))
        self._kernel_configs = kernel_configs or {}
        self.threads = Threads.of(config, others) if model.device.type == "cpu" else None
        with self._tuned():
            self.runner = Runner(model, config, model.max_model_len, loaded(model, config))
            if graphs and self.runner.graphs is not None:
                self.runner.graphs.capture(DecodeShape(rows, width) for rows, width in graphs)
        self.facts = Facts(
            model=model.config,
            dtype=str(model.dtype).removeprefix("torch."),
            kv_cache_dtype=model.cache_spec.name,
            weight_bytes=model.nbytes,
            num_blocks=self.runner.num_blocks,
            max_model_len=self.runner.max_model_len,
            windows=model.groups.windows,
            stream=self.runner.stream,
            captures=self.runner.graphs is not None,
        )

    def launch(self, step: Step) -> LaunchedStep:
        with self._tuned(), nullcontext() if self.threads is None else self.threads.chosen():
            return self.runner.run(step)

    def warm_up(self) -> None:
        """Capture every batch size with the narrowest block tables, and every shape with prompts."""
        if self.runner.graphs is not None:
            with self._tuned():
                self.runner.graphs.capture_all()

    def load_adapter(self, load: int, adapter: Adapter) -> None:
        if self.runner.state.adapters is None:
            raise ConfigError("this engine has no room for adapters: start it with max_loras, or with adapters")
        self.runner.state.adapters.add(load, adapter)

    def unload_adapter(self, load: int) -> None:
        if self.runner.state.adapters is not None:
            self.runner.state.adapters.remove(load)

    def close(self) -> None:
        self.runner.close()
        del self.runner
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @contextmanager
    def _tuned(self) -> Iterator[None]:
        """Use the measured launch configurations inside the block.

        They are kept in a thread-local table, because an operation's arguments do not tell which engine calls it.
        """
        with launch_configs.using(self._kernel_configs):
            yield
