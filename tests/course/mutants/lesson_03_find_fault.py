"""Wrong solutions of lesson 03's last exercise: tests that miss a fault, or find one where there is none."""

from itertools import product as product_of

import torch

from tests.course.mutants import wrong


def _close(found, wanted):
    return torch.allclose(found, wanted, rtol=1e-4, atol=1e-3)


def _find(
    product, *, sizes=(64, 100, 164), orders=(None, 1, -1), same_scale=False, rows=slice(None), right=_close,
    row_counts=(3,), ones=False, positive=False, positive_x=False, alike=False, constant=False,
    scales=(0.5, 0.25, 2.0), answer="it fails",
):  # fmt: skip
    for columns, many in product_of(sizes, row_counts):
        weight = torch.arange(many * columns).remainder(11).sub(0 if positive else 5).view(many, columns).to(torch.int8)
        weight = weight[:1].expand(many, columns).contiguous() if alike else weight
        x = torch.arange(columns).remainder(7).sub(0 if positive_x else 3) / 4  # sums are exact in any order
        x = torch.ones(columns) if ones else x
        x = torch.full((columns,), 1.5) if constant else x
        scale = torch.full((many,), 0.5) if same_scale else torch.tensor(scales)[:many]
        wanted = scale * (weight.float() @ x)
        for step in orders:
            order = list(range((columns + 63) // 64))[::step] if step else None
            if not right(product(weight, scale, x, order)[rows], wanted[rows]):
                return answer
    return None


@wrong("find_fault", fails="a fault is described in words")
def only_true(product):
    return _find(product, answer=True)


@wrong("find_fault", fails="a missing mask is found")
def whole_pieces_only(product):
    return _find(product, sizes=(64, 192))


@wrong("find_fault", fails="several sizes are tried")
def one_size_without_full_pieces(product):
    return _find(product, sizes=(200,))


@wrong("find_fault", fails="several sizes are tried")
def two_pieces_at_most(product):
    return _find(product, sizes=(64, 100, 128))


@wrong("find_fault", fails="several sizes are tried")
def two_pieces_at_least(product):
    return _find(product, sizes=(100, 128, 164))


@wrong("find_fault", fails="all inputs are used as they are")
def x_of_ones(product):
    return _find(product, ones=True)


@wrong("find_fault", fails="all inputs are used as they are")
def weights_never_negative(product):
    return _find(product, positive=True)


@wrong("find_fault", fails="all inputs are used as they are")
def x_never_negative(product):
    return _find(product, positive_x=True)


@wrong("find_fault", fails="all inputs are used as they are")
def rows_alike(product):
    return _find(product, alike=True)


@wrong("find_fault", fails="all inputs are used as they are")
def columns_of_x_alike(product):
    return _find(product, constant=True)


@wrong("find_fault", fails="all inputs are used as they are")
def without_the_sign_of_the_result(product):
    return _find(product, right=lambda found, wanted: _close(found.abs(), wanted.abs()))


@wrong("find_fault", fails="programs whose order matters are found")
def first_to_last_only(product):
    return _find(product, orders=(None, 1))


@wrong("find_fault", fails="the usual order is tried too")
def last_to_first_only(product):
    return _find(product, orders=(-1,))


@wrong("find_fault", fails="another row's scale is found")
def one_scale_for_all(product):
    return _find(product, same_scale=True)


@wrong("find_fault", fails="every row is compared")
def without_the_last_row(product):
    return _find(product, rows=slice(2))


@wrong("find_fault", fails="every row is compared")
def only_the_last_row(product):
    return _find(product, rows=slice(-1, None))


@wrong("find_fault", fails="every row is compared")
def only_the_last_row_but_also_of_one(product):
    return _find(product, rows=slice(-1, None), row_counts=(1, 3))


@wrong("find_fault", fails="every row is compared")
def scales_from_zero(product):
    return _find(product, scales=(0.0, 1.0, 2.0))


@wrong("find_fault", fails="every row is compared")
def scales_to_zero(product):
    return _find(product, scales=(2.0, 1.0, 0.0))


@wrong("find_fault", fails="every row is compared")
def sums_of_the_rows(product):
    return _find(product, right=lambda found, wanted: _close(found.sum(), wanted.sum()))


@wrong("find_fault", fails="a small error is found")
def two_percent_are_right(product):
    return _find(product, right=lambda found, wanted: torch.allclose(found, wanted, rtol=0.02, atol=0.05))


@wrong("find_fault", fails="a small error is found")
def three_digits_are_enough(product):
    return _find(product, right=lambda found, wanted: torch.allclose(found, wanted, rtol=1e-3, atol=1e-3))


@wrong("find_fault", fails="a small error is found")
def without_abs(product):
    return _find(product, right=lambda found, wanted: (found - wanted).max() < 1e-3)


@wrong("find_fault", fails="rounding is accepted")
def too_exact(product):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-9, 10, (3, 164), generator=generator).to(torch.int8)
    scale, x = torch.tensor([0.3, 0.7, 1.1]), torch.randn(164, generator=generator)
    exact = torch.equal(product(weight, scale, x), scale * (weight.float() @ x))
    return _find(product) or (None if exact else "it fails")


@wrong("find_fault", fails="NaN is rejected")
def expects_a_wrong_result(product):
    return _find(product, right=lambda found, wanted: not (found - wanted).abs().max() > 1e-3)
