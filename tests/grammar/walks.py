"""Texts that masks allow, without a model: each token is drawn from those that may come next."""

import numpy as np

STOP, LENGTH = "stop", "length"


def allowed(matcher) -> set[int]:
    return {*np.nonzero(np.unpackbits(matcher.mask, bitorder="little"))[0].tolist()}


def walk(matcher, token_bytes, eos, *, seed: int = 0, most: int = 60) -> tuple[bytes, str]:
    """A text and how it ended: with "stop", "length", or why the grammar could not go on. It ends as soon as it may."""
    draw, text = np.random.default_rng(seed), b""
    for _ in range(most):
        tokens = allowed(matcher)
        if tokens & {*eos}:
            return text, STOP
        token = int(draw.choice(sorted(tokens)))
        error = matcher.advance([token])
        text += token_bytes(token)
        if error is not None:
            return text, error
    return text, LENGTH
