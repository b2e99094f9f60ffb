"""What lesson 13 says is what its cells print, what its records have, and what its rules do."""

import numpy as np
import pytest

from minillm.bench import records
from minillm.config import EngineConfig
from minillm.course.lesson_13 import speculating
from tests.course.lesson import solved

lesson = solved("13")
RUNS = r"^{} +(\d+) +(\d+) +(\d+) +([\d.]+)   True$"
SPEEDS = r"^{} +([\d.]+)x +([\d.]+)x$"


def test_a_step_of_eight_tokens_takes_a_third_longer_and_64_little_more_than_four():
    lesson.says(
        "Most of the difference is between 1 and 4 tokens",
        "From 4 tokens to 64, the time grows by little more than a quarter, and much of that is not the steps'",
        "On the H200, eight tokens take 1.33 times as long as one.",
        "if a step gains more than 1.33 tokens",
    )
    ms = speculating.recorded_ms()
    assert list(ms) == [1, 4, 8, 16, 64] and ms[8] / ms[1] == pytest.approx(1.33, abs=0.005)
    assert 1.25 < ms[64] / ms[4] < 1.28 and ms[4] - ms[1] > 0.8 * (ms[8] - ms[1])
    assert lesson.number(r"^8 tokens: predicted .*, measured ([\d.]+) times$") == 1.33


def test_the_cheat_takes_a_fifth_of_the_steps_in_the_loop_and_in_the_engine():
    lesson.says("come in a fifth of the steps", "so a step gains up to five tokens")
    for temperature in ("0", "0.8"):
        assert f"temperature {temperature}: the engine's tokens: True, 17 steps instead of 80" in lesson.printed
        assert f"temperature {temperature}: 17 steps, 63 of 108 drafts right, the same tokens: True" in lesson.printed


def test_a_stale_cache_changes_the_text():
    lesson.says("Nothing crashes, and the text still reads well.")
    assert 1 <= lesson.number(r"^the first (\d+) tokens are the same. From three tokens before that:$") < 20


def test_slots_of_the_picture():
    lesson.says(
        "ran the newest one and four drafts, in slots 12 to 16. One draft was right. So 14 slots count, and three are "
        "stale",
        "will run next, in slot 14",
    )


def test_what_repeats_takes_fewer_steps_and_a_temperature_more():
    lesson.says("hardly anything in the story repeats", "in the guest book most steps run either no draft or seven")
    for temperature in ("0", "0.8"):
        steps, drafts, right, length = lesson.numbers(RUNS.format(f"story, temperature {temperature}"))
        assert steps == 80 and drafts < 10 and right == 0 and length == 1
    for name in ("guest book", "sums"):
        greedy, sampled = (lesson.numbers(RUNS.format(f"{name}, temperature {each}")) for each in ("0", "0.8"))
        assert greedy[0] < sampled[0] and greedy[3] > 2.5 > sampled[3] and sampled[2] < sampled[1] / 2
    assert lesson.number(r"^steps: predicted .*, measured (\d+) steps") == 30


def test_the_numbers_of_drafts_that_the_exercise_chooses():
    lesson.says("Where $p$ is small, no drafts are best; where it is near 1, many are.")
    ms = speculating.step_ms(np.arange(1, 9)).tolist()
    for p, count in ((0.1, 0), (0.2, 0), (0.3, 3), (0.5, 7), (0.8, 7), (0.95, 7)):
        assert speculating.best_count(p, ms) == count and f"p = {p}: {count} drafts" in lesson.printed


def test_the_curves_of_one_request():
    lesson.says(
        "All begin at about 0.75 for p = 0 and cross 1 between p = 0.2 and 0.3.",
        "The line of one draft ends at 1.55, that of three at 3.1, that of 7 at 6.0; that of 15 rises beyond 6.",
    )
    longer = {drafts: speculating.step_ms(1 + drafts) / speculating.step_ms(1) for drafts in (1, 3, 7, 15)}
    for drafts, times in longer.items():
        assert 1 / times == pytest.approx(0.75, abs=0.03) and 0.2 < speculating.pays_from(drafts, times) < 0.3
    ends = [(1 + drafts) / times for drafts, times in longer.items()]
    assert [round(each, 2) for each in ends[:3]] == [1.55, 3.1, 6.0] and ends[3] > 6


def test_nonsense_costs_a_quarter_and_next_to_nothing_with_care():
    lesson.says(
        "running them all costs a quarter of the speed, and being careful next to nothing",
        "Where the text repeats, care costs a little or nothing",
    )
    every, careful = lesson.numbers(SPEEDS.format("story, temperature 0, nonsense"))
    assert every == 0.75 and careful >= 0.98
    for name in ("guest book", "sums"):
        for temperature in ("0", "0.8"):
            every, careful = lesson.numbers(SPEEDS.format(f"{name}, temperature {temperature}"))
            assert 1 < 0.95 * every < careful <= every


def test_an_estimate_that_divides_by_all_drafts_is_too_low():
    lesson.says("exercise 3 would choose 3 drafts by the H200's times; with 0.7 it chooses 7")
    ms = speculating.step_ms(np.arange(1, 9)).tolist()
    assert speculating.best_count(0.306, ms) == 3 and speculating.best_count(0.7, ms) == 7
    rng = np.random.default_rng(0)
    right = (rng.random((20_000, 7)) < 0.7).cumprod(axis=1).sum(axis=1)
    tested = right + (right < 7)
    assert right.mean() / 7 == pytest.approx(0.306, abs=0.01)
    assert right.sum() / tested.sum() == pytest.approx(0.7, abs=0.01)
    assert lesson.number(r"^accepted: predicted .*, computed ([\d.]+) of the drafts$") == 0.306


def test_only_c_has_the_distribution_of_the_target():
    lesson.says("C is right, and simple", "stays below 18.5 in 999 of 1,000 such tests")
    found = {each: lesson.number(rf"^{each} .*chi-square +([\d,.]+)$") for each in ("your rule", *"ABCD")}
    assert [name for name, distance in found.items() if distance < 18.5] == ["your rule", "C"]
    assert min(found[each] for each in "ABD") > 1000, "far from what chance does"


def test_18_5_is_the_limit_of_chance():
    """The survival function of chi-square with 4 degrees of freedom: exp(-x / 2) (1 + x / 2)."""
    assert np.exp(-18.5 / 2) * (1 + 18.5 / 2) == pytest.approx(0.001, rel=0.05)


def test_how_often_each_rule_accepts():
    lesson.says("0.65 in all", "at least $(1 - d)/(1 + d)$ of the time")
    shared = lesson.number(r"^rejection sampling: +([\d.]+)$")
    apart, by_sum, by_gumbel = (
        lesson.number(rf"^agreement, {each}: +([\d.]+)$")
        for each in ("numbers of their own", "one number, cumulative sums", "one number for each token")
    )
    assert apart < by_sum < by_gumbel < shared == 0.65
    assert by_gumbel > (1 - 0.35) / (1 + 0.35)


def test_agreement_with_a_draft_model_accepts_little_less():
    lesson.says("at temperature 0.7, 72% of drafts agree, and rejection sampling would accept 75%")
    (found,) = (each for each in records.read("cpu/draft-draws")["results"] if each["temperature"] == 0.7)
    assert [round(100 * found["agreement"][each]) for each in ("inverse", "most")] == [72, 75]
    lesson.says(
        "At temperature 1.5, 51% agree and it would accept 58%; the draft model's likeliest token, which this engine "
        "does not propose, would be right in 63%."
    )
    (found,) = (each for each in records.read("cpu/draft-draws")["results"] if each["temperature"] == 1.5)
    assert [round(100 * found["agreement"][each]) for each in ("inverse", "most", "likeliest")] == [51, 58, 63]


def test_gumbel_noise_agrees_as_often_as_the_formula_says():
    p, q = np.array([0.40, 0.25, 0.20, 0.10, 0.05]), np.array([0.15, 0.30, 0.10, 0.35, 0.10])
    noise = np.random.default_rng(0).gumbel(size=(40_000, 5))
    same = ((np.log(p) + noise).argmax(1) == (np.log(q) + noise).argmax(1)).mean()
    assert same == pytest.approx(lesson.number(r"^agreement, one number for each token: +([\d.]+)$"), abs=0.01)


def test_exact_sums_take_longer_on_a_gpu():
    lesson.says("in bfloat16 on an H200, that takes 1.6 to 2.1 times as long")
    rows = records.read("h200/speculation-exact")["results"]
    assert {each["dtype"] for each in rows} == {"bfloat16"}
    times = [round(each["times_as_long"], 1) for each in rows]
    assert (min(times), max(times)) == (1.6, 2.1)


def test_drafts_that_are_never_right_cost_a_gpu_little():
    lesson.says("an H200 lost 1.5% to 3% of its speed where the host drafted, and at most 1% where the GPU did.")
    worst = [each for each in speculating.measured() if each.right == 0]
    lost = {
        who: [1 - gain for each in worst if each.who == who for gain in (each.speedup, *each.earlier)]
        for who in speculating.MEASURED
    }
    assert [len(each) for each in lost.values()] == [6, 6], "two runs of 1, 8 and 64 requests"
    assert min(lost["host"]) >= 0.0149 and max(lost["host"]) <= 0.03
    assert min(lost["GPU"]) > 0 and max(lost["GPU"]) <= 0.01


def test_one_gpu_looks_up_its_drafts_by_default():
    lesson.says("on one GPU, the GPU looks them up itself by default (`speculate_ahead`), and need not wait")
    lookup, two = EngineConfig(speculate="ngram"), EngineConfig(speculate="ngram", tensor_parallel_size=2)
    assert lookup.on("cuda").speculate_ahead and not two.on("cuda").speculate_ahead
    assert not lookup.on("cpu").speculate_ahead


def test_steps_whose_drafts_the_gpu_finds_take_what_the_chart_says_and_those_of_the_host_half_a_step_more():
    lesson.says(
        "Where the GPU drafts, steps take as long as the chart says.",
        "That takes 0.5 to 0.6 times as long as a step without drafts.",
    )
    ms = speculating.crowded_ms()
    for requests in (1, 8):
        longer = {}
        for who in speculating.MEASURED:
            mean, *gains = lesson.numbers(
                rf"^{requests}, {who} +([\d.]+)   ([\d.]+) \(([\d.]+)\), ([\d.]+) \(([\d.]+)\)$"
            )
            rows = speculating.by_coin(who, requests)
            assert gains == [
                float(f"{each:{form}}") for row in rows for each, form in ((row.speedup, ".2f"), (row.length, ".1f"))
            ]
            longer[who] = mean
        assert longer["GPU"] == pytest.approx(ms[8 * requests] / ms[requests], abs=0.03)
        assert 0.45 < longer["host"] - longer["GPU"] < 0.62
    names = "h200/roofline", *speculating.MEASURED.values()
    machines = {records.read(name)["machine"]["gpu"].removeprefix("NVIDIA ") for name in names}
    assert machines == {"H200"}, "and the same model, in bfloat16"
    for name in speculating.MEASURED.values():
        assert "--model gemma-2b --load-format dummy --dtype bfloat16" in records.read(name)["command"]


def test_a_full_batch_leaves_little_for_drafts():
    lesson.says(
        "those of 1 and 8 requests begin at 0.74 and 0.91 for p = 0 and cross 1 at p = 0.26 and 0.09; that of 64 "
        "requests begins at 0.42 and crosses 1 at p = 0.58",
        "64 requests with three drafts each begins at 0.72, crosses 1 at p = 0.29, and is above that of "
        "seven drafts up to about p = 0.9",
        "Eight requests have even more to gain from drafts than one",
        "seven drafts each from a drafter that is right half of the time make the server slower. Three each would "
        "still gain",
        "With 256 requests, a single draft for each makes the step 1.70 times as long",
    )
    ms = speculating.crowded_ms()
    assert round(ms[512] / ms[256], 2) == 1.7
    lines = ((1, 7), (8, 7), (64, 7), (64, 3))
    longer = [ms[(1 + drafts) * requests] / ms[requests] for requests, drafts in lines]
    assert [round(1 / each, 2) for each in longer] == [0.74, 0.91, 0.42, 0.72]
    pays = [speculating.pays_from(drafts, times) for (_, drafts), times in zip(lines, longer, strict=True)]
    assert [round(each, 2) for each in pays] == [0.26, 0.09, 0.58, 0.29]
    for (requests, drafts), times in zip(lines, longer, strict=True):
        assert lesson.number(rf"^ *{requests} requests, {drafts} drafts each: ([\d.]+) times") == round(times, 2)
    seven, three = (
        sum(np.linspace(0, 1, 101) ** power for power in range(drafts + 1)) / times
        for drafts, times in ((7, longer[2]), (3, longer[3]))
    )
    assert np.linspace(0, 1, 101)[np.flatnonzero(seven > three)[0]] == pytest.approx(0.9, abs=0.03)
