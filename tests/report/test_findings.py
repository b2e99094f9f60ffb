"""A report's sentences: each is written only where the figures make it true."""

import pytest

from minillm.report import findings, sections

NAMES = ("float32", "int8", "int4")


def quality(version, points=0.0, interval=(0.0, 0.0), **changes):
    row = {"part": "quality", "version": version, "questions": 400, "accuracy": 0.8 - points / 100, "dtype": "float32"}
    row |= {"loss_points": points, "loss_interval": list(interval), "kl": 0.0, "perplexity": 5.0, "bytes": 1000}
    return row | changes


def size(version, count, **changes):
    row = {"part": "size", "version": version, "bytes": count, "memory_bytes": count, "kv_bytes_per_token": 10}
    return row | {"simulated": False} | changes


def speed(version, workload, *runs, part="offline", **changes):
    """runs: seconds for 100 tokens."""
    row = {"part": part, "version": version, "workload": f"{workload}_1", "output_tokens": 100, "runs": list(runs)}
    row |= {"output_tokens_per_s": 100 / sorted(runs)[len(runs) // 2], "requests": 8 if workload == "mixed" else 1}
    return row | changes


def pattern(name, rate, ttft=0.1, gap=0.01, slow_gap=0.01, **changes):
    row = {"part": "serving", "version": "float32", "workload": f"{name}_1", "output_tokens_per_s": rate, "requests": 4}
    row |= {"input_tokens": {"liso": 80, "lilo": 40}.get(name, 10), "output_tokens": 20}
    row |= {"ttft_s": {"p50": ttft, "p99": ttft}, "itl_s": {"p50": gap, "p99": slow_gap}}
    return row | {"generator_s": 0.1, "seconds": 1.0} | changes


def record(*results, **changes):
    facts = {"stored_dtype": "bfloat16", "dtype": "float32", "device": "cpu"}
    given = {"results": results, "compared": NAMES, "facts": facts, "settings": {"task": "mmlu", "quick": False}}
    return given | {"embedded": False, "machine": {"cores": 4}, "other_programs_cores": 0.0} | changes


def test_a_loss_is_stated_only_where_its_interval_leaves_out_0():
    worse = quality("int4", 3.0, (1.0, 5.0), kl=0.01)
    says = " ".join(findings.accuracy(record(quality("float32"), quality("int8", 0.2, (-0.5, 0.9)), worse)))
    assert "the model answers 80.0% of 400 questions correctly" in says
    assert "Worse, with 95% confidence: int4 loses 3.0 points (1.0 to 5.0)." in says
    assert "400 questions are too few to tell the loss of int8 from 0." in says
    assert "Better" not in says and "guess" not in says
    says = " ".join(findings.accuracy(record(quality("float32"), quality("int8", -2.0, (-3.0, -1.0)))))
    assert "Better, with 95% confidence: int8." in says and "Worse" not in says and "too few" not in says


@pytest.mark.parametrize(
    ("accuracy", "questions", "guesses"), [(0.3, 100, True), (0.3, 4000, False), (0.1, 400, False)]
)
def test_answers_that_could_be_guesses_are_called_so(accuracy, questions, guesses):
    says = " ".join(findings.accuracy(record(quality("float32", accuracy=accuracy, questions=questions))))
    assert ("no better than guesses" in says) == guesses


@pytest.mark.parametrize(
    ("task", "embedded", "told"), [("isles", False, True), ("isles", True, False), ("mmlu", False, False)]
)
def test_another_model_that_guesses_about_the_invented_world_is_told_to_ask_mmlu(task, embedded, told):
    given = record(quality("float32", accuracy=0.25), embedded=embedded, settings={"task": task})
    assert ("--tasks mmlu" in " ".join(findings.accuracy(given))) == told


def test_a_model_whose_weights_were_rounded_before_is_said_to_be_one_where_losses_are_shown():
    given = record(quality("float32"), quality("int8"), remark="its weights were rounded to Q4_1", failures=[])
    caution = "Caution: its weights were rounded to Q4_1. All losses here are compared with it, not with the original."
    assert caution in findings.accuracy(given) and caution in sections.summary(given, [])
    assert not findings.origin(record(remark="")) and not findings.origin(record())


def test_wilsons_interval_is_within_0_and_1_and_has_its_known_value():
    assert findings.interval(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert findings.interval(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert findings.interval(1.0, 10)[1] <= 1


def test_a_smaller_version_that_is_closer_to_the_original_is_a_surprise():
    def says(kl):
        small, large = quality("int4", kl=kl, bytes=500), quality("int8", kl=0.01, bytes=800)
        return " ".join(findings.accuracy(record(quality("float32"), large, small)))

    assert "int4 is smaller than int8" in says(0.002) and "those of int8 are 5 times as far away" in says(0.002)
    assert "Surprising" not in says(0.05) and "those of int4 are 5 times as far away" in says(0.05)


def test_a_lower_perplexity_is_explained():
    says = " ".join(findings.accuracy(record(quality("float32"), quality("int4", kl=0.1, perplexity=4.9))))
    assert "perplexity of int4 is lower" in says
    says = " ".join(findings.accuracy(record(quality("float32"), quality("int4", kl=0.1, perplexity=5.1))))
    assert "perplexity" not in says


def test_without_a_reference_nothing_is_said_about_accuracy():
    assert findings.accuracy(record()) == findings.accuracy(record(quality("int8"))) == []


def test_sizes_name_the_smallest_file_and_what_the_cache_takes():
    says = findings.sizes(record(size("float32", 2_000_000, memory_bytes=4_000_000), size("int4", 600_000)))
    assert says[0] == "The smallest file is that of int4: 0.6 MB, 30% of the unquantized one's."
    assert "takes 2 times its file" in says[1] and "400,000 tokens take as much memory" in says[2]
    assert "smallest" not in " ".join(findings.sizes(record(size("float32", 100), size("int4", 100))))
    assert findings.sizes(record(size("int4", 100))) == []


def test_speeds_are_compared_only_where_all_runs_of_one_are_faster():
    fast, overlapping = speed("int8", "single", 0.5, 0.51, 0.52), speed("int4", "single", 0.5, 0.8, 1.1)
    given = record(speed("float32", "single", 1.0, 1.01, 1.02), fast, overlapping)
    assert findings.clear_ratio(given, "int8", "single") == pytest.approx(1.01 / 0.51)
    assert findings.clear_ratio(given, "int4", "single") is None
    assert findings.clear_ratio(given, "float32", "single") is None
    says = " ".join(findings.speeds(given))
    assert "For one request, int8 is 1.98 times as fast as float32." in says
    assert "int4" not in says and "no difference" not in says and "slower" not in says


def test_a_difference_that_the_machine_makes_by_itself_is_not_stated():
    first, own = speed("float32", "single", 1.0, 1.0, 1.0), speed("int8", "single", 0.8, 0.8, 0.8)
    steady, slower = (speed("float32", "single", 1.0, each, 2.0, part="again") for each in (1.0, 1.5))
    assert findings.clear_ratio(record(first, own, steady), "int8", "single") == pytest.approx(1.25)
    assert findings.clear_ratio(record(first, own, slower), "int8", "single") is None
    faster = speed("float32", "single", 0.7, 0.7, 0.7, part="again")
    assert findings.drift(record(first, faster)) == pytest.approx(1 / 0.7)
    assert findings.drift(record(first, slower)) == pytest.approx(1.5)
    says = " ".join(findings.speeds(record(first, own, slower)))
    assert "by a factor of 1.50" in says and "For one request, the runs show no difference" in says
    assert "Caution" not in " ".join(findings.speeds(record(first, own, steady)))


def test_no_speeds_are_compared_on_a_machine_whose_own_speed_changed_much():
    rows = [speed("float32", "single", 3.0, 3.0, 3.0), speed("int8", "single", 0.1, 0.1, 0.1)]
    rows += [speed("float32", "mixed", 2.0, 2.0, 2.0), speed("float32", "single", 1.0, 1.0, 1.0, part="again")]
    given = record(*(row | {"cost": {"per_million_output": 1 / row["output_tokens_per_s"]}} for row in rows))
    assert findings.clear_ratio(given, "int8", "single") is None
    (caution,) = findings.speeds(given)
    assert "by a factor of 3.00" in caution and "too much to compare the versions' speeds" in caution
    assert findings.costs(given) == []


def test_a_long_gap_on_a_busy_machine_has_no_likely_reason():
    slow = pattern("silo", 900, slow_gap=0.05)
    assert "The likely reason" in " ".join(findings.serving(record(slow)))
    assert "The likely reason" not in " ".join(findings.serving(record(slow, other_programs_cores=1.5)))


def test_a_smaller_version_that_is_slower_is_a_surprise_with_the_cpus_reason_only_there():
    rows = [size("float32", 1000), size("int4", 300), speed("float32", "single", 1, 1), speed("int4", "single", 2, 2)]
    says = " ".join(findings.speeds(record(*rows)))
    assert "these are slower than float32: int4 (0.50 times as fast)" in says
    assert "Surprising: int4 has 30% of the bytes" in says and "Without a GPU" in says
    on_gpu = record(*rows, facts={"device": "cuda"})
    assert "Surprising: int4" in " ".join(findings.speeds(on_gpu))
    assert "Without a GPU" not in " ".join(findings.speeds(on_gpu))
    rows[3] = speed("int4", "single", 0.5, 0.5)
    assert "Surprising" not in " ".join(findings.speeds(record(*rows)))


def test_a_simulated_formats_speed_is_not_compared():
    rows = [size("float32", 1000), size("int4", 300, simulated=True)]
    rows += [speed("float32", "single", 1, 1), speed("int4", "single", 2, 2)]
    says = findings.speeds(record(*rows))
    assert says == ["int4: the format is simulated here, so the speed says nothing about hardware that computes in it."]


def test_the_gain_of_many_requests_is_stated_where_there_is_one():
    one, many = speed("float32", "single", 1, 1), speed("float32", "mixed", 0.25, 0.25)
    assert "8 requests at once generate 4 times as many" in " ".join(findings.speeds(record(one, many)))
    assert findings.speeds(record(one, speed("float32", "mixed", 1, 1))) == []


def test_other_programs_are_a_caution():
    row = speed("float32", "single", 1, 1)
    assert "kept 1.5 of 4 processors busy" in " ".join(findings.speeds(record(row, other_programs_cores=1.5)))
    for cores in (0.1, None):
        assert findings.speeds(record(row, other_programs_cores=cores)) == []


def test_servings_sentences_name_the_patterns_that_differ():
    rows = [pattern("chat", 400), pattern("silo", 900, slow_gap=0.05), pattern("liso", 300, ttft=0.3)]
    says = " ".join(findings.serving(record(*rows)))
    assert "With short prompts and long answers the server generates 3 times as many" in says
    assert "reading prompts takes time too" in says
    odd = " ".join(findings.serving(record(pattern("chat", 100), pattern("lilo", 300))))
    assert "With long prompts and long answers the server generates 3 times" in odd and "reading" not in odd
    assert "wait 3 times as long for the first token: 300 instead of 100 ms" in says
    assert "With short prompts and long answers, one gap between tokens in a hundred is at least 5 times" in says
    assert findings.serving(record(pattern("chat", 400), pattern("liso", 400))) == []
    (busy,) = findings.serving(record(pattern("chat", 400, generator_s=0.9)))
    assert "worked for 90% of the time" in busy
    assert findings.serving(record()) == []


def test_costs_compare_loads_only_with_a_price():
    def rows(price):
        made = [speed("float32", "single", 1, 1), speed("float32", "mixed", 0.25, 0.25)]
        made += [pattern("chat", 400), pattern("liso", 200)]
        cost = [8.0, 2.0, 1.0, 3.0]
        return [
            row | {"cost": {"per_million_output": each}} if price else row for row, each in zip(made, cost, strict=True)
        ]

    says = findings.costs(record(*rows(True)))
    assert "A token costs 4 times as much" in says[0]
    assert "cheapest with short prompts and short answers ($1 a million)" in says[1] and "($3)" in says[1]
    assert findings.costs(record(*rows(False))) == []


@pytest.mark.parametrize(("ratio", "text"), [(0.123, "0.12"), (1.234, "1.2"), (31.4, "31"), (1234.5, "1,234")])
def test_ratios_have_two_digits(ratio, text):
    assert findings.times(ratio) == text


def test_nothing_is_said_about_speeds_that_are_rounded_to_0():
    slow = [row | {"output_tokens_per_s": 0.0} for row in (pattern("chat", 1), pattern("silo", 1))]
    assert findings.serving(record(*slow, pattern("liso", 1))) == []
    first, own = speed("float32", "single", 9.0, 9.0, 9.0), speed("int8", "single", 0.8, 0.8, 0.8)
    stopped = speed("float32", "single", 9.0, output_tokens_per_s=0.0)
    assert findings.clear_ratio(record(stopped, own), "int8", "single") is None
    assert findings.drift(record(first, stopped | {"part": "again"})) == 1


@pytest.mark.parametrize(
    ("number", "shown"),
    [(301.9324, "301.9"), (1.8024, "1.802"), (0.015942, "0.01594"), (12345.6, "12,346"), (0.0, "0")],
)
def test_dollars_have_four_digits(number, shown):
    assert sections.short(number) == shown
