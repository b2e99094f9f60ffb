"""Wrong solutions of lesson 00: the generation loop, the roofline, RMSNorm."""

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


@wrong("continue_text", fails="it stops at the end token, which is no part of the text")
def keeps_the_end(model, prompt, max_tokens, end):
    new = []
    while len(new) < max_tokens and end not in new:
        found = model([*prompt, *new])
        new.append(max(found, key=found.get))
    return new


@wrong("continue_text", fails="an end in the prompt ends nothing")
def looks_for_the_end_in_the_prompt_too(model, prompt, max_tokens, end):
    new = []
    while len(new) < max_tokens and end not in [*prompt, *new]:
        found = model([*prompt, *new])
        new.append(max(found, key=found.get))
    return new[:-1] if new[-1:] == [end] else new


@wrong("continue_text", fails="it takes the most likely token, whatever its place")
def takes_the_first(model, prompt, max_tokens, end):
    new = []
    for _ in range(max_tokens):
        token = next(iter(model([*prompt, *new])))
        if token == end:
            break
        new.append(token)
    return new


@wrong("continue_text", fails="the given prompt is not changed")
def writes_into_the_prompt(model, prompt, max_tokens, end):
    ids, before = prompt, len(prompt)
    for _ in range(max_tokens):
        found = model(ids)
        token = max(found, key=found.get)
        if token == end:
            break
        ids.append(token)
    return ids[before:]


def numbers(shapes):
    return sum(rows * columns for rows, columns in shapes)


@wrong("step_work", fails="all matrices are counted")
def last_matrix_only(shapes, tokens, bytes_per_number):
    return numbers(shapes[-1:]) * bytes_per_number, 2 * numbers(shapes[-1:]) * tokens


@wrong("step_work", fails="more tokens cost operations, not bytes")
def reads_for_every_token(shapes, tokens, bytes_per_number):
    return numbers(shapes) * bytes_per_number * tokens, 2 * numbers(shapes) * tokens


@wrong("step_work", fails="every token is multiplied")
def computes_for_one_token(shapes, tokens, bytes_per_number):
    return numbers(shapes) * bytes_per_number, 2 * numbers(shapes)


@wrong("step_work", fails="smaller numbers are fewer bytes, not fewer operations")
def operations_from_bytes(shapes, tokens, bytes_per_number):
    nbytes = numbers(shapes) * bytes_per_number
    return nbytes, nbytes // 2 * tokens


@wrong("floor_seconds", fails="where arithmetic is the limit")
def reads_only(nbytes, operations, bytes_per_s, operations_per_s):
    return nbytes / bytes_per_s


@wrong("floor_seconds", fails="reading and computing overlap")
def one_after_the_other(nbytes, operations, bytes_per_s, operations_per_s):
    return nbytes / bytes_per_s + operations / operations_per_s


@wrong("floor_seconds", fails="fast machines have small floors")
def rounds(nbytes, operations, bytes_per_s, operations_per_s):
    return round(max(nbytes / bytes_per_s, operations / operations_per_s), 2)


@wrong("rms_norm", fails="every token on its own")
def one_mean_for_all(x, weight, eps):
    wide = x.float()
    return (wide / (wide.pow(2).mean() + eps).sqrt() * weight).to(x.dtype)


@wrong("rms_norm", fails="the mean itself is kept")
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
def squares_as_they_come(x, weight, eps):
    return (x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight).to(x.dtype)


@wrong("rms_norm", fails="the dtype that came in goes out")
def stays_wide(x, weight, eps):
    wide = x.float()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
