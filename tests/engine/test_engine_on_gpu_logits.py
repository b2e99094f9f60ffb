"""Teacher-forced logits on a GPU equal those of transformers in prefill, mixed steps and the fused single-row step.

float32 with TF32 off: within 1e-3. bfloat16: the root mean square error is within 0.15 standard deviations of the
float32 logits, and at most 1.25 times the error of transformers itself. A float32 model without attention, with shifted
positions or without a layer must violate these bounds.
"""

import dataclasses
import functools

import pytest
import torch
from transformers import GemmaConfig

from minillm.kv_cache import LayerCache
from minillm.model.loader import load_model
from tests import models
from tests.chance import SEED
from tests.kernels.compare import note
from tests.model.test_decoder import Paged

pytestmark = [
    pytest.mark.explore,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here"),
]

FLOAT32, BFLOAT16 = 1e-3, 0.15
GEMMA = {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 1, "head_dim": 256, "bos_token_id": None}
SHAPED = {  # Gemma 2B's attention and width with fewer layers, and a smaller model with the same head size
    "gemma-2b-heads": GemmaConfig(
        **GEMMA, vocab_size=8192, hidden_size=2048, intermediate_size=6144, num_hidden_layers=3,
        num_attention_heads=8, max_position_embeddings=1024, eos_token_id=None, pad_token_id=0,
    ),
    "gemma-head-dim-256": GemmaConfig(
        **GEMMA, vocab_size=1000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=1024, eos_token_id=None, pad_token_id=0,
    ),
}  # fmt: skip
NAMES = [*SHAPED, *models.CONFIGS]
LENGTH, DECODED = 150, 20  # tokens in total, and how many of the last ones are decoded one at a time


@pytest.fixture(scope="module", autouse=True)
def exact_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module", params=NAMES)
def saved(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "CONFIGS", models.CONFIGS | SHAPED)
        models.make(request.param).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def tokens() -> tuple[int, ...]:
    return tuple(torch.randint(1, 96, (LENGTH,), generator=torch.Generator().manual_seed(SEED + 2)).tolist())


@functools.lru_cache(maxsize=2)
@torch.inference_mode()
def theirs(directory, tokens: tuple[int, ...], dtype: str = "float32") -> torch.Tensor:
    """[tokens, vocab] float32."""
    model = models.reference(directory, dtype=dtype).cuda()
    return model(torch.tensor([list(tokens)], device="cuda"), use_cache=False).logits[0].float()


class OnGPU(Paged):
    """The tests' model driver, with its tensors on the GPU."""

    def __init__(self, model):
        super().__init__(model)
        self.caches = [LayerCache(cache.k.cuda(), cache.v.cuda()) for cache in self.caches]

    def batch(self, *parts, **options):
        return on_gpu(super().batch(*parts, **options))


def on_gpu(value):
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, tuple):  # of rows, one for each layer group
        return tuple(map(on_gpu, value))
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **{name: on_gpu(part) for name, part in vars(value).items()})
    return value


@torch.inference_mode()
def ours(model, tokens: tuple[int, ...], way: str, position_error: int = 0) -> torch.Tensor:
    """[tokens, vocab] float32: the logits at each position, computed in the given way."""
    paged = OnGPU(model)
    paged.position_error = position_error
    row, read = paged.admit(), LENGTH - DECODED
    if way == "prefill":
        return paged.forward({}, {row: tokens}, every=True).float()
    if way == "chunks with decodes":
        other, pieces = paged.admit(), []
        paged.forward({}, {other: tokens[:9]})
        for start in range(0, LENGTH, 37):
            piece = tokens[start : start + 37]
            pieces.append(paged.forward({other: [5]}, {row: piece}, every=True)[1:])
        return torch.cat(pieces).float()
    logits = [paged.forward({}, {row: tokens[:read]}, every=True)]
    fused = None
    if way == "fused single row":
        from minillm.model.single_row import SingleRow

        if not SingleRow.fits(model):
            pytest.skip("this family's decode step has no fused form: it runs as the other ways")
        fused = SingleRow(model)
    for token in tokens[read:]:
        batch = paged.batch({row: [token]}, {})
        logits.append(fused.logits(batch, paged.caches) if fused else model.logits(model.forward(batch, paged.caches)))
    return torch.cat([part.float() for part in logits])


WAYS = ["prefill", "chunks with decodes", "one token at a time", "fused single row"]


@pytest.mark.parametrize("way", WAYS)
def test_float32_logits_equal_those_of_transformers(saved, tokens, way):
    wanted = theirs(saved, tokens)
    found = ours(load_model(saved, dtype="float32", device="cuda"), tokens, way)
    error = (found - wanted).abs().max().item()
    note("logits against transformers, largest difference", torch.float32, error, FLOAT32)
    assert error <= FLOAT32


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_logits_stay_within_their_bound_and_near_the_error_of_transformers(saved, tokens, way):
    wide = theirs(saved, tokens)
    found = ours(load_model(saved, dtype="bfloat16", device="cuda"), tokens, way)
    lost, lost_there = ((each - wide).pow(2).mean().sqrt() for each in (found, theirs(saved, tokens, "bfloat16")))
    error = (lost / wide.std()).item()
    note("logits against transformers in float32, relative", torch.bfloat16, error, BFLOAT16)
    assert error <= BFLOAT16
    assert lost < 1.25 * lost_there


def without_attention(model):
    for layer in model.layers:
        layer.attention_out.weight.zero_()


def without_a_layer(model):
    model.layers[1].attention_out.weight.zero_()
    model.layers[1].down.weight.zero_()


def named(damage) -> str:
    return damage if isinstance(damage, str) else damage.__name__


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("damage", [without_attention, without_a_layer, "shifted positions"], ids=named)
def test_a_damaged_model_violates_these_bounds(saved, tokens, way, damage):
    wide, model = theirs(saved, tokens), load_model(saved, dtype="float32", device="cuda")
    shifted = damage == "shifted positions"
    if not shifted:
        with torch.inference_mode():
            damage(model)
    found = ours(model, tokens, way, position_error=int(shifted))
    assert (found - wide).abs().max() > 100 * FLOAT32
    assert (found - wide).pow(2).mean().sqrt() / wide.std() > BFLOAT16
