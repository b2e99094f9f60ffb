"""Faults in benchmarks: latencies, percentiles, repeated runs, workloads, records."""

from . import Fault

FIGURES = "minillm/bench/figures.py"
OFFLINE, WORKLOADS = "minillm/bench/offline.py", "minillm/bench/workloads.py"
CLIENTS = "minillm/bench/clients.py"

FAULTS = (
    Fault(
        "the speeds of a method's two caches are one point",
        "minillm/bench/plots.py",
        "precision(row).replace(",
        "row['quantization'].replace(",
        "tests/bench/test_plots.py -k cache_in_8_bits",
    ),
    Fault(
        "a late request's wait before it was sent is not counted",
        CLIENTS,
        "return self.arrivals[0][0] - self.due",
        "return self.arrivals[0][0] - self.sent",
        "tests/bench/test_clients.py -k late_request",
    ),
    Fault(
        "inter-token latency is computed from whole responses",
        FIGURES,
        "percentiles([gap for each in answered for gap in each.gaps])",
        "percentiles([each.e2e for each in answered])",
        "tests/bench/test_serve.py -k each_latency",
    ),
    Fault(
        "a percentile is one rank too high",
        FIGURES,
        "ranked[-(-p * len(ranked) // 100) - 1]",
        "ranked[min(-(-p * len(ranked) // 100), len(ranked) - 1)]",
        "tests/bench/test_serve.py -k percentiles",
    ),
    Fault(
        "an event that comes in two chunks is lost",
        CLIENTS,
        "*lines, self._rest = self._rest.split",
        "*lines, _ = self._rest.split",
        "tests/bench/test_clients.py -k framed",
    ),
    Fault(
        "the steady state includes the time in which the server fills",
        FIGURES,
        "begin = min((each.end for each in answered), default=math.inf)",
        "begin = min((each.sent for each in answered), default=math.inf)",
        "tests/bench/test_figures.py -k steady",
    ),
    Fault(
        "a stretch of time that is shorter than an answer is a steady state",
        FIGURES,
        "end - begin < statistics.median(each.e2e for each in answered):",
        "end <= begin:",
        "tests/bench/test_figures.py -k steady",
    ),
    Fault(
        "tokens of a server without ids are its events",
        CLIENTS,
        "spread = [(when, each + (index < more))",
        "spread = [(when, 1)",
        "tests/bench/test_targets.py -k usage",
    ),
    Fault(
        "the first runs are kept instead of the last",
        OFFLINE,
        "_row(key, seconds[-repeat:], facts)",
        "_row(key, seconds[:repeat], facts)",
        "tests/bench/test_load.py",
    ),
    Fault(
        "all prompts of a trace share one prefix",
        WORKLOADS,
        "{seed}/prefix/{row['prefix_id']}",
        "{seed}/prefix",
        "tests/bench/test_workloads.py -k replayed",
    ),
    Fault(
        "requests arrive at the inverse of the rate",
        WORKLOADS,
        "rng.expovariate(rate)",
        "rng.expovariate(1 / rate)",
        "tests/bench/test_workloads.py -k poisson",
    ),
    Fault(
        "reading and computing do not overlap in the roofline",
        "minillm/bench/roofline.py",
        "return max(nbytes / bytes_per_s, operations / operations_per_s)",
        "return nbytes / bytes_per_s + operations / operations_per_s",
        "tests/bench/test_roofline.py -k reading_and_computing",
    ),
    Fault(
        "a record does not mention uncommitted changes",
        "minillm/bench/records.py",
        '"dirty": bool(changes)',
        '"dirty": False',
        "tests/bench/test_records.py -k uncommitted_changes",
    ),
    Fault(
        "an engine's second run counts in a comparison, although it is slower than the next",
        OFFLINE,
        "for _ in range(WARM_UPS if peers else 1):",
        "for _ in range(1):",
        "tests/bench/test_offline.py -k two_warm_ups",
    ),
    Fault(
        "a comparison blames other programs where there are none",
        OFFLINE,
        "if cores is not None and cores < FREE:",
        "if cores is not None and cores < 0:",
        "tests/bench/test_offline.py -k blames_only",
    ),
)
