"""Change logits before a token is sampled from them: what a grammar forbids, and penalties.  Lesson 02."""

import torch
from torch import Tensor


def forbid(logits: Tensor, indices: Tensor, masks: Tensor) -> Tensor:
    """Keep only the tokens that grammars allow, in place.  Lesson 02.

    logits: [n, vocab]; indices: [m] indices of rows with a grammar; masks: [m, bytes] uint8, at least one bit for each
    token, lowest bits first: 1 where it may come next.
    """
    bits = masks[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=masks.device) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    return logits.index_copy_(0, indices, logits[indices].masked_fill_(forbidden, -torch.inf))


def penalize(
    logits: Tensor,
    history: Tensor,
    known: Tensor,
    prompt: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Repetition, presence and frequency penalties, in place.  Lesson 02.

    logits: [n, vocab]; history: [n, longest] token ids, -1 where a prompt has an embedding, which is no token; known,
    prompt: [n] lengths of the history and of its prompt; repetition, presence, frequency: [n, 1].
    """
    position = torch.arange(history.shape[1], device=logits.device)
    some = history.where(position < known[:, None], -1).amax(1, keepdim=True)  # one of its tokens; -1: it has none
    repetition = repetition.masked_fill(some < 0, 1)
    here = (position < known[:, None]) & (history >= 0)
    ids = torch.where(here, history, some.clamp(min=0)).long()  # others repeat that token
    output = (position >= prompt[:, None]) & (position < known[:, None])
    ranked = torch.where(output, ids, logits.shape[1]).sort(1).values  # equal ids are neighbors
    count = torch.searchsorted(ranked, ids, right=True) - torch.searchsorted(ranked, ids)
    seen = logits.gather(1, ids)
    seen = torch.where(seen > 0, seen / repetition, seen * repetition) - frequency * count - presence * (count > 0)
    return logits.scatter_(1, ids, seen)
