"""Sample from logits whose vocabulary is divided between ranks, without gathering them.

A rank tells the others three numbers a row: its largest logit, that token, and its share of the softmax's sum. From
these all ranks know which of them has the row's token, and that one looks it up. Requests that need more than
temperature gather the logits of the whole vocabulary.
"""

import torch
from torch import Tensor

from minillm.model.parallel import Parallel, largest_of
from minillm.model.replaceable import PARTS


def sample(
    parallel: Parallel, logits: Tensor, temperature: Tensor | None = None, uniform: Tensor | None = None
) -> Tensor:
    """Return the tokens [rows] int64 that `ops.sample` draws from the logits of all ranks, in their order.

    logits: [rows, vocab / ranks], this rank's. temperature, uniform: [rows], as in `ops.sample`; None: all rows take
    the likeliest token.
    """
    if temperature is None or uniform is None:
        highest, greedy = PARTS.sharded_argmax(logits, parallel)
        return torch.where(highest.abs() < torch.inf, greedy, -1)
    rows, own = logits.shape
    first = parallel.rank * own
    largest, token = logits.double().max(-1)
    divisor = torch.where(temperature > 0, temperature, 1.0).double()
    scores = logits.double() / divisor[:, None]
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    told = torch.stack((largest, (token + first).double(), weights.sum(-1)), -1)
    every = parallel.all_gather(told).view(rows, parallel.size, 3)
    highest, greedy = largest_of(every[:, :, 0], every[:, :, 1])  # NaN if one of them is
    greedy = torch.where(highest.abs() < torch.inf, greedy, -1)
    # Each rank's sum is relative to its own largest logit: make all relative to the largest of all ranks.
    shares = every[:, :, 2] * ((every[:, :, 0] - highest[:, None]) / divisor[:, None]).exp()
    shares = shares.masked_fill(every[:, :, 0] == -torch.inf, 0)
    upto = shares.cumsum(-1)
    target = uniform.double() * upto[:, -1]
    owner = torch.searchsorted(upto, target[:, None], right=True)[:, 0].clamp(max=parallel.size - 1)
    mine = owner == parallel.rank
    # In the units of this rank's weights; where the token is elsewhere, it does not matter what is found.
    scale = ((largest - highest) / divisor).exp()
    left = (target - (upto - shares)[:, parallel.rank]) / scale
    drawn = torch.searchsorted(weights.cumsum(-1), left[:, None], right=True)[:, 0].clamp(max=own - 1)
    drawn = parallel.all_reduce((drawn + first).double().masked_fill(~mine, 0)).long()
    return torch.where((temperature > 0) & (greedy >= 0), drawn, greedy)
