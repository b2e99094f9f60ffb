"""The stages of a pipeline: which layers each has, and what it reads of a checkpoint."""

import pytest

from minillm.errors import ConfigError
from minillm.kv_cache.layer_groups import LayerGroups
from minillm.model.checkpoint import Pieces, read_headers
from minillm.model.loader import EMBEDDED, load_model
from minillm.model.parallel import OneDevice, PipelineStage
from minillm.model.saver import save_model
from minillm.quantization import Recipe
from tests import models


class InStage(OneDevice):
    """One of several stages, which only loads its part."""

    def __init__(self, index, count):
        self.stage = PipelineStage(index, count)


@pytest.mark.parametrize(
    ("total", "count", "sizes"), [(4, 2, [2, 2]), (18, 4, [5, 4, 5, 4]), (5, 2, [3, 2]), (3, 3, [1] * 3)]
)
def test_stages_divide_the_layers(total, count, sizes):
    ranges = [PipelineStage(index, count).layers(total) for index in range(count)]
    assert [layer for each in ranges for layer in each] == [*range(total)]
    assert [len(each) for each in ranges] == sizes
    assert [PipelineStage(i, count).first for i in range(count)] == [True, *[False] * (count - 1)]
    assert [PipelineStage(i, count).last for i in range(count)] == [*[False] * (count - 1), True]


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="^pipeline_parallel_size=4: this model has 3 layers, .* use at most 3$"):
        PipelineStage(0, 4).layers(3)


def test_a_block_has_room_for_the_layers_of_its_stage():
    whole = LayerGroups.of([4, None] * 3)
    assert (whole.size, PipelineStage().groups(whole)) == (3, whole)
    found = [PipelineStage(index, 2).groups(whole) for index in range(2)]
    assert [each.windows for each in found] == [whole.windows] * 2, "every rank has all block tables"
    assert [each.of_layer for each in found] == [((0, 0), (1, 0), (0, 1)), ((1, 0), (0, 0), (1, 1))]
    assert [each.size for each in found] == [2, 2]


def stored(model):
    """Everything that a model has read, by name."""
    tensors = {f"{address}.{i}": t for address, each in model.addressed().items() for i, t in enumerate(each.stored())}
    return tensors | {
        f"{index}.{name}": getattr(layer, name)
        for index, layer in zip(model.held, model.layers, strict=True)
        for name in model.layer_norms
    }


@pytest.mark.parametrize("name", ["gemma2-grouped-untied", "llama3-tied-head-dim", "quantized"])
def test_each_stage_reads_only_its_own_layers(name, tmp_path, monkeypatch):
    """The embedding is read by the first, the head by the last; where they are one matrix, by both."""
    if name == "quantized":
        save_model(
            load_model(EMBEDDED, dtype="float32", recipe=Recipe({"layers.*": "int8"})), EMBEDDED, tmp_path / "model"
        )
        place = tmp_path / "model"
    else:
        models.make(name).save_pretrained(tmp_path)
        place = tmp_path
    read, fill = [], Pieces._fill

    def counted(self, stream, offset, at, size):
        read.append(size)
        fill(self, stream, offset, at, size)

    monkeypatch.setattr(Pieces, "_fill", counted)
    whole = load_model(place)
    everything, entries = sum(read), read_headers(place)
    parts, amounts = [], []
    for index in range(3):
        read.clear()
        parts.append(load_model(place, parallel=InStage(index, 3)))
        amounts.append(sum(read))
    tied = whole.config.tie_word_embeddings
    again = 2 * entries["model.norm.weight"].nbytes + tied * entries["model.embed_tokens.weight"].nbytes
    assert sum(amounts) == everything + again
    assert amounts[1] < min(amounts[0], amounts[2])
    found = {}
    for part in parts:
        assert part.num_parameters < whole.num_parameters and part.final_norm.equal(whole.final_norm)
        found |= stored(part)
    wanted = stored(whole)
    assert found.keys() == wanted.keys() and all(found[each].equal(wanted[each]) for each in wanted)
