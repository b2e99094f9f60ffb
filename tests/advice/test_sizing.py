"""The size calculator agrees with the engine and with published model sizes."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from minillm import LLM
from minillm.advice import sizing
from minillm.errors import ConfigError
from minillm.model import Model
from minillm.model.config import PRESETS, ModelConfig
from minillm.model.loader import EMBEDDED, load_model
from tests import models

GEMMA_2B = PRESETS["gemma-2b"]
LLAMA = {"architecture": "LlamaForCausalLM", "head_dim": 128, "max_model_len": 131072}
LLAMA_2_7B = ModelConfig(
    **LLAMA,
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
)
LLAMA_3_8B = replace(LLAMA_2_7B, vocab_size=128256, intermediate_size=14336, num_kv_heads=8)
LLAMA_3_70B = replace(LLAMA_3_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64)
PUBLISHED = [
    (GEMMA_2B, 2_506_172_416),
    (LLAMA_2_7B, 6_738_415_616),
    (LLAMA_3_8B, 8_030_261_248),
    (LLAMA_3_70B, 70_553_706_496),
]


@pytest.mark.parametrize(("config", "count"), PUBLISHED)
def test_parameter_counts_equal_the_published_ones(config, count):
    assert sizing.parameters(config) == count
    assert sizing.weight_bytes(config) == 2 * count


@pytest.mark.parametrize("name", models.CONFIGS)
def test_parameter_counts_equal_what_the_model_allocates(name, tmp_path):
    models.make(name).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32")
    assert sizing.parameters(model.config) == model.num_parameters


@pytest.mark.parametrize("name", PRESETS)
def test_preset_parameter_counts_equal_what_the_model_allocates(name):
    model = Model(PRESETS[name], dtype=torch.bfloat16, device="meta", max_model_len=16)
    assert sizing.parameters(PRESETS[name]) == model.num_parameters
    assert sizing.weight_bytes(PRESETS[name]) == sum(t.numel() * 2 for t in model.tensors())


@pytest.mark.parametrize(
    ("config", "bytes_per_token"), [(GEMMA_2B, 18_432), (LLAMA_2_7B, 524_288), (LLAMA_3_8B, 131_072)]
)
def test_kv_bytes_per_token(config, bytes_per_token):
    assert sizing.kv_bytes_per_token(config) == bytes_per_token
    scales = 2 * 4 * config.num_layers * config.num_kv_heads  # one of a key and one of a value
    assert sizing.kv_bytes_per_token(config, "int8") - scales == bytes_per_token // 2
    assert sizing.kv_bytes_per_token(config, "fp8") == sizing.kv_bytes_per_token(config, "int8")


def test_kv_bytes_equal_those_of_the_running_engine():
    with LLM(device="cpu", dtype="float32", num_blocks=7, block_size=8) as llm:
        taken = sum(cache.k.nbytes + cache.v.nbytes for cache in llm.engine.executor.runner.caches)
    config = ModelConfig.from_directory(EMBEDDED)
    assert taken == 56 * sizing.kv_bytes_per_token(config, "float32")
    assert taken == sizing.kv_bytes(config, 50, "float32", block_size=8)


def test_local_layers_keep_their_window_and_global_layers_keep_everything():
    config = replace(GEMMA_2B, num_layers=3, windows=(100, None, 100))
    layer = sizing.kv_bytes_per_token(config) // 3
    assert sizing.kv_bytes(config, 1000) == (100 + 1000 + 100) * layer
    # A window of 100 tokens may span 8 blocks of 16: 2 tokens in the first, 2 in the last.
    assert sizing.kv_bytes(config, 1000, block_size=16) == (128 + 1008 + 128) * layer
    assert sizing.kv_bytes(config, 50) == 3 * 50 * layer, "a context shorter than the window is kept completely"


def test_an_incomplete_layer_group_costs_as_much_as_a_full_one():
    config = replace(GEMMA_2B, num_layers=5, windows=(100, None, 100, None, 100))
    layer = sizing.kv_bytes_per_token(config) // 5
    assert sizing.kv_bytes(config, 1000) == (100 + 100 + 1000) * 2 * layer


def test_the_parts_of_gpu_memory_add_up_to_the_total():
    size = sizing.fit(GEMMA_2B, 80e9, 4096)
    assert size.usable_bytes == 72_000_000_000
    assert size.cache_bytes == 72_000_000_000 - 2 * 2_506_172_416
    assert size.request_bytes == 4096 * 18_432
    assert size.requests == 887
    assert size.requests * size.request_bytes <= size.cache_bytes < (size.requests + 1) * size.request_bytes


def test_every_option_changes_the_number_of_requests():
    plain = sizing.fit(LLAMA_3_8B, 80e9, 1000).requests
    assert sizing.fit(LLAMA_3_8B, 80e9, 1000, block_size=512).requests < plain
    assert sizing.fit(LLAMA_3_8B, 80e9, 1000, utilization=0.5).requests < plain
    assert sizing.fit(LLAMA_3_8B, 80e9, 1000, workspace_bytes=10e9).requests < plain
    assert sizing.fit(LLAMA_3_8B, 80e9, 1000, kv_cache_dtype="fp8").requests > 1.9 * plain
    assert sizing.fit(LLAMA_3_8B, 80e9, 1000, dtype="int4", kv_cache_dtype="bfloat16").requests > plain


def test_weights_larger_than_the_gpu_leave_room_for_no_request():
    size = sizing.fit(LLAMA_3_70B, 80e9, 16)
    assert size.cache_bytes == 0 and size.requests == 0


def test_the_result_prints_as_a_table():
    assert str(sizing.fit(GEMMA_2B, 80e9, 4096)) == (
        "parameters                2,506,172,416\n"
        "weights                            5.01 GB\n"
        "KV cache of a token               18.43 kB\n"
        "KV cache of 4,096 tokens          75.50 MB\n"
        "GPU                               80.00 GB\n"
        "usable                            72.00 GB\n"
        "left for the KV cache             66.99 GB\n"
        "requests that fit                   887"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int3"}, "dtype 'int3' is not one of float64, float32"),
        ({"kv_cache_dtype": "half"}, "dtype 'half' is not one of"),
        ({"context": 0}, "context and block_size are tokens, from 1, not 0 and 16"),
        ({"block_size": 0}, "from 1, not 100 and 0"),
        ({"utilization": 90}, "utilization is a share"),
        ({"gpu_bytes": -1}, "gpu_bytes must be above 0"),
    ],
)
def test_invalid_sizing_options_are_rejected_with_a_remedy(options, message):
    with pytest.raises(ConfigError, match=message):
        sizing.fit(GEMMA_2B, **{"gpu_bytes": 80e9, "context": 100, **options})


def test_sizing_runs_without_torch():
    code = "import sys; sys.modules['torch'] = None; from minillm.advice import sizing; print(sizing.BITS['int4'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "4\n"
