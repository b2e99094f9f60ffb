"""Tensors that clients send: what torch.save writes is read, and everything else is refused at once."""

import random
import tracemalloc

import pytest
import torch

from minillm import InvalidRequest
from minillm.prompts.saved_tensor import OVERHEAD, decoded, read_saved, saved_length
from tests.chance import SEED, TIMES
from tests.prompts.attacks import ATTACKS, HIDDEN, PLAIN, RAN, saved

pytestmark = pytest.mark.key


@pytest.mark.parametrize("rows", [1, 2, 100])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_what_torch_saves_is_read_without_torch(dtype, rows):
    tensor = torch.randn(rows, HIDDEN).to(getattr(torch, dtype))
    for model in ("float32", "bfloat16", "float64"):
        read = torch.from_numpy(read_saved(saved(tensor), HIDDEN, model, 100).copy())
        assert read.dtype == (torch.float64 if model == "float64" else torch.float32)
        assert (read == tensor.to(read.dtype)).all()
    assert len(saved(tensor)) - tensor.nbytes < OVERHEAD
    assert saved_length(rows, HIDDEN) >= -(-len(saved(tensor)) // 3) * 4


def test_a_tensor_with_a_gradient_and_one_saved_to_a_path_are_read(tmp_path):
    torch.save(torch.ones(2, HIDDEN, requires_grad=True), tmp_path / "soft prompt.pt")
    assert (
        read_saved((tmp_path / "soft prompt.pt").read_bytes(), HIDDEN, "float32", 100).tolist() == [[1.0] * HIDDEN] * 2
    )


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_at_once_and_takes_no_memory(attack):
    data, message = ATTACKS[attack]
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=message) as refused:
            read_saved(data, HIDDEN, "float32", 100)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(data) + (1 << 20)
    finally:
        tracemalloc.stop()
    assert str(refused.value).startswith("prompt_embeds ") and len(str(refused.value)) < 1000
    assert not RAN


def test_damaged_files_are_read_as_some_tensor_or_refused_and_nothing_else_happens():
    rng, refused = random.Random(SEED), 0
    for _ in range(2000 * TIMES):
        data = bytearray(PLAIN)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.choice([0, 1, 1, 1, 8])] = rng.randbytes(rng.choice([0, 1, 1, 1, 8]))
        try:
            assert read_saved(bytes(data), HIDDEN, "float32", 100).shape[1] == HIDDEN
        except InvalidRequest:
            refused += 1
    assert refused > 100


def test_base64_is_strict():
    assert decoded("AAEC") == bytes([0, 1, 2])
    for text in ("A", "AAEC\n", "AA EC", "AA-C", "é", "=AAE"):
        with pytest.raises(InvalidRequest, match="no base64"):
            decoded(text)
