"""The engine's options: what the user chooses, under vLLM's names where it has them.  Lesson 00."""

from dataclasses import dataclass, field, fields, replace
from textwrap import wrap
from typing import Any, Literal, TypeVar, get_args

from minillm.errors import ConfigError
from minillm.renamed import names

__getattr__ = names(__name__)

PolicyName = Literal["fcfs", "priority", "shortest", "static", "whole"]
Config = TypeVar("Config")
NAMES_WIDTH = 24  # of the column of names in the docstring


def _option(default: Any, help: str) -> Any:
    """A field that explains itself: in `help(EngineConfig)`, and as an option of the command line."""
    return field(default=default, metadata={"help": help})


def _explained(config: type[Config]) -> type[Config]:
    """Add what its options say of themselves to a dataclass's docstring."""
    lines = []
    for each in fields(config):
        lines += wrap(f"{each.name:<{NAMES_WIDTH}}{each.metadata['help']}", 112, subsequent_indent=" " * NAMES_WIDTH)
    config.__doc__ = "\n".join([config.__doc__, "", *lines])
    return config


@_explained
@dataclass(frozen=True)
class EngineConfig:
    """The engine's options; None lets the engine choose by device.  Lesson 00."""

    dtype: str = _option("auto", '"auto" (float32 on CPU, else the file\'s), float64, float32, bfloat16 or float16')
    device: str = _option("auto", '"auto", "cpu" or "cuda"')
    load_format: str = _option("auto", '"auto" reads safetensors; "dummy" makes random weights of the right shapes')
    max_model_len: int | None = _option(
        None, "most tokens of prompt and output together; default: the model's own limit"
    )
    max_num_seqs: int | None = _option(None, "most requests in one step; default: 256 on CPU, 1,024 on a GPU")
    max_num_batched_tokens: int | None = _option(
        None,
        "most tokens in one step: the budget that prefill chunks and decodes share; default: 2,048 on CPU, 16,384 on "
        "a GPU",
    )
    block_size: int = _option(16, "tokens a cache block holds")
    num_blocks: int | None = _option(None, "cache blocks; default: what the memory allows")
    gpu_memory_utilization: float = _option(
        0.9, "share of the GPU's memory that weights, workspace, CUDA graphs and cache may take"
    )
    enforce_eager: bool = _option(False, "never use CUDA graphs")
    attention_sinks: int | None = _option(
        None, "streams (lesson 09): first tokens that a request keeps when it runs past max_model_len"
    )
    attention_window: int | None = _option(
        None, "streams: newest tokens that it keeps; both are rounded up to blocks, and run without graphs"
    )
    enable_prefix_caching: bool = _option(True, "share the blocks of equal prompt beginnings")
    policy: PolicyName = _option(
        "fcfs",
        "who goes first: fcfs (first come, first served), priority (RequestOptions.priority, lower first), shortest "
        "(prompt; with a promise to the long ones); and two baselines: static (whole batches, not in flight), whole "
        "(prompts in one step each, not in chunks)",
    )
    run_ahead: int = _option(1, "steps launched before the first one's tokens are read (0: none)")
    seed: int = _option(0, "of every request that names none")
    plan: str | None = _option(
        None, "a file that `minillm build` wrote: options, CUDA graphs and launches measured on this GPU"
    )
    trace: str | None = _option(None, "a file that events are written into, as JSON lines (or a `minillm.trace.Trace`)")

    def __post_init__(self) -> None:
        choices = {
            "dtype": ("auto", "float64", "float32", "bfloat16", "float16"),
            "load_format": ("auto", "dummy"),
            "policy": get_args(PolicyName),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        if self.device != "auto" and self.device.split(":")[0] not in ("cpu", "cuda"):
            raise ConfigError(f"device must be auto, cpu or cuda, not {self.device!r}")
        minimum = {
            "max_model_len": 2,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "block_size": 1,
            "num_blocks": 1,
            "run_ahead": 0,
            "attention_sinks": 0,
            "attention_window": 1,
        }
        for name, low in minimum.items():
            value = getattr(self, name)
            if value is None and name not in ("block_size", "run_ahead"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"{name} must be a whole number from {low}, not {value!r}")
        if (self.attention_sinks is None) != (self.attention_window is None):
            raise ConfigError("attention_sinks and attention_window go together: give both, or none (sinks may be 0)")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], not {self.gpu_memory_utilization!r}")

    def on(self, device: str) -> "EngineConfig":
        """The same options with what the device decides filled in."""
        rows, tokens = (1024, 16384) if device.startswith("cuda") else (256, 2048)
        return replace(
            self,
            device=device,
            max_num_seqs=self.max_num_seqs or rows,
            max_num_batched_tokens=self.max_num_batched_tokens or tokens,
        )
