"""Parts of a model on several GPUs, and the exchanges between them; on one GPU these do nothing.

Every GPU (rank) holds some of the heads, of the MLP's inner columns and of the vocabulary, and computes with them what
`Model` computes for the whole model. A matrix that is split by rows gives complete results. `attention_out` and `down`
are split by columns, that is by their inputs, and give partial sums (Shoeybi et al. 2019, "Megatron-LM", section 3).

Layers too can be divided: each stage of a pipeline holds a range of them, on one GPU or on several that share these
layers as above, and passes hidden states on to the next stage (Huang et al. 2019, "GPipe").
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.kv_cache.layer_groups import LayerGroups
from minillm.kv_cache.split_pages import BlockShare
from minillm.ops.compositions import Compositions
from minillm.ops.signatures import Adapted, Unadded
from minillm.quantization import Weight

from .config import ModelConfig


class Inboxes(NamedTuple):
    """Memory of a GPU that kernels of all ranks write to: see `minillm.kernels.peers`."""

    own: Tensor  # [sums, ranks, width] int64: this rank's
    peers: Tensor  # [ranks] int64: the addresses of all ranks'
    epoch: Tensor  # [1] int32: the number of the last step with these sums


@dataclass(frozen=True)
class PipelineStage:
    """One stage of a pipeline, or the whole model. The first has the embedding, the last has final norm and head."""

    index: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, total: int) -> range:
        """Return the range of a model's layers that is here. Early stages have one more than others, as the last has
        the head.

        Raises ConfigError if there are more stages than layers.
        """
        if self.count > total:
            raise ConfigError(
                f"pipeline_parallel_size={self.count}: this model has {total} layers, and each stage needs one; use at "
                f"most {total}"
            )
        return range(-(-self.index * total // self.count), -(-(self.index + 1) * total // self.count))

    def groups(self, whole: LayerGroups) -> LayerGroups:
        """Return the same groups of layers, with the layers that are here: a block has room for no others."""
        here = self.layers(len(whole.of_layer))
        found: list[tuple[int, int]] = []
        for group, _ in whole.of_layer[here.start : here.stop]:
            found.append((group, sum(other == group for other, _ in found)))
        return replace(whole, size=1 + max(index for _, index in found), of_layer=tuple(found))


class Parallel(Protocol):
    """The ranks that hold the shards of one model, or of its layers in one stage of a pipeline.

    Those of a stage call the same collectives in the same order.
    """

    rank: int  # in the stage
    size: int  # ranks of the stage
    share: BlockShare = BlockShare(0, 1)  # of cache blocks, which ranks with the same KV head may divide
    stage: PipelineStage = PipelineStage()

    @property
    def connected(self) -> bool:
        """Return whether the ranks are GPUs that can write to each other's memory."""
        ...

    def inboxes(self, sums: int, width: int) -> Inboxes | None:
        """New memory for `sums` sums a step of up to `width` numbers. None: this is the only rank.

        Several ranks must be connected.
        """
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x. It may be computed in place."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
        """`Operations.add_rms_norm` of the sum of all ranks' x, if one kernel can compute that."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all ranks' x [..., n], in the order of ranks: [..., size * n]."""
        ...

    def all_gather_pages(self, x: Tensor) -> Tensor:
        """Return the x of the ranks that divide cache blocks with this one, in their order: [share.of, *x.shape]."""
        ...

    def exchange_pages(self, x: Tensor) -> Tensor:
        """Send x[i] to number i of those ranks. Returns what they send to this one, in their order: like x."""
        ...

    def exchange(self, x: Tensor, to: int, source: int) -> Tensor:
        """Send x to rank `to`. Return what rank `source` sends here: a tensor of x's shape and dtype.

        Both are other ranks.
        """
        ...

    def least(self, number: int) -> int:
        """Return the smallest of all ranks' numbers, those of other stages included."""
        ...

    def send(self, x: Tensor) -> None:
        """Send x to the rank with this number in the next stage. It does not wait for that to have come so far."""
        ...

    def receive(self, into: Tensor) -> Tensor:
        """Fill a tensor with the next that the stage before sends, and return it."""
        ...


class OneDevice(Parallel):
    """The whole model is here."""

    rank, size = 0, 1
    connected = False

    def inboxes(self, sums: int, width: int) -> None:
        return None

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> None:
        return None

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def all_gather_pages(self, x: Tensor) -> Tensor:
        return x[None]

    def exchange_pages(self, x: Tensor) -> Tensor:
        return x

    def exchange(self, x: Tensor, to: int, source: int) -> Tensor:
        return x

    def least(self, number: int) -> int:
        return number

    def send(self, x: Tensor) -> None:
        raise AssertionError("the only stage is the last one")

    def receive(self, into: Tensor) -> Tensor:
        raise AssertionError("the only stage is the first one")


def all_reduce(x: Tensor, ranks: Parallel) -> Tensor:
    """Return the sum of all ranks' x, in x's dtype: the same bits on all of them.  Lesson 14.

    Added in the order of ranks, in float32 at least. So the sum of an element does not depend on where in x it is.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    first, *others = ranks.all_gather(x).unflatten(-1, (ranks.size, -1)).unbind(-2)
    total = first.to(dtype, copy=True)
    for other in others:
        total += other
    return total.to(x.dtype)


def sharded_argmax(logits: Tensor, ranks: Parallel) -> tuple[Tensor, Tensor]:
    """Return each row's largest logit in the whole vocabulary, and its token: [rows] float64 and int64.  Lesson 14.

    logits: [rows, vocab / ranks], this rank's; the first rank has the first tokens. Of equal logits, the first token's
    is taken. The ranks tell each other two numbers a row. NaN is larger than all numbers, and its token is arbitrary.
    """
    largest, token = logits.double().max(-1)  # of equal ones, the first
    told = torch.stack((largest, (token + ranks.rank * logits.shape[-1]).double()), -1)
    every = ranks.all_gather(told).unflatten(-1, (ranks.size, 2))
    return largest_of(every[..., 0], every[..., 1])


def largest_of(largest: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """`sharded_argmax` of what each rank has found: [rows, ranks] float64."""
    highest = largest.amax(-1)
    first = token.masked_fill(largest < highest[:, None], torch.inf).amin(-1)
    return highest, first.long()


def sharded_embedding(
    parallel: Parallel, run: Compositions, ids: Tensor, table: Weight, rows: int, scale: float
) -> Tensor:
    """`run.embedding` from tables of `rows` tokens each, of which every token is in one: [tokens, hidden]."""
    if parallel.size == 1:
        return run.embedding(ids, table, scale)
    ids = ids - parallel.rank * rows
    here = (ids >= 0) & (ids < rows)
    own = run.embedding(ids.where(here, 0), table, scale)
    return parallel.all_reduce(own.masked_fill(~here[:, None], 0))


def summed_normed_linear(
    parallel: Parallel,
    run: Compositions,
    x: Tensor,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    weight: Weight,
    adapted: Adapted | None = None,
) -> tuple[Tensor | Unadded, Tensor]:
    """`run.normed_linear` of the sum of all ranks' x."""
    normed = parallel.add_rms_norm(x, residual, norm, eps)
    if normed is None:
        return run.normed_linear(parallel.all_reduce(x), residual, norm, eps, weight, adapted)
    return run.adapted_linear(normed[0], weight, adapted), normed[1]


def received(
    parallel: Parallel, embed: Callable[[], Tensor], ids: Tensor, config: ModelConfig, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor]:
    """Return the inputs of the first layer that is here: these tokens' embedding, or what the stage before has
    `sent`.
    """
    if parallel.stage.first:
        return None, embed()
    x, residual = parallel.receive(torch.empty(2, len(ids), config.hidden_size, dtype=dtype, device=ids.device))
    return x, residual


def sent(parallel: Parallel, x: Tensor, residual: Tensor) -> Tensor:
    """Send the results of a stage's last layer to the next stage, which adds them as the same stage's next layer would.

    Returns the residual stream, for a caller that must return something.
    """
    parallel.send(torch.stack((x, residual)))
    return residual
