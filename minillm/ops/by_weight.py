"""Operations that dispatch on the storage format of a weight.  Lesson 05."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from minillm.quantization import Weight

Version = TypeVar("Version", bound=Callable[..., Tensor])


class ByWeight:
    """An operation that calls the implementation registered for the class of its weight, else the general one.

        linear = ByWeight(reference.linear)  # dequantizes, so it takes every weight

        @linear.register(Int8Weight)
        def _(x, weight): ...

    The weight is the second argument, as in `linear`, `embedding` and `lm_head`.
    """

    def __init__(self, general: Callable[..., Tensor]):
        self.general = general
        self.versions: dict[type[Weight], Callable[..., Tensor]] = {}
        self.__doc__, self.__wrapped__ = general.__doc__, general  # for `inspect.signature`

    def register(self, kind: type[Weight]) -> Callable[[Version], Version]:
        """Return a decorator that registers an implementation for weights of this class."""

        def keep(version: Version) -> Version:
            self.versions[kind] = version
            return version

        return keep

    def __call__(self, x: Tensor, weight: Weight, *rest: object) -> Tensor:
        return self.versions.get(type(weight), self.general)(x, weight, *rest)
