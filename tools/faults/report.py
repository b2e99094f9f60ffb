"""Faults in `minillm report`: figures, sentences that are not true, and parts that fail."""

from . import Fault

FINDINGS, TESTS = "minillm/report/findings.py", "tests/report/test_findings.py"
SETTINGS, SETTINGS_TESTS = "minillm/report/settings.py", "tests/report/test_settings.py"
MEASURE, SECTIONS, RUN_TESTS = "minillm/report/measure.py", "minillm/report/sections.py", "tests/report/test_run.py"

FAULTS = (
    Fault(
        "a loss is stated although its interval contains 0",
        FINDINGS,
        'row["loss_interval"][0] > 0]',
        'row["loss_points"] > 0]',
        f"{TESTS} -k leaves_out_0",
    ),
    Fault(
        "the cost of one request and of many are exchanged",
        FINDINGS,
        "(cheap := _dollars(many)) and (dear := _dollars(one))",
        "(cheap := _dollars(one)) and (dear := _dollars(many))",
        f"{TESTS} -k costs_compare",
    ),
    Fault(
        "requests are longer than the context",
        SETTINGS,
        "math.ceil(LONGEST / (context - 1))",
        "LONGEST // context",
        f"{SETTINGS_TESTS} -k short_context",
    ),
    Fault(
        "a bug in one part ends the whole report",
        MEASURE,
        "except Exception as error:",
        "except ConfigError as error:",
        f"{RUN_TESTS} -k any_kind",
    ),
    Fault(
        "questions that cannot be downloaded end the whole report",
        MEASURE,
        "except Unreachable as error:",
        "except ConfigError as error:",
        f"{RUN_TESTS} -k cannot_be_downloaded",
    ),
    Fault(
        "a part that failed is in the table without its reason",
        SECTIONS,
        "{why[0] if why else missing}",
        "{missing}",
        f"{RUN_TESTS} -k what_failed",
    ),
    Fault(
        "the page's median is the 99th percentile",
        SECTIONS,
        'PERCENTS = ("p50", "p99")',
        'PERCENTS = ("p99", "p99")',
        f"{RUN_TESTS} -k figures_from_the_record",
    ),
)
