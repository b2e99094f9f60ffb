"""Wrong solutions of lesson 00: the generation loop, the roofline, RMSNorm."""

import numpy as np
import torch

from tests.course.mutants import wrong


@wrong("continue_text", fails="each token sees everything before it")
def forgets_the_prompt(model, prompt, max_tokens, end):
    new = []
    for _ in range(max_tokens):
        found = model(new[-1:] or prompt)
        token = max(found, key=found.get)
        if token == end:
            break
        new.append(token)
    return new


@wrong("continue_text", fails="it stops at the end token and leaves it out")
def keeps_the_end(model, prompt, max_tokens, end):
    new = []
    while len(new) < max_tokens and end not in new:
        found = model([*prompt, *new])
        new.append(max(found, key=found.get))
    return new


@wrong("continue_text", fails="it stops at the end token and leaves it out")
def keeps_the_end_if_it_comes_first(model, prompt, max_tokens, end):
    if max_tokens == 0:
        return []
    ids = list(prompt)
    found = model(ids)
    new = [max(found, key=found.get)]
    for _ in range(max_tokens - 1):
        found = model([*ids, *new])
        token = max(found, key=found.get)
        if token == end:
            break
        new.append(token)
    return new


@wrong("continue_text", fails="an end token in the prompt does not stop it")
def looks_for_the_end_in_the_prompt_too(model, prompt, max_tokens, end):
    new = []
    while len(new) < max_tokens and end not in [*prompt, *new]:
        found = model([*prompt, *new])
        new.append(max(found, key=found.get))
    return new[:-1] if new[-1:] == [end] else new


@wrong("continue_text", fails="an end token in the prompt does not stop it")
def never_stops_if_the_prompt_has_an_end(model, prompt, max_tokens, end):
    new = []
    for _ in range(max_tokens):
        found = model([*prompt, *new])
        token = max(found, key=found.get)
        if token == end and end not in prompt:
            break
        new.append(token)
    return new


@wrong("continue_text", fails="it takes the most likely token, wherever it is in the dict")
def takes_the_first(model, prompt, max_tokens, end):
    new = []
    for _ in range(max_tokens):
        token = next(iter(model([*prompt, *new])))
        if token == end:
            break
        new.append(token)
    return new


@wrong("continue_text", fails="the caller's prompt does not change")
def writes_into_the_prompt(model, prompt, max_tokens, end):
    ids, before = prompt, len(prompt)
    for _ in range(max_tokens):
        found = model(ids)
        token = max(found, key=found.get)
        if token == end:
            break
        ids.append(token)
    return ids[before:]


@wrong("continue_text", fails="max_tokens new tokens if no end token comes")
def always_asks_once(model, prompt, max_tokens, end):
    new = []
    while True:
        found = model([*prompt, *new])
        token = max(found, key=found.get)
        if token == end:
            return new
        new.append(token)
        if len(new) >= max_tokens:
            return new


@wrong("continue_text", fails="max_tokens new tokens if no end token comes")
def stops_when_the_text_repeats(model, prompt, max_tokens, end):
    new = []
    for _ in range(max_tokens):
        found = model([*prompt, *new])
        token = max(found, key=found.get)
        if token == end or new[-2:] == [token, token]:
            break
        new.append(token)
    return new


@wrong("continue_text", fails="max_tokens new tokens if no end token comes")
def stops_at_the_first_token_of_the_prompt_too(model, prompt, max_tokens, end):
    new = []
    for _ in range(max_tokens):
        found = model([*prompt, *new])
        token = max(found, key=found.get)
        if token in (end, prompt[0]):
            break
        new.append(token)
    return new


@wrong("continue_text", fails="max_tokens new tokens if no end token comes")
def stops_when_a_pair_repeats(model, prompt, max_tokens, end):
    new = []
    for _ in range(max_tokens):
        found = model([*prompt, *new])
        token = max(found, key=found.get)
        if token == end:
            break
        new.append(token)
        if len(set(new[-2:])) == 2 and new[-4:-2] == new[-2:]:
            break
    return new


@wrong("continue_text", fails="the caller's prompt does not change")
def restores_the_prompt_unless_the_end_comes(model, prompt, max_tokens, end):
    before = len(prompt)
    for _ in range(max_tokens):
        found = model(prompt)
        token = max(found, key=found.get)
        if token == end:
            return prompt[before:]
        prompt.append(token)
    new = prompt[before:]
    del prompt[before:]
    return new


@wrong("continue_text", fails="it takes the most likely token, wherever it is in the dict")
def looks_at_eight(model, prompt, max_tokens, end):
    new = []
    for _ in range(max_tokens):
        found = dict(list(model([*prompt, *new]).items())[:8])
        token = max(found, key=found.get)
        if token == end:
            break
        new.append(token)
    return new


@wrong("continue_text", fails="it stops at the end token and leaves it out")
def stops_at_the_end_token_of_gemma_too(model, prompt, max_tokens, end):
    new = []
    for _ in range(max_tokens):
        found = model([*prompt, *new])
        token = max(found, key=found.get)
        if token in (1, end):
            break
        new.append(token)
    return new


@wrong("continue_text", fails="0 is a token id like any other")
def takes_zero_for_nothing(model, prompt, max_tokens, end):
    new = []
    for _ in range(max_tokens):
        found = model([*prompt, *new])
        token = max(found, key=found.get)
        if not token or token == end:
            break
        new.append(token)
    return new


@wrong("continue_text", fails="an end token in the prompt does not stop it")
def looks_at_the_last_token_even_if_it_is_the_prompts(model, prompt, max_tokens, end):
    ids = list(prompt)
    while ids[-1] != end and len(ids) < len(prompt) + max_tokens:
        found = model(ids)
        ids.append(max(found, key=found.get))
    new = ids[len(prompt) :]
    return new[:-1] if new[-1:] == [end] else new


@wrong("continue_text", fails="it takes the most likely token, wherever it is in the dict")
def starts_from_minus_one_hundred(model, prompt, max_tokens, end):
    new = []
    for _ in range(max_tokens):
        best, token = -100.0, None
        for each, logprob in model([*prompt, *new]).items():
            if logprob > best:
                best, token = logprob, each
        if token == end:
            break
        new.append(token)
    return new


@wrong("continue_text", fails="each token sees everything before it")
def sees_the_last_sixteen(model, prompt, max_tokens, end):
    new = []
    for _ in range(max_tokens):
        found = model([*prompt, *new][-16:])
        token = max(found, key=found.get)
        if token == end:
            break
        new.append(token)
    return new


@wrong("continue_text", fails="one call of the model per token")
def generates_everything_and_then_cuts(model, prompt, max_tokens, end):
    new = []
    for _ in range(max_tokens):
        found = model([*prompt, *new])
        new.append(max(found, key=found.get))
    return new[: new.index(end)] if end in new else new


@wrong("continue_text", fails="one call of the model per token")
def asks_twice_for_each_token(model, prompt, max_tokens, end):
    new = []
    for _ in range(max_tokens):
        token = max(model([*prompt, *new]), key=model([*prompt, *new]).get)
        if token == end:
            break
        new.append(token)
    return new


@wrong("continue_text", fails="one call of the model per token")
def asks_once_more_at_the_limit(model, prompt, max_tokens, end):
    new = []
    found = model(prompt)
    token = max(found, key=found.get)
    while token != end and len(new) < max_tokens:
        new.append(token)
        found = model([*prompt, *new])
        token = max(found, key=found.get)
    return new


@wrong("continue_text", fails="it stops at the end token and leaves it out")
def compares_objects(model, prompt, max_tokens, end):  # CPython has one object for each int up to 256
    new = []
    for _ in range(max_tokens):
        found = model([*prompt, *new])
        token = max(found, key=found.get)
        if token is end:
            break
        new.append(token)
    return new


@wrong("continue_text", fails="it returns a new list of ints")
def clears_its_default_list(model, prompt, max_tokens, end, new=[]):  # noqa: B006
    new.clear()
    for _ in range(max_tokens):
        found = model([*prompt, *new])
        token = max(found, key=found.get)
        if token == end:
            break
        new.append(token)
    return new


@wrong("continue_text", fails="it returns a new list of ints")
def returns_a_tuple(model, prompt, max_tokens, end):
    new = ()
    for _ in range(max_tokens):
        found = model([*prompt, *new])
        token = max(found, key=found.get)
        if token == end:
            break
        new += (token,)
    return new


def work(matrices, size, bytes_of=lambda n, t: n * (t > 0), operations_of=lambda n, t: 2 * n * t):
    nbytes = sum(bytes_of(rows * columns, tokens) for rows, columns, tokens in matrices) * size
    return nbytes, sum(operations_of(rows * columns, tokens) for rows, columns, tokens in matrices)


@wrong("step_work", fails="every matrix counts")
def equal_matrices_once(matrices, bytes_per_number):
    return work(set(matrices), bytes_per_number)


@wrong("step_work", fails="every matrix counts")
def sorts_the_callers_list(matrices, bytes_per_number):
    matrices.sort()
    return work(matrices, bytes_per_number)


@wrong("step_work", fails="large counts are exact")
def operations_in_32_bits(matrices, bytes_per_number):
    nbytes, operations = work(matrices, bytes_per_number)
    return nbytes, int(torch.tensor(operations).to(torch.int32))


@wrong("step_work", fails="large counts are exact")
def operations_in_float32(matrices, bytes_per_number):
    nbytes, operations = work(matrices, bytes_per_number)
    return nbytes, int(torch.tensor(operations, dtype=torch.float32))


@wrong("step_work", fails="large counts are exact")
def counts_are_floats(matrices, bytes_per_number):
    nbytes, operations = work(matrices, bytes_per_number)
    return float(nbytes), float(operations)


@wrong("step_work", fails="more tokens: the same bytes")
def reads_for_every_token(matrices, bytes_per_number):
    return work(matrices, bytes_per_number, bytes_of=lambda n, t: n * t)


@wrong("step_work", fails="each matrix has its own number of tokens")
def tokens_of_the_first(matrices, bytes_per_number):
    used = [matrix for matrix in matrices if matrix[2]]
    return work([(rows, columns, used[0][2]) for rows, columns, _ in used], bytes_per_number)


@wrong("step_work", fails="more tokens: more operations")
def computes_for_one_token(matrices, bytes_per_number):
    return work(matrices, bytes_per_number, operations_of=lambda n, t: 2 * n * (t > 0))


@wrong("step_work", fails="a matrix without tokens is not read")
def reads_idle_matrices(matrices, bytes_per_number):
    return work(matrices, bytes_per_number, bytes_of=lambda n, t: n)


@wrong("step_work", fails="a matrix without tokens is not read")
def stops_at_an_idle_matrix(matrices, bytes_per_number):
    nbytes = operations = 0
    for rows, columns, tokens in matrices:
        if not tokens:
            break
        nbytes += bytes_per_number * rows * columns
        operations += 2 * tokens * rows * columns
    return nbytes, operations


@wrong("step_work", fails="more tokens: more operations")
def sixty_four_tokens_at_most(matrices, bytes_per_number):
    return work(matrices, bytes_per_number, operations_of=lambda n, t: 2 * n * min(t, 64))


@wrong("step_work", fails="smaller numbers: fewer bytes, as many operations")
def two_bytes_at_least(matrices, bytes_per_number):
    return work(matrices, max(bytes_per_number, 2))


@wrong("step_work", fails="smaller numbers: fewer bytes, as many operations")
def operations_from_bytes(matrices, bytes_per_number):
    nbytes, operations = work(matrices, bytes_per_number)
    return nbytes, operations * bytes_per_number // 4


@wrong("free_batch", fails="a larger model has the same free batch")
def forgets_to_compute_with_all_numbers(numbers, bytes_per_number, bytes_per_s, operations_per_s):
    return int(numbers * bytes_per_number / bytes_per_s // (2 / operations_per_s))


@wrong("free_batch", fails="smaller numbers, smaller batch")
def numbers_of_four_bytes(numbers, bytes_per_number, bytes_per_s, operations_per_s):
    return int(4 * operations_per_s / (2 * bytes_per_s))


@wrong("free_batch", fails="only whole tokens")
def rounds_to_the_nearest(numbers, bytes_per_number, bytes_per_s, operations_per_s):
    return round(bytes_per_number * operations_per_s / (2 * bytes_per_s))


@wrong("free_batch", fails="only whole tokens")
def rounds_down_to_a_float(numbers, bytes_per_number, bytes_per_s, operations_per_s):
    return np.floor(bytes_per_number * operations_per_s / (2 * bytes_per_s))


@wrong("free_batch", fails="only whole tokens")
def drops_the_fractions_of_the_rates(numbers, bytes_per_number, bytes_per_s, operations_per_s):
    return bytes_per_number * int(operations_per_s) // (2 * int(bytes_per_s))


@wrong("free_batch", fails="fast arithmetic leaves room for many")
def searches_up_to_a_thousand(numbers, bytes_per_number, bytes_per_s, operations_per_s):
    reading = numbers * bytes_per_number / bytes_per_s
    return max(tokens for tokens in range(1001) if 2 * numbers * tokens / operations_per_s <= reading)


@wrong("free_batch", fails="slow arithmetic leaves no room")
def at_least_one(numbers, bytes_per_number, bytes_per_s, operations_per_s):
    return max(1, int(bytes_per_number * operations_per_s / (2 * bytes_per_s)))


@wrong("rms_norm", fails="each token on its own")
def one_mean_for_all(x, weight, eps):
    wide = x.float()
    return (wide / (wide.pow(2).mean() + eps).sqrt() * weight).to(x.dtype)


@wrong("rms_norm", fails="each token on its own")
def sixty_four_tokens_are_normalized(x, weight, eps):
    wide = x.float().clone()
    wide[:64] = wide[:64] / (wide[:64].pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return (wide * weight).to(x.dtype)


@wrong("rms_norm", fails="each token on its own")
def averages_256_columns(x, weight, eps):
    wide = x.float()
    return (wide / (wide[:, :256].pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight).to(x.dtype)


@wrong("rms_norm", fails="squares of half-precision numbers")
def divides_in_float16(x, weight, eps):
    wide = x.to(torch.float16).float()
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight).to(x.dtype)


@wrong("rms_norm", fails="squares of half-precision numbers")
def cuts_off_large_numbers(x, weight, eps):
    wide = x.clamp(-255, 255).float()  # 256 * 256 is too large for float16
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight).to(x.dtype)


@wrong("rms_norm", fails="the dtype that came in goes out")
def returns_through_float16(x, weight, eps):
    wide = x.float()
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight).half().to(x.dtype)


BUFFERS: dict = {}


@wrong("rms_norm", fails="x and the weights do not change")
def returns_one_buffer(x, weight, eps):
    wide = x.float()
    out = BUFFERS.setdefault((x.shape, x.dtype), torch.empty_like(x))
    return out.copy_(wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight)


@wrong("rms_norm", fails="the row's mean is not subtracted")
def layer_norm(x, weight, eps):
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True)
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight).to(x.dtype)


@wrong("rms_norm", fails="each column has its weight")
def forgets_the_weight(x, weight, eps):
    wide = x.float()
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype)


@wrong("rms_norm", fails="eps is inside the root")
def forgets_eps(x, weight, eps):
    wide = x.float()
    return (wide / wide.pow(2).mean(-1, keepdim=True).sqrt() * weight).to(x.dtype)


@wrong("rms_norm", fails="squares of half-precision numbers")
def widens_after_squaring(x, weight, eps):
    mean_square = x.pow(2).float().mean(-1, keepdim=True)
    return (x.float() / (mean_square + eps).sqrt() * weight).to(x.dtype)


@wrong("rms_norm", fails="the dtype that came in goes out")
def stays_wide(x, weight, eps):
    wide = x.float()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


@wrong("rms_norm", fails="the dtype that came in goes out")
def stays_wide_unless_16_bits_came_in(x, weight, eps):
    wide = x.float()
    found = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
    return found.to(x.dtype) if x.dtype.itemsize == 2 else found


@wrong("rms_norm", fails="x and the weights do not change")
def divides_in_place(x, weight, eps):
    wide = x.float()
    scale = (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return wide.mul_(scale).mul(weight).to(x.dtype)


@wrong("rms_norm", fails="eps is inside the root")
def adds_eps_after_the_root(x, weight, eps):
    wide = x.float()
    return (wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + eps) * weight).to(x.dtype)


@wrong("rms_norm", fails="16-bit inputs: float32 inside, rounded once")
def rounds_before_the_weight(x, weight, eps):
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype) * weight).to(x.dtype)


@wrong("rms_norm", fails="16-bit inputs: float32 inside, rounded once")
def rounds_the_root(x, weight, eps):
    root = torch.sqrt(x.float().pow(2).mean(-1, keepdim=True) + eps).to(x.dtype)
    return (x.float() / root * weight).to(x.dtype)


@wrong("rms_norm", fails="each column has its weight")
def rounds_the_weight_to_bfloat16(x, weight, eps):
    wide = x.float()
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.bfloat16().float()).to(x.dtype)


@wrong("rms_norm", fails="each column has its weight")
def rounds_the_weight_to_float16(x, weight, eps):
    wide = x.float()
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.half()).to(x.dtype)


@wrong("rms_norm", fails="each column has its weight")
def scales_by_the_size_of_the_weight(x, weight, eps):
    wide = x.float()
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.abs()).to(x.dtype)
