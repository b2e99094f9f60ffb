"""A test that finds faults in kernels.  Lesson 03."""

import math

import torch

from ..shared.checks import Exercise
from .planted import faulty_product

SECONDS = 20.0  # for one property; the slowest right solutions need about one

find_fault = Exercise("find_fault", returns=False, seconds=SECONDS)  # None is an answer


def _fails(function, product, message: str):
    assert function(product) is not None, message


def _passes(function, product, message: str):
    found = function(product)
    assert found is None, f"{message}: expected None, got {found!r}"


@find_fault.example
def _(function):
    _passes(function, lambda weight, scale, x, order=None: scale * (weight.float() @ x.float()), "a right product")
    _fails(function, faulty_product(times=0.0), "a product that is always 0: expected some text, got None")


@find_fault.property("a fault is described in words", 'for example f"{columns} columns, order {order}"')
def _(function):
    found = function(faulty_product(times=-3.0))
    assert found is None or (isinstance(found, str) and found.strip()), f"expected some text, got {found!r}"


@find_fault.property("a missing mask is found", "a number of columns that is no multiple of PIECE")
def _(function):
    _fails(function, faulty_product(masked=False), "a kernel that adds up memory after a row passes")


@find_fault.property("several sizes are tried", "with and without a partial piece; one piece, and three or more")
def _(function):
    _fails(function, faulty_product(most=128), "a kernel that ignores all columns from 128 on passes")
    _fails(function, faulty_product(single=False), "a kernel that is wrong only if one piece holds all columns passes")
    _fails(function, faulty_product(full=False), "a kernel that is wrong only if all pieces are full passes")


@find_fault.property(
    "all inputs are used as they are", "random numbers for weight and x, positive and negative, not only ones"
)
def _(function):
    _fails(function, faulty_product(x=torch.ones_like), "a kernel that ignores x passes")
    _fails(function, faulty_product(x=torch.neg), "a product with the wrong sign passes")
    _fails(function, faulty_product(weight=torch.abs), "a kernel that drops the signs of weight passes")
    _fails(function, faulty_product(x=torch.abs), "a kernel that drops the signs of x passes")
    _fails(function, faulty_product(weight=lambda w: w.to(torch.uint8)), "a kernel that takes int8 for uint8 passes")
    first_row = faulty_product(weight=lambda w: w[:1].expand_as(w))
    _fails(function, first_row, "a kernel that takes the first row's weights for all rows passes")
    _fails(function, faulty_product(x=lambda x: x[:1].expand_as(x)), "a kernel that takes x[0] for all of x passes")


@find_fault.property(
    "programs whose order matters are found",
    "several pieces, in another order than 0, 1, 2, ...; scales that are not 1",
)
def _(function):
    _fails(function, faulty_product(last_scales=True), "a kernel whose last piece must run last passes")


@find_fault.property("the usual order is tried too", "several pieces from first to last, or with order=None")
def _(function):
    _fails(function, faulty_product(ascending=False), "a kernel that is wrong only from first to last passes")


@find_fault.property("another row's scale is found", "several rows, each with a scale of its own")
def _(function):
    _fails(function, faulty_product(own_scale=False), "a kernel that takes the first row's scale for all rows passes")


@find_fault.property(
    "every row is compared", "compare all of the result, each row by itself; a scale of 0 hides its row"
)
def _(function):
    for row, name in ((0, "first"), (0.5, "middle"), (1, "last")):
        _fails(function, faulty_product(shifted=[row]), f"a product whose {name} row is wrong passes")
    _fails(
        function, faulty_product(shifted=[0, 1]), "too much in the first row and as much too little in the last pass"
    )
    first = faulty_product(weight=lambda w: torch.cat((2.0 * w[:1], w[1:])))  # a scale of 0 hides its row
    _fails(function, first, "a product whose first row is doubled passes")
    last = faulty_product(weight=lambda w: torch.cat((w[:-1], 2.0 * w[-1:])))
    _fails(function, last, "a product whose last row is doubled passes")


@find_fault.property(
    "a small error is found", "float32 has seven digits: rtol=1e-4 and atol=1e-3 are loose enough here"
)
def _(function):
    _fails(function, faulty_product(times=1.0005), "a product that is 1.0005 times too large passes")
    _fails(function, faulty_product(add=0.02), "a product that is a little too large passes")
    _fails(function, faulty_product(add=-0.02), "a product that is a little too small passes")


@find_fault.property(
    "rounding is accepted",
    "pieces may be added in any order: torch.allclose with rtol=1e-4, atol=1e-3 (its defaults are stricter)",
)
def _(function):
    for backwards, double in ((False, False), (True, False), (False, True)):
        message = "a product that is right, added up in another order"
        _passes(function, faulty_product(backwards=backwards, double=double), message)


@find_fault.property(
    "NaN is rejected", "NaN > 0.001 is False: ask for what is right (all close), not for what is wrong"
)
def _(function):
    _fails(function, faulty_product(add=math.nan), "a product that is NaN everywhere passes")
