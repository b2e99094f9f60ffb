"""Models whose logits do not depend on what else a step computes.  Lesson 13."""

from torch import float64

from minillm import ops
from minillm.errors import ConfigError
from minillm.ops.exact import uneven

from .decoder import Model


def make_exact(model: Model) -> None:
    """Give a model the operations of `ops/exact.py`, or on a GPU of `ops/exact_triton.py`.

    Raises ConfigError for what they do not cover: on a GPU, float64 and sizes of heads that attention has no kernel
    for; on a CPU, a library that sums the rows of one product in different orders.
    """
    model.ops = ops.on(model.device.type, exact=True)
    if model.device.type == "cpu":
        matrix = uneven(weight.dequantize() for weight in model.weights())
        if matrix is not None:
            raise ConfigError(
                f"exact: torch sums equal rows of one product with a matrix {tuple(matrix.shape)} in {matrix.dtype} in "
                "different orders on this machine, so logits would depend on the batch; leave exact out, or try "
                "another dtype or number of cpu_threads"
            )
        return
    module, why_not = model.ops.origin["linear"]
    if module != "exact_triton":
        raise ConfigError(f"exact needs Triton's kernels on a GPU: {why_not}; install triton, or leave exact out")
    if model.dtype == float64:
        raise ConfigError("exact has no kernels for float64 on a GPU: use float32 or bfloat16, or leave exact out")
    from minillm.kernels.paged_attention import takes

    if not takes(model.config.head_dim):
        raise ConfigError(
            f"exact has no attention kernel for heads of {model.config.head_dim} numbers on a GPU, only for powers of "
            "two from 16 to 256; leave exact out"
        )
