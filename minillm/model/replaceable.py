"""The steps that divide a model between ranks, each of which a function of yours can replace.  Lesson 14.

    with minillm.using(shard=my_shard, all_reduce=my_sum) as used, LLM(device="cpu", tensor_parallel_size=2) as llm:
        llm.generate(...)

`loader` calls `shard` through `PARTS`, and so do the exchanges of `minillm.parallel` and of the sampler on CPUs.
"""

from collections.abc import Callable

from torch import Tensor

from minillm.overrides import Parts, register
from minillm.quantization import Shard

from .modules import Module, shard
from .parallel import Parallel, all_reduce, sharded_argmax


class _Replaceable(Parts):
    """They take and return what `modules.shard`, `parallel.all_reduce` and `parallel.sharded_argmax` do."""

    shard: Callable[[Module, int, int], Shard]
    all_reduce: Callable[[Tensor, Parallel], Tensor]
    sharded_argmax: Callable[[Tensor, Parallel], tuple[Tensor, Tensor]]


PARTS = _Replaceable({"shard": shard, "all_reduce": all_reduce, "sharded_argmax": sharded_argmax})
register(lambda: [PARTS])
