"""Models divided between ranks, side by side in one process, compute what the whole model computes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from minillm.errors import ConfigError
from minillm.model import PRESETS
from minillm.model.checkpoint import Pieces, read_headers
from minillm.model.loader import EMBEDDED, load_model, read_config, rounded
from minillm.model.modules import modules, shard
from minillm.model.parallel import OneDevice, Parallel
from minillm.model.saver import save_model
from minillm.quantization import Recipe
from tests import models
from tests.model.test_decoder import Paged

PROMPTS = [[5, 6, 7, 8, 9], [30, 31, 32], [40]]
INT4 = {"layers.*": {"format": "int4", "group_size": 4}, "*": "int8"}


class Thread(Parallel):
    """A rank in a thread. Collectives wait for the other ranks."""

    connected = False

    def __init__(self, rank: int, group: list["Thread"], barrier: threading.Barrier):
        self.rank, self.size, self.group, self.barrier = rank, barrier.parties, group, barrier
        self.sums = 0
        group.append(self)

    def all(self, x):
        self.sent = x
        self.barrier.wait(60)
        found = [rank.sent for rank in self.group]
        self.barrier.wait(60)
        return found

    def all_reduce(self, x):
        self.sums += 1
        return sum(self.all(x))

    def add_rms_norm(self, x, residual, norm, eps):
        return None

    def all_gather(self, x):
        return torch.cat(self.all(x), -1)

    def exchange(self, x, to, source):
        return self.all(x)[source]


def ranks(size: int) -> list[Thread]:
    group, barrier = [], threading.Barrier(size)
    return [Thread(rank, group, barrier) for rank in range(size)]


def computed(model) -> list[torch.Tensor]:
    """Hidden states and logits of prompts, and of a step with decodes and another prompt."""
    paged, found = Paged(model), []
    rows = [paged.admit() for _ in range(4)]
    with torch.inference_mode():
        for batch in (
            paged.batch({}, dict(zip(rows, PROMPTS, strict=False)), every=True),
            paged.batch({row: [11 + row] for row in rows[:3]}, {rows[3]: [50, 51]}),
        ):
            hidden = model.forward(batch, paged.caches)
            found += [hidden, model.logits(hidden)]
    return found


def assert_the_same(directory, size=2, **options):
    whole = load_model(directory, dtype="float64", max_model_len=64, **options)
    parts = [load_model(directory, dtype="float64", max_model_len=64, parallel=rank, **options) for rank in ranks(size)]
    assert all(part.nbytes < 0.9 * whole.nbytes for part in parts)
    with ThreadPoolExecutor(size) as pool:
        for found in pool.map(computed, parts):
            for mine, wanted in zip(found, computed(whole), strict=True):
                torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-9)
    layers = whole.config.num_layers
    assert all(part.parallel.sums == 2 * (2 * layers + 1) for part in parts), "two sums a layer, one of embeddings"


@pytest.mark.parametrize("recipe", [{}, {"*": "int8"}, INT4], ids=["dense", "int8", "int4"])
@pytest.mark.parametrize(
    "name", ["tiny-gemma", "llama3-grouped", "llama-biases", "llama3-tied-head-dim", "gemma2-grouped-untied"]
)
def test_two_half_models_compute_the_whole_models_hidden_states(name, recipe, tmp_path):
    if name != "tiny-gemma":
        models.make(name).save_pretrained(tmp_path)
    assert_the_same(EMBEDDED if name == "tiny-gemma" else tmp_path, recipe=Recipe(recipe))


def test_four_ranks_share_two_kv_heads(tmp_path):
    models.make("qwen3-grouped").save_pretrained(tmp_path)
    assert_the_same(tmp_path, size=4)


def test_a_quantized_checkpoint_is_divided_too(tmp_path):
    whole = load_model(EMBEDDED, dtype="float32", recipe=Recipe({"layers.*": "int4", "head": "int8"}))
    save_model(whole, EMBEDDED, tmp_path / "model")
    with pytest.raises(
        ConfigError, match="group_size=128 does not divide the 64 inputs of this model's matrices, or of"
    ):
        load_model(tmp_path / "model", parallel=ranks(4)[3])
    assert_the_same(tmp_path / "model")


def test_a_scale_for_a_whole_tensor_is_every_ranks(tmp_path):
    recipe = Recipe({"layers.*": {"format": "fp8", "scales": "tensor"}})
    save_model(load_model(EMBEDDED, dtype="float32", recipe=recipe), EMBEDDED, tmp_path / "model")
    assert_the_same(tmp_path / "model")


@pytest.mark.parametrize(("recipe", "columns"), [({}, True), ({"*": "int8"}, False)], ids=["dense", "int8"])
def test_each_rank_reads_only_its_part_of_the_file(recipe, columns, monkeypatch):
    """Scales of rows are of whole rows, which each rank reads."""
    read, fill = [], Pieces._fill

    def counted(self, stream, offset, place, size):
        read.append(size)
        fill(self, stream, offset, place, size)

    monkeypatch.setattr(Pieces, "_fill", counted)
    load_model(EMBEDDED, recipe=Recipe(recipe))
    everything, twice = sum(read), 0
    for name, entry in read_headers(EMBEDDED).items():
        by_inputs = name.endswith(("o_proj.weight", "down_proj.weight")) and not columns
        twice += entry.nbytes * (by_inputs or "k_proj" in name or "v_proj" in name or "norm" in name)
    read.clear()
    for rank in ranks(2):
        load_model(EMBEDDED, recipe=Recipe(recipe), parallel=rank)
    assert everything == sum(entry.nbytes for entry in read_headers(EMBEDDED).values())
    assert sum(read) == everything + twice < 1.5 * everything


@pytest.mark.parametrize("format", ["fp8", "w8a8", "w4a8"])
def test_inputs_that_are_quantized_have_a_scale_for_each_ranks_part_of_them(format):
    """So the results are not those of one device, but as near to the unquantized model's."""
    dense, whole = (
        load_model(EMBEDDED, dtype="float64", max_model_len=64, recipe=rounded(EMBEDDED, each, None))
        for each in (None, format)
    )
    recipe = rounded(EMBEDDED, format, None)
    parts = [load_model(EMBEDDED, dtype="float64", max_model_len=64, recipe=recipe, parallel=rank) for rank in ranks(2)]
    with ThreadPoolExecutor(2) as pool:
        found, others = pool.map(computed, parts)
    for mine, theirs, one, exact in zip(found, others, computed(whole), computed(dense), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        assert 0 < (mine - exact).norm() < 1.3 * (one - exact).norm()


def test_a_part_of_a_model_is_not_saved(tmp_path):
    with pytest.raises(ConfigError, match="one GPU's part of a model"):
        save_model(load_model(EMBEDDED, parallel=ranks(2)[0]), EMBEDDED, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("config", [read_config(EMBEDDED), PRESETS["gemma-2b"]], ids=["tiny-gemma", "gemma-2b"])
def test_the_ranks_together_hold_every_row_and_column_once(config):
    for parts in modules(config).values():
        for module in parts:
            held = [shard(module, rank, 2) for rank in range(2)]
            if module.name.endswith(("k_proj", "v_proj")):  # one KV head, which both need
                assert held == [shard(module, 0, 1)] * 2
                continue
            assert module.by_inputs == module.name.endswith(("o_proj", "down_proj"))
            spans = [each.columns if module.by_inputs else each.rows for each in held]
            assert [*spans[0], *spans[1]] == [*range(module.inputs if module.by_inputs else len(module.rows))]


def test_sizes_that_cannot_be_shared_are_refused():
    with pytest.raises(ConfigError, match="3 GPUs cannot share this model evenly: num_heads=4, vocab_size=4096"):
        load_model(parallel=ranks(3)[0])


def test_one_device_computes_nothing_more():
    x, alone = torch.randn(3), OneDevice()
    assert alone.all_reduce(x) is x and alone.all_gather(x) is x
