"""The decoder gives the same logits and greedy tokens as transformers."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import MinistralConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import minillm
from minillm import ops
from minillm.advice.sizing import kv_bytes_per_token
from minillm.kv_cache import LayerCache
from minillm.model import Model
from minillm.model.batch import Batch
from minillm.model.config import PRESETS, ModelConfig
from minillm.model.families import ARCHITECTURES
from minillm.model.loader import load_model
from minillm.ops import Rows
from tests import models
from tests.chance import SEED

pytestmark = pytest.mark.explore

BLOCK = 4


class Paged:
    """The minimum needed to drive a model: rows in scattered blocks of a cache filled with NaN.

    All layer groups keep all tokens, in the same block numbers of separate caches.
    """

    def __init__(self, model: Model, blocks: int = 400):
        config = model.local
        shape = (blocks, BLOCK, config.num_kv_heads, config.head_dim)
        self.model, self.groups = model, len(model.groups.windows)
        self.caches = [
            LayerCache(*(torch.full(shape, float("nan"), dtype=model.dtype) for _ in "kv"))
            for _ in range(config.num_layers)
        ]
        self.free = torch.randperm(blocks, generator=torch.Generator().manual_seed(SEED)).tolist()
        self.tables: list[list[int]] = []
        self.lengths: list[int] = []
        self.position_error = 0

    def admit(self) -> int:
        self.tables.append([])
        self.lengths.append(0)
        return len(self.tables) - 1

    def forward(self, decode: dict[int, list[int]], prefill: dict[int, list[int]], every: bool = False):
        """Append tokens to rows (row -> new tokens) in one pass; returns logits of each row's last token, or of all."""
        batch = self.batch(decode, prefill, every)
        with torch.inference_mode():
            return self.model.logits(self.model.forward(batch, self.caches))

    def batch(self, decode: dict[int, list[int]], prefill: dict[int, list[int]], every: bool = False) -> Batch:
        ids, positions, slots, last = [], [], [], []
        for tokens, row in [(t, r) for part in (decode, prefill) for r, t in part.items()]:
            for token in tokens:
                at = self.lengths[row]
                if at == len(self.tables[row]) * BLOCK:
                    self.tables[row].append(self.free.pop())
                ids.append(token)
                positions.append(at + (self.position_error if at % 2 else 0))
                slots.append(self.tables[row][at // BLOCK] * BLOCK + at % BLOCK)
                self.lengths[row] += 1
            last.append(len(ids) - 1)
        return Batch(
            torch.tensor(ids),
            torch.tensor(positions),
            torch.tensor([slots] * self.groups),
            self._rows(decode),
            self._rows(prefill),
            None if every else torch.tensor(last),
        )

    def _rows(self, part: dict[int, list[int]]) -> tuple[Rows, ...]:
        if not part:
            return ()
        sizes = [len(tokens) for tokens in part.values()]
        table = torch.zeros(self.groups, len(part), max(len(self.tables[row]) for row in part), dtype=torch.int32)
        for index, row in enumerate(part):
            table[:, index, : len(self.tables[row])] = torch.tensor(self.tables[row])
        lengths = torch.tensor([self.lengths[row] for row in part], dtype=torch.int32)
        starts = torch.tensor([0, *sizes]).cumsum(0).int()
        return Rows.of_groups(table, lengths, starts, max(sizes))


def next_tokens(paged: Paged, prompts: list[list[int]]) -> Iterator[list[int]]:
    """The likeliest next token of every prompt, then those after them, without end."""
    rows = [paged.admit() for _ in prompts]
    logits = paged.forward({}, dict(zip(rows, prompts, strict=True)))
    while True:
        yield (tokens := logits.argmax(-1).tolist())
        logits = paged.forward({row: [token] for row, token in zip(rows, tokens, strict=True)}, {})


def generate(paged: Paged, prompts: list[list[int]], count: int) -> list[list[int]]:
    return [list(row) for row in zip(*itertools.islice(next_tokens(paged, prompts), count), strict=True)]


@pytest.fixture(autouse=True)
def exact_attention_in_transformers(monkeypatch):
    models.keep_float64(monkeypatch)


@pytest.fixture(scope="module", params=models.CONFIGS)
def saved(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    models.make(request.param).save_pretrained(directory)
    return directory


def both(directory, dtype: str) -> tuple[torch.nn.Module, Model]:
    return models.reference(directory, dtype=dtype), load_model(directory, dtype=dtype)


def prompts(*lengths: int, seed: int = SEED) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed + 1)
    return [torch.randint(1, 96, (length,), generator=generator).tolist() for length in lengths]


def theirs(model, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.key
@pytest.mark.parametrize("dtype, tolerance", [("float32", 5e-4), ("float64", 1e-9)])
def test_logits_equal_those_of_transformers(saved, dtype, tolerance):
    reference, model = both(saved, dtype)
    paged = Paged(model)
    for tokens in prompts(1, 5, 100):
        got = paged.forward({}, {paged.admit(): tokens}, every=True)
        assert got.dtype == getattr(torch, dtype)
        torch.testing.assert_close(got, theirs(reference, tokens), rtol=0, atol=tolerance)


def test_logits_in_bfloat16_stay_near_those_in_float32(saved):
    (tokens,) = prompts(40)
    wide, half = (_all_logits(load_model(saved, dtype=dtype), tokens) for dtype in ("float32", "bfloat16"))
    assert half.dtype == torch.float32
    difference = (wide - half).pow(2).mean().sqrt() / wide.std()
    assert 0 < difference < 0.15


def test_bfloat16_loses_no_more_than_in_transformers(saved):
    """Measured against float32: minillm rounds to half precision no more often than transformers."""
    (tokens,) = prompts(100)
    wide, half = (_all_logits(load_model(saved, dtype=dtype), tokens) for dtype in ("float32", "bfloat16"))
    reference = models.reference(saved, dtype="bfloat16")

    def lost(logits: torch.Tensor) -> torch.Tensor:
        """For half of the tokens it is less: a mean would depend on the few that lose most."""
        return (logits - wide).pow(2).mean(-1).sqrt().median()

    assert lost(half) < 1.25 * lost(theirs(reference, tokens).float())


def _all_logits(model: Model, tokens: list[int]) -> torch.Tensor:
    paged = Paged(model)
    return paged.forward({}, {paged.admit(): tokens}, every=True)


def test_greedy_tokens_equal_those_of_transformers_alone_and_in_a_batch(saved):
    reference, model = both(saved, "float64")
    count = 24  # beyond every window, and into blocks that no prompt has begun
    asked = prompts(3, 17, 8, 1)
    want = []
    for tokens in asked:
        with torch.inference_mode():
            full = reference.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False)
        want.append(full[0, len(tokens) :].tolist())
    assert len(set().union(*want)) > 8, "the model repeats itself, so equal tokens would prove little"
    assert [generate(Paged(model), [tokens], count)[0] for tokens in asked] == want
    assert generate(Paged(model), asked, count) == want


def test_chunks_and_decodes_in_one_pass_equal_separate_passes(saved):
    model = load_model(saved, dtype="float64")
    first, second = prompts(9, 23)
    alone = Paged(model)
    alone.admit(), alone.admit()
    alone.forward({}, {0: first})
    want = [alone.forward({0: [7]}, {}), alone.forward({}, {1: second})]
    mixed = Paged(model)
    mixed.admit(), mixed.admit()
    mixed.forward({}, {0: first, 1: second[:6]})
    got = mixed.forward({0: [7]}, {1: second[6:]})
    torch.testing.assert_close(got, torch.cat(want), rtol=0, atol=1e-9)


def test_several_queries_per_decode_row_equal_one_at_a_time(saved):
    model = load_model(saved, dtype="float64")
    (tokens,) = prompts(12)
    want = _all_logits(model, tokens)
    paged = Paged(model)
    paged.forward({}, {paged.admit(): tokens[:9], paged.admit(): tokens[:5]})
    got = paged.forward({0: tokens[9:12], 1: tokens[5:8]}, {}, every=True)
    torch.testing.assert_close(got, torch.cat((want[9:12], want[5:8])), rtol=0, atol=1e-9)


def _zero_attention(paged):
    return minillm.using(
        decode_attention=lambda q, *rest: torch.zeros_like(q),
        prefill_attention=lambda q, *rest: torch.zeros_like(q),
    )


def _attention_sees_only_itself(paged):
    own = ops.on("cpu").decode_attention
    return minillm.using(
        decode_attention=lambda *given: own(*given[:-1], dataclasses.replace(given[-1], window=1)),
        prefill_attention=lambda q, *rest: torch.zeros_like(q),
    )


def _no_rotation(paged):
    return minillm.using(rotary_embedding=lambda q, k, cos_sin: (q, k))


def _drop_a_layer(paged):
    paged.model.layers[1] = dataclasses.replace(
        paged.model.layers[1],
        attention_out=_zeros_like(paged.model.layers[1].attention_out),
        down=_zeros_like(paged.model.layers[1].down),
    )


def _zeros_like(weight):
    return dataclasses.replace(
        weight,
        weight=torch.zeros_like(weight.weight),
        bias=None if weight.bias is None else torch.zeros_like(weight.bias),
    )


def _shift_positions(paged):
    paged.position_error = 1


def _attend(layer, **options):
    """Make a layer attend with other options."""
    layer.attention = dataclasses.replace(layer.attention, **options)


def _wrong_scale(paged):
    for layer in paged.model.layers:
        _attend(layer, scale=layer.attention.scale * 1.2)


def _no_final_norm(paged):
    paged.model.final_norm = torch.ones_like(paged.model.final_norm)


DAMAGE = [
    _zero_attention,
    _attention_sees_only_itself,
    _no_rotation,
    _drop_a_layer,
    _shift_positions,
    _wrong_scale,
    _no_final_norm,
]


def _no_window(paged):
    for layer in paged.model.layers:
        _attend(layer, window=None)


def _window_of_one_token_more(paged):
    for layer in paged.model.layers:
        _attend(layer, window=layer.attention.window and layer.attention.window + 1)


def _windows_in_other_layers(paged):
    for layer, other in zip(paged.model.layers, paged.model.config.windows[1:] + (None,), strict=True):
        _attend(layer, window=other)


def _no_score_cap(paged):
    for layer in paged.model.layers:
        _attend(layer, soft_cap=None)


def _no_norm_of_queries_and_keys(paged):
    for layer in paged.model.layers:
        layer.q_norm = layer.k_norm = None


def _swapped_norms_of_queries_and_keys(paged):
    for layer in paged.model.layers:
        layer.q_norm, layer.k_norm = torch.ones_like(layer.k_norm), layer.q_norm


def _one_base_for_all_layers(paged):
    paged.model.local_rotary = paged.model.rotary


def _no_post_norms(paged):
    for layer in paged.model.layers:
        layer.after_attention_norm = layer.after_mlp_norm = None


def _no_bias(paged):
    for layer in paged.model.layers:
        layer.qkv.bias.zero_()


FAMILY_DAMAGE = {
    _no_window: lambda config: config.windows,
    _window_of_one_token_more: lambda config: config.windows,
    _windows_in_other_layers: lambda config: len(set(config.windows)) > 1,
    _no_score_cap: lambda config: config.attention_soft_cap,
    _no_norm_of_queries_and_keys: lambda config: config.architecture in ("Gemma3ForCausalLM", "Qwen3ForCausalLM"),
    _swapped_norms_of_queries_and_keys: lambda config: config.architecture in ("Gemma3ForCausalLM", "Qwen3ForCausalLM"),
    _one_base_for_all_layers: lambda config: config.local_rope_theta,
    _no_post_norms: lambda config: config.architecture in ("Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    _no_bias: lambda config: config.qkv_bias,
}


def damage_by_config() -> list:
    """Every configuration with each component that only its family has."""
    cases = []
    for name, config in models.CONFIGS.items():
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
        ours = ModelConfig.from_dict(config.to_dict() | {"architectures": [architecture]})
        cases += [(name, damage) for damage, applies in FAMILY_DAMAGE.items() if applies(ours)]
    return cases


@pytest.mark.parametrize(
    "saved", ["gemma2-multi-query", "gemma2-multi-head", "gemma3-multi-head-untied"], indirect=True
)
def test_the_final_soft_cap_bounds_the_logits(saved):
    model = load_model(saved, dtype="float64")
    (tokens,) = prompts(40, seed=0)  # with other prompts, no logit may reach the cap
    capped, cap = _all_logits(model, tokens), model.config.final_soft_cap
    model.config = dataclasses.replace(model.config, final_soft_cap=None)
    plain = _all_logits(model, tokens)
    assert capped.abs().max() < cap < plain.abs().max()
    torch.testing.assert_close(capped, cap * torch.tanh(plain / cap), rtol=0, atol=1e-9)


DAMAGED = 32  # tokens to generate; the damage must change at least one, and with 16 not every damage does


@functools.lru_cache
def _undamaged(directory):
    asked = prompts(3, 17, 8, seed=0)  # with other prompts, some damage may change no token
    return asked, generate(Paged(load_model(directory, dtype="float64")), asked, DAMAGED)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__.strip("_"))
def test_the_test_models_depend_on_every_component(saved, damage):
    assert_every_output_changes(saved, damage)


@pytest.mark.parametrize("saved, damage", damage_by_config(), indirect=["saved"])
def test_each_family_depends_on_its_distinctive_components(saved, damage):
    assert_every_output_changes(saved, damage)


def assert_every_output_changes(saved, damage):
    asked, want = _undamaged(saved)
    paged = Paged(load_model(saved, dtype="float64"))
    with damage(paged) or contextlib.nullcontext() as used:
        equal = set(range(len(asked)))
        for count, tokens in enumerate(itertools.islice(next_tokens(paged, asked), DAMAGED)):
            equal -= {row for row in equal if tokens[row] != want[row][count]}
            if count and not equal:  # a step of decodes has run
                break
    assert not equal and (used is None or all(used.calls.values()))


def test_the_documentations_example_family_equals_transformers(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    code = page.split("## Adding a model family")[1].split("```python")[1].split("```")[0]
    monkeypatch.setitem(ARCHITECTURES, "MinistralForCausalLM", None)  # removed again after the test
    exec(code, {})
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    theirs_config = MinistralConfig(
        **models.SMALL, num_key_value_heads=2, head_dim=12, sliding_window=5, layer_types=kinds
    )
    monkeypatch.setitem(models.CONFIGS, "ministral", theirs_config)
    models.make("ministral").save_pretrained(tmp_path)
    reference, model = both(tmp_path, "float64")
    (tokens,) = prompts(50)
    torch.testing.assert_close(_all_logits(model, tokens), theirs(reference, tokens), rtol=0, atol=1e-9)
    assert [layer.attention.window for layer in model.layers] == [5, None, 5]


def test_logits_are_returned_only_for_the_requested_tokens():
    config = dataclasses.replace(PRESETS["gemma-2b"], num_layers=2, hidden_size=32, intermediate_size=48, vocab_size=50)
    model = Model(config, dtype=torch.float64, device="cpu", max_model_len=64)
    for tensor in model.tensors():
        tensor.normal_(0, 0.3)
    (tokens,) = prompts(10)
    tokens = [token % 50 for token in tokens]
    every = _all_logits(model, tokens)
    paged = Paged(model)
    last = paged.forward({}, {paged.admit(): tokens})
    assert last.shape == (1, 50) and every.shape == (10, 50)
    torch.testing.assert_close(last, every[-1:], rtol=0, atol=1e-12)


def test_gemma_2b_has_its_published_size():
    config = PRESETS["gemma-2b"]
    model = Model(config, dtype=torch.bfloat16, device="meta", max_model_len=16)
    assert model.num_parameters == 2_506_172_416
    assert 5.01e9 < model.nbytes < 5.02e9
    assert kv_bytes_per_token(config) == 18_432
