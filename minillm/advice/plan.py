"""A plan: measurements of `minillm build` for one model, one kind of traffic and one GPU, in a JSON file.  Lesson 11.

It holds the engine options for that traffic, the decode steps to capture as CUDA graphs before the first request, and
the kernel launches that were faster on this GPU than the kernels' defaults. As with TensorRT engines, the measurements
are valid only where they were made: a plan names the GPU, the versions and the model's shape, and the engine refuses it
if any of them differs. Without a plan, the engine uses its defaults.

    minillm build gemma-2b --input-len 1024 --output-len 256 --concurrency 256
    minillm serve --model gemma-2b --plan gemma-2b.plan.json
"""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from minillm.config import EngineConfig, Traffic
from minillm.errors import ConfigError
from minillm.kernels.launch_configs import Table, problem, registered
from minillm.model.config import ModelConfig
from minillm.version import __version__

FORMAT = 2
SHAPE = (
    "architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
    "head_dim", "activation", "attention_bias", "qkv_bias", "mlp_bias", "attention_soft_cap", "final_soft_cap",
    "windows", "tie_word_embeddings",
)  # fmt: skip
ANY_NUMBER = ("programs", "stages")  # launch fields of any positive value; the others are powers of two


@dataclass(frozen=True)
class Plan:
    """The content of a plan file."""

    gpu: dict[str, Any] | None  # name, capability, memory_gib; None: for a CPU
    versions: dict[str, str | None]
    model: dict[str, Any]  # the fields of ModelConfig that affect how long a step takes
    traffic: Traffic
    options: dict[str, Any]  # of EngineConfig
    graphs: list[list[int]] = field(default_factory=list)  # decode steps to capture: [rows, blocks of a row]
    launches: list[dict[str, Any]] = field(default_factory=list)  # {"kernel", "sizes", "launch", measurements}
    memory: dict[str, int] = field(default_factory=dict)  # bytes of weights, workspace, graphs and cache
    measured: dict[str, Any] = field(default_factory=dict)  # the measurements behind these choices
    format: int = FORMAT

    @classmethod
    def made_here(cls, model: ModelConfig, traffic: Traffic, options: dict[str, Any], device: str) -> "Plan":
        """Return a plan for this machine without any measurements."""
        return cls(gpu_here(device), versions_here(), shape(model), traffic, options)

    def write(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> "Plan":
        """Read a plan. Raises ConfigError if the file is missing, damaged or of another format."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the plan {path} ({error.strerror}); `minillm build` writes one") from None
        except ValueError as error:
            raise ConfigError(f"the plan {path} is damaged: it is not JSON ({error}); {AGAIN}") from None
        format = content.get("format") if isinstance(content, dict) else None
        if format != FORMAT:
            raise ConfigError(f"{path} has format {format!r}, but this minillm reads format {FORMAT}; {AGAIN}")
        try:
            plan = cls(**content | {"traffic": Traffic(**content["traffic"])})
            plan._check_parts()
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"the plan {path} is damaged ({error}); {AGAIN}") from None
        return plan

    def _check_parts(self) -> None:
        for name, kind in (
            ("versions", dict),
            ("model", dict),
            ("options", dict),
            ("memory", dict),
            ("measured", dict),
        ):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} is not an object")
        EngineConfig(**self.options)
        for rows, blocks in self.graphs:
            if not (_positive(rows) and _positive(blocks)):
                raise ValueError(f"graphs has an invalid entry {[rows, blocks]}")
        for entry in self.launches:
            for name, value in entry["launch"].items():
                if not _positive(value) or (name not in ANY_NUMBER and value & (value - 1)):
                    raise ValueError(f"a launch of {entry['kernel']} has the invalid {name} {value!r}")
            if not all(type(size) is str or (type(size) is int and size >= 0) for size in entry["sizes"].values()):
                raise ValueError(f"the sizes of {entry['kernel']} are invalid: {entry['sizes']}")

    def configure(self, config: EngineConfig, model: ModelConfig, device: str) -> EngineConfig:
        """Return `config` with the plan's options. Raises ConfigError if the plan does not apply or they conflict."""
        self.check(model, device)
        defaults = EngineConfig()
        for name, value in self.options.items():
            asked = getattr(config, name)
            if asked not in (getattr(defaults, name), value):
                raise ConfigError(
                    f"the plan was made for {name}={value!r}, not {asked!r}: leave {name} out, or {self._rebuild()}"
                )
        return replace(config, **self.options)

    def check(self, model: ModelConfig, device: str) -> None:
        """Raise ConfigError, with every reason, if the GPU, the versions or the model's shape differ."""
        here = {"GPU": _words(gpu_here(device)), **versions_here()}
        there = {"GPU": _words(self.gpu), **self.versions}
        reasons = [f"{name} {there.get(name)} (here: {here[name]})" for name in here if there.get(name) != here[name]]
        shape_here = shape(model)
        reasons += [
            f"a model with {name} {self.model.get(name)!r} (this one: {shape_here[name]!r})"
            for name in SHAPE
            if self.model.get(name) != shape_here[name]
        ]
        if reasons:
            raise ConfigError(f"the plan was made for {', '.join(reasons)}; {self._rebuild()}, or run without a plan")

    def for_executor(self) -> dict[str, Any]:
        """Return the arguments of `LocalExecutor` that a plan sets. Raises ConfigError for a launch that fits no
        kernel.
        """
        return {"kernel_configs": self.table(), "graphs": self.graphs}

    def table(self) -> Table:
        """Return the measured launches in the form that kernels look up. Raises ConfigError for one that fits no
        kernel.
        """
        if not self.launches:
            return {}
        kinds, table = registered(), {}
        for entry in self.launches:
            kind = kinds.get(entry["kernel"])
            if kind is None or set(entry["launch"]) != set(kind.__annotations__):
                raise ConfigError(
                    f"the plan is damaged: no kernel has a launch {entry['kernel']} {entry['launch']}; {AGAIN}"
                )
            table[problem(entry["kernel"], **entry["sizes"])] = entry["launch"]
        return table

    def _rebuild(self) -> str:
        traffic = self.traffic
        return (
            f"build another: minillm build MODEL --input-len {traffic.input_len} "
            f"--output-len {traffic.output_len} --concurrency {traffic.concurrency}"
        )


AGAIN = "write it again with `minillm build`"


def shape(model: ModelConfig) -> dict[str, Any]:
    """Return the model's properties that affect how long a step takes, as JSON values."""
    return {name: list(model.windows) if name == "windows" else getattr(model, name) for name in SHAPE}


def gpu_here(device: str) -> dict[str, Any] | None:
    """Return the properties of a GPU that a plan depends on; None for a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30),
    }


def versions_here() -> dict[str, str | None]:
    import torch

    try:
        import triton
    except ImportError:
        triton = None
    return {"torch": torch.__version__, "triton": getattr(triton, "__version__", None), "minillm": __version__}


def _words(gpu: dict[str, Any] | None) -> str:
    if gpu is None:
        return "none, a CPU"
    return f"{gpu.get('name')}, compute capability {gpu.get('capability')}, {gpu.get('memory_gib')} GiB"


def _positive(value: Any) -> bool:
    return type(value) is int and value >= 1
