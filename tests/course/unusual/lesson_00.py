"""Right but unusual solutions of lesson 00."""

from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F

from tests.course.unusual import right


@right("continue_text")
def calls_itself(model, prompt, max_tokens, end):
    if max_tokens == 0:
        return []
    found = model(list(prompt))
    token = sorted(found.items(), key=lambda each: -each[1])[0][0]
    return [] if token == end else [token, *calls_itself(model, [*prompt, token], max_tokens - 1, end)]


@right("continue_text")
def ints_of_numpy(model, prompt, max_tokens, end):
    ids = np.array(prompt)
    while len(ids) < len(prompt) + max_tokens:
        found = model(ids.tolist())
        tokens, scores = np.array(list(found)), np.array(list(found.values()))
        if tokens[scores.argmax()] == end:
            break
        ids = np.append(ids, tokens[scores.argmax()])
    return list(ids[len(prompt) :])


@right("step_work")
def with_arrays(matrices, bytes_per_number):
    rows, columns, tokens = np.array(matrices, np.int64).reshape(-1, 3).T
    numbers = rows * columns * (tokens > 0)
    return [bytes_per_number * numbers.sum(), 2 * (numbers @ tokens)]


@right("step_work")
def with_products(matrices, bytes_per_number):
    used = np.array(matrices)[:, 2] > 0
    read = np.array(matrices)[used, :2].prod(1).sum() * bytes_per_number
    return int(read), int(2 * np.array(matrices).prod(1).sum())


@right("step_work")
def with_zip(matrices, bytes_per_number):
    numbers, products = zip(*((r * c * bool(t), r * c * t) for r, c, t in matrices), strict=True)
    return bytes_per_number * sum(numbers), 2 * sum(products)


@right("free_batch")
def searches_by_halving(numbers, bytes_per_number, bytes_per_s, operations_per_s):
    reading = Fraction(bytes_per_number) / Fraction(bytes_per_s)
    low, high = 0, 1
    while high * 2 / Fraction(operations_per_s) <= reading:
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle * 2 / Fraction(operations_per_s) <= reading else (low, middle)
    return low


@right("free_batch")
def counts_up(numbers, bytes_per_number, bytes_per_s, operations_per_s):
    tokens = 0
    while 2 * numbers * (tokens + 1) / operations_per_s <= numbers * bytes_per_number / bytes_per_s:
        tokens += 1
    return np.int64(tokens)


@right("rms_norm")
def by_torch(x, weight, eps):
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


@right("rms_norm")
def by_the_length_of_the_row(x, weight, eps):
    wide = x.double()
    root = torch.sqrt(torch.linalg.vector_norm(wide, dim=1) ** 2 / x.size(1) + eps)
    return torch.einsum("td,t,d->td", wide, 1 / root, weight.double()).type_as(x)
