"""`quantization="auto"`: replaced by what is recommended for the model, the GPU and its traffic.  Lesson 08."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from minillm.advice.choosing import GPUS, Recommendation, known, recommend
from minillm.config import EngineConfig, Traffic
from minillm.model.loader import read_config
from minillm.quantization.checkpoints import read_layout

INPUT, OUTPUT = 512, 256  # tokens of a request, where nothing is known of the traffic

log = logging.getLogger(__name__)


def resolved(config: EngineConfig, source: Path | str, device: str, traffic: Traffic | None = None) -> EngineConfig:
    """Return the options with a method, or None, in place of `quantization="auto"`; the log says which, and why.

    source    what `minillm.model.loader.resolve` returned
    traffic  default: max_num_seqs requests of INPUT and OUTPUT tokens, or as many as max_model_len allows

    A head's format that was set stays. Methods that need calibration are not considered. Raises ConfigError.
    """
    if config.quantization != "auto":
        return config
    if why := reason_against(config, source, device):
        log.info("quantization=auto: %s", why)
        return replace(config, quantization=None)
    if traffic is None:
        traffic = usual_traffic(config, source, config.on(device).max_num_seqs)
    chosen = recommended(config, source, device, traffic)
    speed = f", {chosen.best.speed:.2f} times as fast as bf16 by estimate" if chosen.best.speed else ""
    log.info(
        f"quantization=auto chose {chosen.best.name} for {traffic.concurrency:,} requests (max_num_seqs) of "
        f"{traffic.input_len:,} + {traffic.output_len:,} tokens{speed}. {' '.join(chosen.reasons[:2])}"
    )
    head = config.quantized_head or chosen.quantized_head
    return replace(config, quantization=chosen.quantization, quantized_head=head)


def usual_traffic(config: EngineConfig, source: Path | str, requests: int) -> Traffic:
    """So many requests of INPUT and OUTPUT tokens, or as many as max_model_len allows."""
    longest = config.max_model_len or read_config(source).max_model_len
    inputs = min(INPUT, longest // 2)
    return Traffic(requests, inputs, min(OUTPUT, longest - inputs))


def reason_against(config: EngineConfig, source: Path | str, device: str) -> str:
    """Return why a model's weights should stay as they are on this device, or ""."""
    if isinstance(source, Path) and read_layout(source) is not None:
        return f"{source.name} is quantized already and stays as it is"
    if not device.startswith("cuda"):
        return "on a CPU the weights keep their dtype, since quantized ones are not faster there"
    dtype = read_config(source).dtype if config.dtype == "auto" else config.dtype
    if dtype != "bfloat16":
        return f"the weights stay in {dtype}, since kernels for quantized ones need dtype=bfloat16"
    name = torch.cuda.get_device_name(device)
    if known(name) is None:
        return (
            f"the weights stay in {dtype}, since the rates of {name} are not known (those of {', '.join(GPUS)} are); "
            "minillm.advice.choosing.recommend takes the rates of any GPU"
        )
    return ""


def recommended(
    config: EngineConfig, source: Path | str, device: str, traffic: Traffic, *, any_cache: bool = False
) -> Recommendation:
    """Return what is recommended for a model on this GPU, where no reason is against it. Raises ConfigError.

    any_cache: choose the cache's format too, instead of taking that of the options
    """
    gpu = known(torch.cuda.get_device_name(device))
    assert gpu is not None
    return recommend(
        read_config(source),
        replace(gpu, memory_bytes=torch.cuda.get_device_properties(device).total_memory),
        traffic,
        kv_cache_dtype=None if any_cache else config.kv_cache_dtype,
        utilization=config.gpu_memory_utilization,
    )
