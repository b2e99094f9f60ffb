"""Faults in `minillm report`: figures, sentences that are not true, and parts that fail."""

from . import Fault

FINDINGS, TESTS = "minillm/report/findings.py", "tests/report/test_findings.py"
SETTINGS, SETTINGS_TESTS = "minillm/report/settings.py", "tests/report/test_settings.py"
MEASURE, SECTIONS, RUN_TESTS = "minillm/report/measure.py", "minillm/report/sections.py", "tests/report/test_run.py"

FAULTS = (
    Fault(
        "a pattern's steady state is compared with another's whole run",
        MEASURE,
        "if all(row.get",
        "if any(row.get",
        f"{RUN_TESTS} -k patterns_are_compared",
    ),
    Fault(
        "a loss is stated although its interval contains 0",
        FINDINGS,
        'row["loss_interval"][0] > 0]',
        'row["loss_points"] > 0]',
        f"{TESTS} -k leaves_out_0",
    ),
    Fault(
        "a few answers below chance are called guesses",
        FINDINGS,
        "if low <= CHANCE <= high:",
        "if low <= CHANCE:",
        f"{TESTS} -k could_be_guesses",
    ),
    Fault(
        "speeds are compared although the machine's own speed changed by a factor of three",
        FINDINGS,
        " or drift(record) >= UNSTEADY:",
        ":",
        f"{TESTS} -k own_speed_changed_much",
    ),
    Fault(
        "a difference in speed is stated although the runs overlap",
        FINDINGS,
        "return ratio if apart and max(",
        "return ratio if max(",
        f"{TESTS} -k all_runs_of_one",
    ),
    Fault(
        "a difference in speed is stated although the machine's own speed changed more",
        FINDINGS,
        "> max(1 + CLEAR, drift(record)) else None",
        "> 1 + CLEAR else None",
        f"{TESTS} -k machine_makes",
    ),
    Fault(
        "the speed of a simulated format is compared",
        FINDINGS,
        "if ratio is not None and name not in unreal}",
        "if ratio is not None}",
        f"{TESTS} -k simulated",
    ),
    Fault(
        "every smaller version is a surprise, also a faster one",
        FINDINGS,
        "(ratio := ratios[name]) is not None and ratio < 1 and name",
        "(ratio := ratios[name]) is not None and name",
        f"{TESTS} -k smaller_version_that_is_slower",
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
        "the embedded model is asked MMLU",
        SETTINGS,
        "if place != EMBEDDED and tasks.mmlu_is_here()",
        "if tasks.mmlu_is_here()",
        f"{SETTINGS_TESTS} -k mmlu_is_asked",
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
    Fault(
        "the model's name is part of the page's markup",
        "minillm/report/page.py",
        "autoescape=True",
        "autoescape=False",
        f"{RUN_TESTS} -k cannot_become",
    ),
    Fault(
        "the exit status does not say that a part failed",
        "minillm/cli/report.py",
        '    if found["failures"]:\n        raise typer.Exit(1)\n',
        "",
        f"{RUN_TESTS} -k status_says",
    ),
)
