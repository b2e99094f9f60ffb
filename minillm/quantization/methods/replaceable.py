"""The steps of calibrated methods that a function of yours can replace.  Lesson 06.

    with minillm.using(awq_scales=my_scales, gptq=my_gptq) as used:
        quantize(...)

`minillm.calibration` calls these steps through `PARTS`.
"""

from collections.abc import Callable

from torch import Tensor

from minillm.overrides import Parts, register
from minillm.quantization.weight import Codes

from . import awq, gptq


class _Replaceable(Parts):
    """They take what `awq.search_scales`, `awq.search_clipping` and `gptq.quantize` do."""

    awq_scales: Callable[..., tuple[Tensor, float]]
    awq_clipping: Callable[..., Codes]
    gptq: Callable[..., Codes]


PARTS = _Replaceable({"awq_scales": awq.search_scales, "awq_clipping": awq.search_clipping, "gptq": gptq.quantize})
register(lambda: [PARTS])
