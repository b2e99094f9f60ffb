"""Hadamard matrices: rotations that spread each number over many channels.  Lesson 07.

A Hadamard matrix H [n, n] has the entries 1 and -1 and orthogonal rows, so H / sqrt(n) is a rotation. It turns an
outlier in one channel into n numbers that are sqrt(n) times smaller. Sylvester's construction gives the powers of 2;
those, times the orders of Paley's, give most sizes of models:

    Sylvester 1867: H(2n) = [[H(n), H(n)], [H(n), -H(n)]], from H(1) = [[1]]
    Paley 1933: for a prime q, and Q_ij = the Legendre symbol of i - j modulo q,
        q = 3 mod 4, order q + 1:    H = I + [[0, 1], [-1, Q]]
        q = 1 mod 4, order 2(q + 1): H = C ⊗ [[1, 1], [1, -1]] + I ⊗ [[1, -1], [-1, -1]],  C = [[0, 1], [1, Q]]

A size that is no such product, such as Llama 2 7B's 11,008 = 43 * 256, is split into blocks of its largest divisor that
is one: the rotation then mixes the channels of each block (11,008: 43 blocks of 256). Odd sizes stay as they are.
"""

import math
from functools import cache, lru_cache

import torch
from torch import Tensor

MOST_PALEY = 256  # the product with a matrix of this order is not split into smaller ones


def matrix(order: int) -> Tensor:
    """H [order, order] float64, entries 1 and -1, for an order that `largest_order` returns."""
    paley = _paley_part(order)
    assert paley is not None
    return torch.kron(_sylvester(order // paley), _paley(paley))


def largest_order(size: int) -> int:
    """Return the largest divisor of a size for which there is a matrix."""
    return next(each for each in range(size, 0, -1) if size % each == 0 and _paley_part(each) is not None)


def transform(x: Tensor, inverse: bool = False) -> Tensor:
    """x [..., n] times H / sqrt(n), or its inverse, the transpose; blocks for sizes without a matrix.

    H is the Kronecker product of two smaller matrices, so this takes two small products for each token: n * (a + b)
    multiplications for n = a * b, instead of n * n.
    """
    left, right, rest = _factors(x.shape[-1], x.dtype, x.device)
    grid = x.reshape(-1, len(left), len(right))
    out = left @ (grid @ (right.t() if inverse else right))  # left is symmetric
    return (out if rest == 1 else out * rest).view(x.shape)


@cache  # a captured CUDA graph reads them, so they are never freed
def _factors(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, float]:
    """Return the Kronecker factors of a size's matrix, and the number that remains to be multiplied with.

    Entries of the factors are 1 and powers of 2, which are exact in all dtypes.
    """
    order = largest_order(size)
    paley = _paley_part(order)
    assert paley is not None
    power = (order // paley).bit_length() - 1
    halvings = round(math.log2(order) / 2)
    outer = min(power, halvings)  # left and right of about the same size
    with torch.inference_mode(False):  # kept, so it must be usable outside of that mode
        left = _sylvester(1 << outer).to(device, dtype)
        right = torch.kron(_sylvester(1 << (power - outer)), _paley(paley)) / 2**halvings
        return left, right.to(device, dtype), 2**halvings / math.sqrt(order)


def _sylvester(order: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix


@lru_cache
def _paley_part(order: int) -> int | None:
    """Return the smallest order of Paley's, or 1, that a power of 2 completes to this order; None if there is none."""
    if order & (order - 1) == 0:
        return 1
    halves = [order >> shift for shift in range(order.bit_length()) if order % (1 << shift) == 0]
    return min((each for each in halves if each <= MOST_PALEY and _prime_of(each)), default=None)


def _prime_of(order: int) -> int | None:
    """Return the prime whose matrix has this order."""
    if order % 4 == 0 and _is_prime(order - 1):
        return order - 1
    prime = order // 2 - 1
    return prime if order % 4 == 0 and prime % 4 == 1 and _is_prime(prime) else None


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % each for each in range(2, math.isqrt(number) + 1))


def _paley(order: int) -> Tensor:
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    prime = _prime_of(order)
    assert prime is not None
    symbols = torch.full((prime,), -1.0, dtype=torch.float64)
    symbols[torch.arange(prime).square() % prime] = 1.0
    symbols[0] = 0.0
    indices, skew = torch.arange(prime), prime % 4 == 3
    bordered = torch.ones(prime + 1, prime + 1, dtype=torch.float64)
    bordered[0, 0] = 0.0
    bordered[1:, 0] = -1.0 if skew else 1.0
    bordered[1:, 1:] = symbols[(indices[:, None] - indices) % prime]
    one = torch.eye(prime + 1, dtype=torch.float64)
    if skew:
        return one + bordered
    two, off = torch.tensor([[[1.0, 1.0], [1.0, -1.0]], [[1.0, -1.0], [-1.0, -1.0]]], dtype=torch.float64)
    return torch.kron(bordered, two) + torch.kron(one, off)
