"""What identifies embeddings, and which are accepted from Python."""

import itertools

import numpy as np
import pytest
import torch

from minillm import InvalidRequest
from minillm.kv_cache import prefix_keys
from minillm.prompts import EMBEDDED, EmbeddedPrompt
from minillm.prompts.embeddings import LARGEST, checked, precision
from minillm.prompts.tensors import read_tensor

pytestmark = pytest.mark.key
HIDDEN, BLOCK = 6, 4


def prompt(*parts) -> EmbeddedPrompt:
    return EmbeddedPrompt.of([np.array(part) for part in parts])


def keys(made: EmbeddedPrompt, known=()) -> list[bytes]:
    return prefix_keys(made.ids, BLOCK, known=known, embeddings=made.embeddings)


def test_a_prompt_joins_ids_and_embeddings_in_their_order():
    first, second = np.random.rand(2, HIDDEN), np.random.rand(1, HIDDEN)
    made = prompt([5, 6], first, [7], second)
    assert made.ids.tolist() == [5, 6, EMBEDDED, EMBEDDED, 7, EMBEDDED] and made.ids.dtype == np.int32
    assert made.embeddings.positions.tolist() == [2, 3, 5]
    positions, values = made.embeddings.between(3, 6)
    assert positions.tolist() == [3, 5] and (values == np.concatenate([first[1:], second])).all()
    assert made.embeddings.digest(0, 2) == made.embeddings.digest(4, 5) == b""


def test_equal_embeddings_have_equal_keys_and_one_other_element_gives_others_from_its_block_on():
    values = np.random.rand(3 * BLOCK, HIDDEN).astype(np.float32)
    own = keys(prompt(values))
    assert own == keys(prompt(values.copy())) and len(set(own)) == 3
    for at, element in itertools.product((0, BLOCK - 1, BLOCK, 3 * BLOCK - 1), range(HIDDEN)):
        other = values.copy()
        other[at, element] = np.nextafter(other[at, element], 2)
        same = [a == b for a, b in zip(own, keys(prompt(other)), strict=True)]
        assert same == [block < at // BLOCK for block in range(3)]


def test_no_key_of_embeddings_is_one_of_tokens_or_of_the_same_embeddings_elsewhere():
    values = np.random.rand(BLOCK - 1, HIDDEN).astype(np.float32)
    made = [prompt([7], values), prompt(values, [7]), prompt(values[:1], [7], values[1:]), prompt(values, values[:1])]
    found = [keys(each)[0] for each in made]
    found += [prefix_keys(each.ids, BLOCK)[0] for each in made]  # what placeholders alone would have
    found.append(prefix_keys(np.array([7] * BLOCK), BLOCK)[0])
    assert len(set(found)) == len(found)


def test_keys_go_on_from_the_last_one_known():
    made = prompt([3] * 5, np.random.rand(9, HIDDEN), [4] * 6)
    assert all(keys(made, keys(made)[:known]) == keys(made) for known in range(6))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_tensor_of_any_float_dtype_device_and_strides_is_read(dtype):
    tensor = torch.randn(HIDDEN, 8).to(getattr(torch, dtype)).T[::2].requires_grad_()
    for of_model in ("bfloat16", "float32", "float64"):
        read = read_tensor(tensor, HIDDEN, of_model, 100)
        assert read.dtype == precision(of_model) and read.flags.c_contiguous
        assert (torch.from_numpy(read) == tensor.detach().to(torch.from_numpy(read).dtype)).all()
    if dtype != "bfloat16":
        assert (read_tensor(tensor.detach().numpy(), HIDDEN, "float64", 100) == read).all()


def test_the_tensor_may_change_once_it_was_read():
    tensor = torch.zeros(2, HIDDEN)
    read = read_tensor(tensor, HIDDEN, "float32", 100)
    tensor.fill_(1)
    assert not read.any()


BAD = {
    "a list": ([[0.0] * HIDDEN], "must be a tensor"),
    "text": ("AAAA", "must be a tensor"),
    "whole numbers": (torch.zeros(2, HIDDEN, dtype=torch.int64), "dtype of floats"),
    "booleans": (torch.zeros(2, HIDDEN, dtype=torch.bool), "dtype of floats"),
    "complex numbers": (torch.zeros(2, HIDDEN, dtype=torch.complex64), "dtype of floats"),
    "fp8": (torch.zeros(2, HIDDEN).to(torch.float8_e4m3fn), "dtype of floats"),
    "numpy's whole numbers": (np.zeros((2, HIDDEN), np.int32), "must be a tensor"),
    "sparse": (torch.eye(HIDDEN).to_sparse(), "dense"),
    "compressed rows": (torch.eye(HIDDEN).to_sparse_csr(), "dense"),
    "one dimension": (torch.zeros(HIDDEN), "shape"),
    "a batch": (torch.zeros(1, 2, HIDDEN), r"squeeze\(0\)"),
    "a batch of two": (torch.zeros(2, 2, HIDDEN), "shape"),
    "another hidden size": (torch.zeros(2, HIDDEN + 1), f"shape .tokens, {HIDDEN}."),
    "no rows": (torch.zeros(0, HIDDEN), "0 rows"),
    "too many rows": (torch.zeros(101, HIDDEN), "101 rows"),
    "too many rows of one number": (torch.zeros(1, 1).expand(10**12, HIDDEN), "1,000,000,000,000 rows"),
    "NaN": (torch.full((2, HIDDEN), torch.nan), "finite"),
    "infinity": (torch.tensor([[0.0] * HIDDEN, [0.0] * (HIDDEN - 1) + [torch.inf]]), r"inf at \[1, 5\]"),
    "minus infinity": (torch.full((1, HIDDEN), -torch.inf), "finite"),
}


@pytest.mark.parametrize("given", BAD)
def test_other_values_are_refused_and_the_message_says_why(given):
    value, message = BAD[given]
    with pytest.raises(InvalidRequest, match=message):
        read_tensor(value, HIDDEN, "float32", 100)


@pytest.mark.parametrize("dtype", LARGEST)
def test_numbers_that_the_models_dtype_cannot_hold_are_refused(dtype):
    largest = torch.finfo(getattr(torch, dtype)).max
    assert checked(np.full((1, HIDDEN), largest), dtype)[0, 0] == largest
    for beyond in (largest * 1.01, -largest * 1.01):
        with pytest.raises(InvalidRequest, match=f"for a model in {dtype}"):
            checked(np.full((1, HIDDEN), beyond), dtype)
