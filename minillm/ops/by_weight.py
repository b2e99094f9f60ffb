"""Operations on a weight, chosen by how the weight is stored.  Lesson 05."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from minillm.quantization import Weight

Version = TypeVar("Version", bound=Callable[..., Tensor])


class ByWeight:
    """One operation of the table: the version registered for the class of the weight, else the general one.

        linear = ByWeight(reference.linear)  # which dequantizes, and so takes every weight

        @linear.register(Int8Weight)
        def _(x, weight): ...

    The weight is the second argument, in `linear`, `embedding` and `lm_head` alike.
    """

    def __init__(self, general: Callable[..., Tensor]):
        self.general = general
        self.versions: dict[type[Weight], Callable[..., Tensor]] = {}
        self.__doc__, self.__wrapped__ = general.__doc__, general  # its signature is the general version's

    def register(self, kind: type[Weight]) -> Callable[[Version], Version]:
        """Have a function run for weights of this class."""

        def keep(version: Version) -> Version:
            self.versions[kind] = version
            return version

        return keep

    def __call__(self, x: Tensor, weight: Weight, *rest: object) -> Tensor:
        return self.versions.get(type(weight), self.general)(x, weight, *rest)
