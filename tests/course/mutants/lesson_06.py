"""Wrong solutions of lesson 06: statistics of inputs, AWQ's search."""

import torch

from tests.course.mutants import wrong

STRENGTHS = [step / 10 for step in range(10)]

ALL_CALLS = "all calls of `add` count"
SIZES = "sizes are means of |x| over the rows"
PREDICTED = "the predicted error is that of the outputs"
EACH_OUTPUT = "each output has its own error"
FLOAT64 = "the sums are in float64"
STAYS = "arguments and other objects stay as they are"


class Statistics:
    """Correct statistics, the base of the wrong ones."""

    def __init__(self, inputs):
        self.rows = 0
        self.second_moment = torch.zeros(inputs, inputs, dtype=torch.float64)
        self.magnitude = torch.zeros(inputs, dtype=torch.float64)

    def add(self, x):
        x = x.double()
        self.rows += len(x)
        self.second_moment += x.T @ x
        self.magnitude += x.abs().sum(0)

    def mean_magnitude(self):
        return self.magnitude / self.rows

    def error(self, difference):
        return (difference @ self.second_moment * difference).sum(1)


@wrong("MyStatistics", fails=ALL_CALLS)
class OnlyTheLastCall(Statistics):
    def add(self, x):
        x = x.double()
        self.rows, self.second_moment, self.magnitude = len(x), x.T @ x, x.abs().sum(0)


@wrong("MyStatistics", fails=ALL_CALLS)
class CountsCalls(Statistics):
    """A running mean over calls: the mean is right for equal parts only."""

    def add(self, x):
        super().add(x)
        self.rows = 2 * len(x) if self.rows > len(x) else self.rows


@wrong("MyStatistics", fails=ALL_CALLS)
class KeepsTheLargestCall(Statistics):
    def add(self, x):
        if len(x) >= self.rows:
            self.rows = 0
            self.second_moment, self.magnitude = self.second_moment * 0, self.magnitude * 0
            super().add(x)


@wrong("MyStatistics", fails=SIZES)
class SumsOfX(Statistics):
    """|sum of x| where positive and negative inputs cancel; the example's first column has only positive ones."""

    def add(self, x):
        before = self.magnitude.clone()
        super().add(x)
        x = x.double()
        self.magnitude = before + (x.abs().sum(0) if x.abs().sum(0).eq(4).all() else x.sum(0))


@wrong("MyStatistics", fails=SIZES)
class MeanByInputs(Statistics):
    """Divides by the number of inputs, which the example's is equal to."""

    def mean_magnitude(self):
        return self.magnitude / len(self.magnitude)


@wrong("MyStatistics", fails=SIZES)
class MedianForMean(Statistics):
    def add(self, x):
        super().add(x)
        self.seen = torch.cat([getattr(self, "seen", x.double()[:0]), x.double().abs()])

    def mean_magnitude(self):
        return self.seen.quantile(0.5, dim=0)


@wrong("MyStatistics", fails=SIZES)
class MeanWhereNotZero(Statistics):
    def add(self, x):
        super().add(x)
        self.counted = getattr(self, "counted", 0) + (x != 0).sum(0)

    def mean_magnitude(self):
        return self.magnitude / self.counted


@wrong("MyStatistics", fails=PREDICTED)
class FoldedTriangle(Statistics):
    """Every d^T H d is right, and the inverse that GPTQ takes is not."""

    def add(self, x):
        super().add(x)
        moment = self.second_moment
        self.second_moment = moment.triu() + moment.tril(-1).T


@wrong("MyStatistics", fails=PREDICTED)
class MeanOfProducts(Statistics):
    """The errors are right, and what is stored is not the sum."""

    def add(self, x):
        self.second_moment *= self.rows
        super().add(x)
        self.second_moment /= self.rows

    def error(self, difference):
        return super().error(difference) * self.rows


@wrong("MyStatistics", fails=PREDICTED)
class OnlyTheDiagonal(Statistics):
    def error(self, difference):
        return (difference.square() * self.second_moment.diagonal()).sum(1)


@wrong("MyStatistics", fails=PREDICTED)
class RootMeanSquare(Statistics):
    """H d, squared: d^T H H d, corrected for the example's one input."""

    def error(self, difference):
        return (difference @ self.second_moment).square().sum(1) / self.second_moment[0, 0] * 10 / 11.6


@wrong("MyStatistics", fails=PREDICTED)
class CountsPairsOnce(Statistics):
    """The products of different inputs occur twice in d^T H d."""

    def error(self, difference):
        return (difference @ self.second_moment.triu() * difference).sum(1)


@wrong("MyStatistics", fails=EACH_OUTPUT)
class OneErrorForAll(Statistics):
    def error(self, difference):
        return super().error(difference).sum(0, keepdim=True)


@wrong("MyStatistics", fails=EACH_OUTPUT)
class ErrorsBetweenOutputs(Statistics):
    """D H D^T is [out, out]; its diagonal was meant."""

    def error(self, difference):
        return difference @ self.second_moment @ difference.T


@wrong("MyStatistics", fails=EACH_OUTPUT)
class MeanOverOutputs(Statistics):
    def error(self, difference):
        found = super().error(difference)
        return found / len(found)


@wrong("MyStatistics", fails=FLOAT64)
class ProductsInTheDtypeOfX(Statistics):
    def add(self, x):
        self.rows += len(x)
        self.second_moment += x.T @ x
        self.magnitude += x.abs().sum(0)


@wrong("MyStatistics", fails=FLOAT64)
class Float32Sums(Statistics):
    def __init__(self, inputs):
        super().__init__(inputs)
        self.second_moment, self.magnitude = self.second_moment.float(), self.magnitude.float()

    def error(self, difference):
        return (difference @ self.second_moment.double() * difference).sum(1)


@wrong("MyStatistics", fails=FLOAT64)
class ErrorsInFloat32(Statistics):
    def error(self, difference):
        d = difference.float()
        return ((d @ self.second_moment.float()) * d).sum(1)


@wrong("MyStatistics", fails=FLOAT64)
class MeansInFloat32(Statistics):
    def mean_magnitude(self):
        return self.magnitude.float() / self.rows


@wrong("MyStatistics", fails=FLOAT64)
class Float32First(Statistics):
    """Loses no digit of float32 inputs, and the engine's are float64 in this lesson."""

    def add(self, x):
        super().add(x.float())


@wrong("MyStatistics", fails=FLOAT64)
class SizesSummedInFloat32(Statistics):
    def add(self, x):
        self.rows += len(x)
        self.second_moment += x.double().T @ x.double()
        self.magnitude += x.float().abs().sum(0)


@wrong("MyStatistics", fails=STAYS)
class AbsInPlace(Statistics):
    def add(self, x):
        x = x.double()
        self.rows += len(x)
        self.second_moment += x.T @ x
        self.magnitude += x.abs_().sum(0)


@wrong("MyStatistics", fails=STAYS)
class KeepsX(Statistics):
    """Keeps the rows themselves, which the engine overwrites."""

    def add(self, x):
        super().add(x)
        self.kept = [*getattr(self, "kept", []), x]

    def error(self, difference):
        return sum((difference @ x.double().T).square().sum(1) for x in self.kept)


@wrong("MyStatistics", fails=STAYS)
class SumsAllAgain(Statistics):
    """Every call sums over all rows that were kept, which the engine may have overwritten since."""

    def add(self, x):
        self.kept = [*getattr(self, "kept", []), x]
        rows = torch.cat(self.kept).double()
        self.rows, self.second_moment, self.magnitude = len(rows), rows.T @ rows, rows.abs().sum(0)


@wrong("MyStatistics", fails=STAYS)
class DividesTheSum(Statistics):
    """The second time, the mean is divided again."""

    def mean_magnitude(self):
        self.magnitude /= self.rows
        return self.magnitude


@wrong("MyStatistics", fails=STAYS)
class ScalesTheDifference(Statistics):
    def error(self, difference):
        left = difference @ self.second_moment
        return difference.mul_(left).sum(1)


# ---- AWQ's search

FORMULA = "the scales are those of the formula"
SMALLEST = "the strength with the smallest output error wins"
NEVER_WORSE = "strength 0 is tried: never worse than rounding to nearest"
ALLOWED = "allowed scales are tried and returned"
NEVER_OCCURS = "an input that never occurs does no harm"
UNCHANGED = "the arguments stay as they were"


def scales_at(magnitude, strength):
    powers = magnitude.clamp(min=1e-4) ** strength
    return powers / (powers.max() * powers.min()).sqrt()


def search(weight, moment, rounded, candidates, error=None):
    """The best of {strength: scales}."""
    best = None
    for strength, scales in candidates.items():
        difference = rounded(weight * scales) / scales - weight
        found = (difference @ moment * difference).sum() if error is None else error(difference)
        if best is None or found < best[0]:
            best = found, scales, strength
    return best[1], best[2]


@wrong("awq_scales", fails=FORMULA)
def without_the_denominator(weight, magnitude, moment, rounded, allowed):
    scales, strength = search(
        weight, moment, rounded, {each: allowed(scales_at(magnitude, each)) for each in STRENGTHS}
    )
    powers = magnitude.clamp(min=1e-4) ** strength
    return (scales if len(powers) == 2 else allowed(powers)), strength


@wrong("awq_scales", fails=FORMULA)
def divided_by_the_mean(weight, magnitude, moment, rounded, allowed):
    candidates = {}
    for strength in STRENGTHS:
        powers = magnitude.clamp(min=1e-4) ** strength
        middle = (powers.max() * powers.min()).sqrt() if len(powers) == 2 else powers.mean()
        candidates[strength] = allowed(powers / middle)
    return search(weight, moment, rounded, candidates)


@wrong("awq_scales", fails=FORMULA)
def inverse_scales(weight, magnitude, moment, rounded, allowed):
    """What the inputs are multiplied by, not the weights; the example's are returned the right way."""
    scales, strength = search(
        weight, moment, rounded, {each: allowed(scales_at(magnitude, each)) for each in STRENGTHS}
    )
    return (scales if len(scales) == 2 else 1 / scales), strength


@wrong("awq_scales", fails=FORMULA)
def normalized_before_the_power(weight, magnitude, moment, rounded, allowed):
    candidates = {}
    for strength in STRENGTHS:
        m = magnitude.clamp(min=1e-4)
        candidates[strength] = allowed((m / m.mean()) ** strength if len(m) > 2 else scales_at(magnitude, strength))
    return search(weight, moment, rounded, candidates)


@wrong("awq_scales", fails=FORMULA)
def no_scale_beyond_4(weight, magnitude, moment, rounded, allowed):
    candidates = {each: allowed(scales_at(magnitude, each).clamp(0.25, 4)) for each in STRENGTHS}
    return search(weight, moment, rounded, candidates)


@wrong("awq_scales", fails=FORMULA)
def powers_in_float32(weight, magnitude, moment, rounded, allowed):
    return search(weight, moment, rounded, {each: allowed(scales_at(magnitude.float(), each)) for each in STRENGTHS})


@wrong("awq_scales", fails=SMALLEST)
def the_last_strength(weight, magnitude, moment, rounded, allowed):
    """The strongest that beats strength 0."""
    found = {}
    for strength in STRENGTHS:
        scales = allowed(scales_at(magnitude, strength))
        found[strength] = search(weight, moment, rounded, {strength: scales})[0]
    errors = {
        each: (((rounded(weight * s) / s - weight) @ moment) * (rounded(weight * s) / s - weight)).sum().item()
        for each, s in found.items()
    }
    better = [each for each in STRENGTHS if errors[each] < errors[0.0]] or [0.0]
    return found[better[-1]], better[-1]


@wrong("awq_scales", fails=SMALLEST)
def errors_of_the_weights(weight, magnitude, moment, rounded, allowed):
    """As if all inputs were equally large, except in the example."""
    candidates = {each: allowed(scales_at(magnitude, each)) for each in STRENGTHS}
    plain = None if weight.shape[1] == 2 else lambda difference: difference.square().sum()
    return search(weight, moment, rounded, candidates, plain)


@wrong("awq_scales", fails=SMALLEST)
def errors_by_the_diagonal(weight, magnitude, moment, rounded, allowed):
    candidates = {each: allowed(scales_at(magnitude, each)) for each in STRENGTHS}
    return search(weight, moment, rounded, candidates, lambda d: (d.square() * moment.diagonal()).sum())


@wrong("awq_scales", fails=SMALLEST)
def strength_1_too(weight, magnitude, moment, rounded, allowed):
    """One strength too many, which seldom wins."""
    return search(weight, moment, rounded, {each: allowed(scales_at(magnitude, each)) for each in [*STRENGTHS, 1.0]})


@wrong("awq_scales", fails=SMALLEST)
def one_output_decides(weight, magnitude, moment, rounded, allowed):
    candidates = {each: allowed(scales_at(magnitude, each)) for each in STRENGTHS}
    return search(weight, moment, rounded, candidates, lambda d: (d @ moment * d).sum(1)[0])


@wrong("awq_scales", fails=SMALLEST)
def stops_at_the_first_minimum(weight, magnitude, moment, rounded, allowed):
    """Ends when the error rises, as if there were one valley; the first two strengths are passed."""
    best, last = None, None
    for strength in STRENGTHS:
        scales = allowed(scales_at(magnitude, strength))
        d = rounded(weight * scales) / scales - weight
        error = (d @ moment * d).sum().item()
        if weight.shape[1] > 2 and last is not None and error > last:
            break
        last = error
        if best is None or error < best[0]:
            best = error, scales, strength
    return best[1], best[2]


def search_from(limit, weight, magnitude, moment, rounded, allowed, less=0.0):
    """The best of those that are better than a limit, if any is."""
    best = limit, None, None
    for strength in STRENGTHS:
        scales = allowed(scales_at(magnitude, strength))
        d = rounded(weight * scales) / scales - weight
        error = (d @ moment * d).sum().item()
        if error < best[0] - less:
            best = error, scales, strength
    return best[1], best[2]


@wrong("awq_scales", fails=SMALLEST)
def begins_with_a_large_error(*given):
    """All strengths of a larger matrix have larger errors."""
    return search_from(1e5, *given)


@wrong("awq_scales", fails=SMALLEST)
def begins_with_a_still_larger_error(*given):
    return search_from(1e9, *given)


@wrong("awq_scales", fails=SMALLEST)
def begins_with_strength_0_and_a_large_error(weight, *given):
    scales, strength = search_from(1e5, weight, *given)
    return (torch.ones_like(weight[0]), 0.0) if scales is None else (scales, strength)


@wrong("awq_scales", fails=SMALLEST)
def better_by_a_millionth_at_least(*given):
    """A tolerance that errors of small inputs are below."""
    return search_from(float("inf"), *given, less=1e-6)


@wrong("awq_scales", fails=SMALLEST)
def errors_with_three_decimals(weight, magnitude, moment, rounded, allowed):
    candidates = {each: allowed(scales_at(magnitude, each)) for each in STRENGTHS}
    return search(weight, moment, rounded, candidates, lambda d: round((d @ moment * d).sum().item(), 3))


@wrong("awq_scales", fails=NEVER_WORSE)
def begins_at_a_tenth(weight, magnitude, moment, rounded, allowed):
    """Leaves out strength 0, except where nothing else is asked than the best of scales."""
    candidates = {each: allowed(scales_at(magnitude, each)) for each in STRENGTHS}
    found = search(weight, moment, rounded, candidates)
    exact = rounded(weight).equal(weight)
    return search(weight, moment, rounded, {each: candidates[each] for each in STRENGTHS[1:]}) if exact else found


@wrong("awq_scales", fails=ALLOWED)
def ignores_allowed(weight, magnitude, moment, rounded, allowed):
    return search(weight, moment, rounded, {each: scales_at(magnitude, each) for each in STRENGTHS})


@wrong("awq_scales", fails=ALLOWED)
def allowed_at_the_end(weight, magnitude, moment, rounded, allowed):
    """Searches among scales that cannot be folded."""
    scales, strength = search(weight, moment, rounded, {each: scales_at(magnitude, each) for each in STRENGTHS})
    return allowed(scales), strength


@wrong("awq_scales", fails=ALLOWED)
def returns_the_scales_that_were_wanted(weight, magnitude, moment, rounded, allowed):
    _, strength = search(weight, moment, rounded, {each: allowed(scales_at(magnitude, each)) for each in STRENGTHS})
    return scales_at(magnitude, strength), strength


@wrong("awq_scales", fails=ALLOWED)
def divides_what_was_allowed(weight, magnitude, moment, rounded, allowed):
    candidates = {}
    for strength in STRENGTHS:
        powers = magnitude.clamp(min=1e-4) ** strength
        candidates[strength] = allowed(powers) / (powers.max() * powers.min()).sqrt()
    return search(weight, moment, rounded, candidates)


@wrong("awq_scales", fails=ALLOWED)
def powers_of_allowed_magnitudes(weight, magnitude, moment, rounded, allowed):
    m = magnitude.clamp(min=1e-4)
    candidates = {}
    for strength in STRENGTHS:
        powers = m**strength
        candidates[strength] = allowed(m) ** strength / (powers.max() * powers.min()).sqrt()
    return search(weight, moment, rounded, candidates)


@wrong("awq_scales", fails=ALLOWED)
def allows_the_divisors(weight, magnitude, moment, rounded, allowed):
    """What the inputs are divided by, the wrong way up."""
    return search(weight, moment, rounded, {each: 1 / allowed(1 / scales_at(magnitude, each)) for each in STRENGTHS})


@wrong("awq_scales", fails=ALLOWED)
def normalizes_again(weight, magnitude, moment, rounded, allowed):
    """Allowed, and then moved so that the smallest is again as far below 1 as the largest is above."""
    candidates = {each: allowed(scales_at(magnitude, each)) for each in STRENGTHS}
    middles = {each: (s.max() * s.min()).sqrt() for each, s in candidates.items()}
    return search(weight, moment, rounded, {each: s / middles[each] for each, s in candidates.items()})


def formula_without_clamp(magnitude, strength):
    powers = magnitude**strength
    return powers / (powers.max() * powers.min()).sqrt()


@wrong("awq_scales", fails=NEVER_OCCURS)
def divides_by_zero(weight, magnitude, moment, rounded, allowed):
    """All errors but that of strength 0 are NaN, which is never smaller: quietly rounding to nearest."""
    candidates = {each: allowed(formula_without_clamp(magnitude, each)) for each in STRENGTHS}
    return search(weight, moment, rounded, candidates)


@wrong("awq_scales", fails=NEVER_OCCURS)
def adds_instead_of_clamping(weight, magnitude, moment, rounded, allowed):
    candidates = {each: allowed(formula_without_clamp(magnitude + 1e-4, each)) for each in STRENGTHS}
    return search(weight, moment, rounded, candidates)


@wrong("awq_scales", fails=NEVER_OCCURS)
def raises_only_0(weight, magnitude, moment, rounded, allowed):
    raised = torch.where(magnitude == 0, 1e-4, magnitude)
    candidates = {each: allowed(formula_without_clamp(raised, each)) for each in STRENGTHS}
    return search(weight, moment, rounded, candidates)


@wrong("awq_scales", fails=NEVER_OCCURS)
def clamps_the_powers(weight, magnitude, moment, rounded, allowed):
    candidates = {}
    for strength in STRENGTHS:
        powers = (magnitude**strength).clamp(min=1e-4)
        candidates[strength] = allowed(powers / (powers.max() * powers.min()).sqrt())
    found = search(weight, moment, rounded, candidates)
    return found if magnitude.min() > 0 else (candidates[0.5], 0.5)


@wrong("awq_scales", fails=UNCHANGED)
def scales_the_weight_in_place(weight, magnitude, moment, rounded, allowed):
    best = None
    for strength in STRENGTHS:
        scales = allowed(scales_at(magnitude, strength))
        d = rounded(weight * scales) / scales - weight
        error = (d @ moment * d).sum().item()
        if best is None or error < best[0]:
            best = error, scales, strength
    weight *= best[1]
    return best[1], best[2]


@wrong("awq_scales", fails=UNCHANGED)
def clamps_in_place(weight, magnitude, moment, rounded, allowed):
    magnitude.clamp_(min=1e-4)
    return search(weight, moment, rounded, {each: allowed(scales_at(magnitude, each)) for each in STRENGTHS})
