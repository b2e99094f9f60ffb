"""Speculation: tokens that a proposer drafts and one step of the model checks.  Lesson 13.

    LLM(speculate="ngram")

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding". Our check is agreement: the number
that samples a token depends on its request's seed and its position alone, so a step samples the model's own token at
each drafted position, and a draft is accepted while it equals that token. The output is therefore the same with and
without speculation, whatever the sampling parameters are, and a draft needs no probability.

Who drafts, and how many tokens, belongs here. Sampling and comparing them does not (`runner`).
"""

from .control import Speculation, every_draft_runs
from .ngram import NgramProposer
from .proposer import Asked, Proposer, ProposerError

__all__ = ["PROPOSERS", "Asked", "NgramProposer", "Proposer", "ProposerError", "Speculation", "every_draft_runs"]

PROPOSERS = {"ngram": NgramProposer}  # by the engine's option `speculate`
