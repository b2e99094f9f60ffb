"""Engine options are checked once, on construction, and errors name the option and its limit."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from minillm import LLM, AsyncLLM
from minillm.config import DeviceConfig, EngineConfig
from minillm.errors import ConfigError

pytestmark = pytest.mark.key


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": "x"}, "seed must be a 64-bit whole number, not 'x'"),
        ({"seed": 2**63}, "seed must be a 64-bit whole number, not 9223372036854775808"),
        ({"seed": 10**5000}, "seed must be a 64-bit whole number, not <int>"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False, not 'no'"),
        ({"enable_prefix_caching": None}, "enable_prefix_caching must be True or False, not None"),
        ({"enforce_eager": 1}, "enforce_eager must be True or False, not 1"),
        ({"max_num_seqs": True}, "max_num_seqs must be a whole number from 1, not True"),
        ({"max_num_seqs": 4.0}, "max_num_seqs must be a whole number from 1, not 4.0"),
        ({"run_ahead": None}, "run_ahead must be a whole number from 0 to 31, not None"),
        ({"gpu_memory_utilization": "half"}, r"gpu_memory_utilization must be in \(0, 1\], not 'half'"),
        ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization must be in \(0, 1\], not 0"),
        ({"gpu_memory_utilization": 10**400}, r"gpu_memory_utilization must be in \(0, 1\], not 1000"),
        ({"gpu_memory_utilization": True}, r"gpu_memory_utilization must be in \(0, 1\], not True"),
        ({"dtype": None}, "dtype must be one of auto, .*, not 'None'"),
        ({"dtype": ["float32"]}, "dtype must be one of auto, .*"),
        ({"policy": ["fcfs"]}, "policy must be one of fcfs, .*"),
        ({"device": 5}, "device must be auto, cpu, cuda or a GPU as cuda:1, not '5'"),
        ({"device": "cuda:x"}, "device must be auto, cpu, cuda or a GPU as cuda:1, not 'cuda:x'"),
        ({"plan": 5}, "plan must be a file's path, not 5"),
        ({"trace": 5}, "trace must be a file's path, not 5"),
    ],
)
def test_an_invalid_option_is_reported_with_its_name_and_value(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        EngineConfig(**options)
    assert len(str(error.value)) < 300


def test_options_may_be_torch_and_numpy_values():
    given = {"max_num_seqs": np.int64(3), "gpu_memory_utilization": np.float32(0.5), "seed": np.uint8(7)}
    config = EngineConfig(device=torch.device("cuda", 1), dtype=torch.bfloat16, **given)
    expected = EngineConfig(device="cuda:1", dtype="bfloat16", max_num_seqs=3, gpu_memory_utilization=0.5, seed=7)
    assert config == expected
    assert type(config.max_num_seqs) is int and type(config.device) is str


def test_any_gpu_has_a_gpus_rows_and_tokens_unless_they_are_given():
    gpu = (1024, 16384)
    for device, sizes in (("cpu", (256, 2048)), ("cuda", gpu), ("cuda:1", gpu)):
        found = EngineConfig().on(device)
        assert found.device == device
        assert (found.max_num_seqs, found.max_num_batched_tokens) == sizes
    config = EngineConfig(max_num_seqs=3, max_num_batched_tokens=5).on("cuda:1")
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (3, 5)


def test_prompts_next_to_streams_of_a_gpu_have_a_limit_unless_one_is_given_or_the_policy_is_a_baseline():
    def limit(device="cuda", **options):
        return EngineConfig(**options).on(device).for_streams().max_prefill_tokens

    assert limit() == limit("cuda:1", policy="shortest") == 768
    assert limit("cpu") == limit(policy="whole") == limit(policy="static") == 0
    assert limit(max_prefill_tokens=0) == 0 and limit("cpu", max_prefill_tokens=5) == 5
    assert EngineConfig(policy="whole", max_prefill_tokens=0).max_prefill_tokens == 0
    with pytest.raises(ConfigError, match=r"policy='whole' is a baseline without max_prefill_tokens: leave"):
        EngineConfig(policy="whole", max_prefill_tokens=100)


@pytest.mark.parametrize(
    ("name", "nearest"), [("max_num_seq", ", the nearest is max_num_seqs"), ("xyz", ""), ("trust_remote_code", "")]
)
def test_an_option_that_there_is_not_is_named_with_the_nearest_there_is(name, nearest):
    with pytest.raises(ConfigError, match=f"^{name}: no such option{nearest}; the engine's options are: dtype, device"):
        EngineConfig.of(**{name: 1})


def test_an_engine_limits_prompts_while_streams_wait(monkeypatch):
    monkeypatch.setattr(DeviceConfig, "for_streams", lambda self: replace(self, max_prefill_tokens=7))
    with LLM(num_blocks=16) as llm:
        scheduler = llm.engine.scheduler
        assert scheduler.max_prefill_tokens == 0, "offline, no stream waits"
        with closing(AsyncLLM(engine=llm)) as served:
            assert scheduler.max_prefill_tokens == served.config.max_prefill_tokens == 7
        assert scheduler.max_prefill_tokens == 0 and llm.engine.config.max_prefill_tokens is None
    with closing(AsyncLLM(num_blocks=16)) as served:
        assert served.engine.scheduler.max_prefill_tokens == 7
    with LLM(num_blocks=16, max_prefill_tokens=5) as given:
        assert given.config.max_prefill_tokens == given.engine.scheduler.max_prefill_tokens == 5


def test_only_two_options_of_an_engine_may_change():
    with LLM(num_blocks=16) as llm:
        llm.engine.configure(replace(llm.config, run_ahead=0))
        assert llm.engine.config.run_ahead == 0
        with pytest.raises(ConfigError, match="only run_ahead and max_prefill_tokens"):
            llm.engine.configure(replace(llm.config, block_size=8))


def test_the_engine_runs_on_a_torch_device():
    with LLM(device=torch.device("cpu"), dtype=torch.float64, num_blocks=16) as llm:
        assert llm.engine.model.device == torch.device("cpu") and llm.engine.model.dtype == torch.float64


def test_the_docstring_explains_every_option():
    for name in EngineConfig.__dataclass_fields__:
        assert f"\n{name} " in EngineConfig.__doc__


def test_without_a_seed_engines_differ_and_with_one_they_do_not():
    assert EngineConfig.of(seed=None).seed != EngineConfig.of(seed=None).seed
    assert EngineConfig.of().seed == 0
