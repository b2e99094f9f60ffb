"""A whole report: its files hold what was measured, and a part that fails does not stop the others."""

import base64
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from typer.testing import CliRunner

from minillm import cli
from minillm.bench import records
from minillm.calibration.methods import Method, MethodRecipe
from minillm.calibration.quantize import quantize
from minillm.errors import ConfigError, Unreachable
from minillm.report import measure, page
from minillm.report.run import run
from minillm.report.sections import MINUS, short
from tests import models

from .conftest import Page

SECTIONS = ("model", "accuracy", "size", "speed", "serving", "cost")
BASE = ["float32", "bf16"]


def rows(record, part):
    return {row["version"]: row for row in record["results"] if row["part"] == part}


def test_the_record_next_to_the_page_has_every_part_of_every_version(made):
    record = records.read(made.file.with_suffix(".json"))
    assert record == json.loads(json.dumps(made.record))
    assert record["compared"] == [*BASE, "int8", "awq-g96"]
    parts = {(row["part"], row["version"]) for row in record["results"]}
    measured = {(part, name) for part in ("quality", "size", "offline") for name in (*BASE, "int8")}
    assert parts == measured | {("serving", "float32"), ("again", "float32")}
    served = [row["workload"].split("_")[0] for row in record["results"] if row["part"] == "serving"]
    assert served == ["chat", "silo", "liso", "lilo"]


def test_patterns_are_compared_over_steady_states_only_if_all_have_one():
    steady, short = {"steady": {"output_tokens_per_s": 2.0}}, {"steady": None}
    assert measure.comparable([steady, steady]) == [steady, steady]
    assert measure.comparable([steady, short]) == [short, short]


def test_the_page_is_whole_and_loads_nothing(made):
    assert made.page.closed, (made.page.open, made.page.wrong)
    assert made.source.startswith("<!DOCTYPE html>")
    links = [value for _, name, value in made.page.attributes if name in ("src", "href", "srcset", "data", "action")]
    assert links and all(link.startswith(("data:image/svg+xml;base64,", "#")) for link in links)
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(made.page.tags)
    assert "url(" not in made.page.css and "@import" not in made.page.css
    sections = {value for tag, name, value in made.page.attributes if (tag, name) == ("section", "id")}
    assert {link[1:] for link in links if link.startswith("#")} <= sections
    assert sections == {"summary", *SECTIONS, "terms", "how"}


def test_every_section_has_its_figures_from_the_record(made):
    record, found = made.record, made.page
    quality, sizes, offline = (rows(record, part) for part in ("quality", "size", "offline"))
    for name in (*BASE, "int8"):
        row, (right, lost, interval, kl, perplexity) = quality[name], found.cells("accuracy")[name]
        assert (right, kl, perplexity) == (f"{row['accuracy']:.1%}", f"{row['kl']:.2g}", f"{row['perplexity']:.3f}")
        if name != "float32":
            low, high = row["loss_interval"]
            assert lost == f"{row['loss_points']:.2f}"
            assert interval == f"{low:.2f} to {high:.2f}".replace("-", MINUS)
        row, (file, share, memory, cache) = sizes[name], found.cells("size")[name]
        assert (file, memory) == tuple(f"{row[key] / 1e6:.1f} MB" for key in ("bytes", "memory_bytes"))
        assert share == f"{row['bytes'] / sizes['float32']['bytes']:.0%}"
        assert cache == f"{row['kv_bytes_per_token']:,}"
        assert found.cells("speed")[name][2] == f"{offline[name]['output_tokens_per_s']:,.1f}", "the mixed row is last"
    for row in (row for row in record["results"] if row["part"] == "serving"):
        cells = found.cells("serving")[row["workload"].split("_")[0]]
        assert cells[2:4] == [f"{1e3 * row['ttft_s'][p]:.1f}" for p in ("p50", "p99")]
        assert cells[-2] == f"{row['output_tokens_per_s']:,.0f}"
    million = record["results"][-1]["cost"]["per_million_output"]
    assert million > 0
    costs = [cells[3:] for cells in found.tables["cost"][0][1:]]
    for row, (generated, every) in zip(priced(record), costs, strict=True):
        assert generated == f"${short(row['cost']['per_million_output'])}"
        assert every == f"${short(row['cost']['per_million'])}"
    assert found.cells("model")["parameters"] == [f"{record['facts']['parameters']:,}"]


def priced(record):
    return [row for part in ("offline", "serving") for row in record["results"] if row["part"] == part]


def test_what_failed_is_told_where_its_figures_would_be_and_the_rest_is_there(made):
    (failure,) = made.record["failures"]
    assert (failure["part"], failure["version"]) == ("quantize", "awq-g96")
    assert "group_size=96 does not divide" in failure["error"]
    for section in ("accuracy", "size", "speed"):
        assert made.page.cells(section)["awq-g96"] == [f"not measured: {failure['error']}"]
        assert len(made.page.cells(section)["int8"]) > 2
    assert "one part of this report failed" in made.page.texts["summary"]


def test_pictures_are_svg_with_a_description_and_formulas_are_mathml(made):
    sources = [value for tag, name, value in made.page.attributes if (tag, name) == ("img", "src")]
    alts = [value for tag, name, value in made.page.attributes if (tag, name) == ("img", "alt")]
    assert len(sources) == len(alts) == 6 and all(len(alt) > 30 for alt in alts)
    for source in sources:
        drawn = base64.b64decode(source.removeprefix("data:image/svg+xml;base64,"))
        root = ElementTree.fromstring(drawn)
        assert root.tag.endswith("svg")
        assert not re.search(rb'(?:href|src)="\s*(?!#|data:)', drawn), "a picture refers to something else"
    assert made.page.tags.count("math") == sum(bool(formula) for _, formula in page.TERMS.values()) > 4
    assert "mfrac" in made.page.tags and "\\frac" not in made.source


def test_the_page_says_each_settings_value_and_the_machine(made):
    cells = made.page.cells("how")
    for name, words in page.SETTINGS.items():
        assert len(cells[words]) == 1, name
    assert cells["lengths of requests divided by"] == ["64"] and cells["most questions"] == ["12"]
    assert cells["versions asked for"] == ["int8, awq-g96"]
    assert cells["cores"] == [str(made.record["machine"]["cores"])]


def test_a_simulated_format_has_neither_a_ratio_of_speeds_nor_a_cost(made):
    unreal = [
        {"simulated": True} if (row["part"], row["version"]) == ("size", "int8") else {}
        for row in made.record["results"]
    ]
    results = [row | changed for row, changed in zip(made.record["results"], unreal, strict=True)]
    found = Page(page.render(made.record | {"results": results}))
    assert found.cells("speed")["int8"][1::2] == ["simulated"] * 2 and "simulated" not in found.cells("speed")["bf16"]
    assert "int8" not in found.cells("cost") and {"float32", "bf16"} <= set(found.cells("cost"))
    assert "int8" in made.page.cells("cost") and "simulated" not in made.page.cells("speed")["int8"]


def test_the_summary_repeats_what_makes_the_speeds_doubtful(made):
    busy = page.render(made.record | {"other_programs_cores": 1.5})
    assert "Caution: other programs kept 1.5 of" in Page(busy).texts["summary"]


def test_a_models_name_cannot_become_part_of_the_page(made):
    record = made.record | {"model": "<script>alert(1)</script>"}
    assert "script" not in Page(page.render(record)).tags


def test_every_version_is_announced(made):
    assert made.said[:2] == ["float32: the reference for accuracy", "float32"]
    assert {"bf16", "int8", "awq-g96", "float32: serving"} <= set(made.said)


@pytest.mark.proof
def test_a_directory_of_transformers_without_a_tokenizer_gets_all_but_accuracy(short, tmp_path):
    """Its context is also shorter than the workloads."""
    models.make("llama3-grouped").save_pretrained(tmp_path / "model")
    work = {"quick": True, "versions": ["int8"], "requests": 2, "limit": 2, "device": "cpu"}
    record = run(tmp_path / "model", out=tmp_path / "page.html", served=["int8"], **work)
    assert [(each["part"], each["version"]) for each in record["failures"]] == [("quality", "float32")]
    assert {row["part"] for row in record["results"]} == {"size", "offline", "serving", "again"}
    assert {row["version"] for row in record["results"] if row["part"] == "serving"} == {"int8"}
    found = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "has no tokenizer" in found.cells("accuracy")["float32"][0]
    assert found.cells("accuracy")["int8"] == ["not measured: there is nothing to compare with"]
    assert len(found.cells("size")["int8"]) == 4 and len(found.cells("speed")["int8"]) == 4
    assert found.closed and "price of an hour" in found.texts["cost"]


@pytest.fixture
def no_work(monkeypatch):
    for work in ("Comparison", "_offline", "_serving", "stored"):
        monkeypatch.setattr(measure, work, lambda *_, **__: pytest.fail("work has begun"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "{}/nothing"}, "no such model directory"),
        ({"model": "gemma-2b"}, "no unquantized model"),
        ({"model": "{}/quantized"}, "no unquantized model"),
        ({"model": "{}/other"}, "GPT2LMHeadModel"),
        ({"out": "{}/page.txt"}, "must end in .html"),
        ({"out": "{}/other/config.json/page.html"}, "cannot"),
        ({"versions": ["int3"]}, "int3 is neither a method nor a directory"),
        ({"versions": ["int8"], "served": ["int4"]}, "--serve int4 is not measured"),
        ({"task": "law"}, "no task 'law'"),
        ({"task": "text"}, "give a task that has questions"),
        ({"scale": 1}, "--scale 1 makes requests of 2,560 tokens"),
        ({"price": -1}, "--gpu-price must be a number of dollars"),
        ({"quantization": "int8"}, "sets quantization itself"),
    ],
)
def test_wrong_input_is_refused_before_any_work(options, message, tmp_path, no_work):
    quantize(None, MethodRecipe.of(Method("int8")), tmp_path / "quantized")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    given = {
        name: value.format(tmp_path) if isinstance(value, str) else value
        for name, value in ({"out": "{}/page.html"} | options).items()
    }
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(**given, device="cpu")
    assert not (tmp_path / "page.html").exists() and not (tmp_path / "page.json").exists()


def test_questions_that_cannot_be_downloaded_are_a_part_that_fails(monkeypatch):
    def offline(task):
        raise Unreachable("there is no network")

    monkeypatch.setattr(measure, "held_out", offline)
    monkeypatch.setattr(measure, "_reference", lambda *_: pytest.fail("there are no questions"))
    settings = measure.ReportSettings((), "mmlu", None, None, 1, 1, 1, 1, 1, served=("none",))
    monkeypatch.setattr(measure, "_offline", lambda *_: None)
    monkeypatch.setattr(measure, "_size_and_quality", lambda *_: None)
    found = measure.measure(measure.Path(), [measure.Version("one", measure.Path(), {})], settings, {"device": "cpu"})
    assert found.failures == [{"part": "quality", "version": "float32", "error": "there is no network"}]


def test_an_error_of_any_kind_ends_only_its_part(caplog):
    found = measure.Measurements()
    for error in (ConfigError("does not fit"), RuntimeError("out of memory\nat line 7")):
        with found.part("offline", "int8"):
            raise error
    assert [each["error"] for each in found.failures] == ["does not fit", "RuntimeError: out of memory"]
    assert [record.exc_info is not None for record in caplog.records] == [True], "a bug's traceback is printed"
    with pytest.raises(KeyboardInterrupt), found.part("offline", "int8"):
        raise KeyboardInterrupt


def test_a_cache_of_another_type_is_in_the_unquantized_versions_name(made, tmp_path):
    """Its accuracy is measured, not that of the reference, whose cache is in float32."""
    from minillm import LLM
    from minillm.report.settings import settle

    with LLM(kv_cache_dtype="int8", device="cpu") as llm:
        settings = settle(tmp_path, 2048, gpu=False, versions=["int8"], task="isles")
        found, _ = measure.versions_of(llm, tmp_path, settings, {"kv_cache_dtype": "int8"})
    assert [version.name for version in found] == ["float32, int8 cache", "bf16", "int8"]


def command(*arguments):
    return CliRunner().invoke(cli.app, ["report", *arguments])


@pytest.mark.parametrize(("failures", "status"), [([], 0), ([{"part": "size", "version": "int4", "error": "no"}], 1)])
def test_the_commands_options_arrive_and_its_status_says_whether_a_part_failed(monkeypatch, failures, status):
    seen = {}

    def fake(model, **options):
        seen.update(options, model=model)
        return {"failures": failures}

    monkeypatch.setattr("minillm.report.run.run", fake)
    done = command("here", "--versions", "int8,int4", "--versions", "fp8", "--serve", "int8", "--gpu-price", "2.5",
                   "--tasks", "mmlu_law", "--quick", "--out", "a.html", "--max-num-seqs", "7")  # fmt: skip
    assert done.exit_code == status, done.output
    del seen["say"]
    wanted = {"versions": ["int8", "int4", "fp8"], "served": ["int8"], "price": 2.5, "task": "mmlu_law", "quick": True}
    assert {name: seen[name] for name in (*wanted, "model", "max_num_seqs")} == wanted | {
        "model": "here",
        "max_num_seqs": 7,
    }
    assert "a.html: the report" in done.output and "a.json: the record" in done.output
    assert ("failed: size of int4: no" in done.output) == bool(failures)


def test_a_wrong_command_is_one_line_and_status_2():
    done = command("/nothing/there")
    assert done.exit_code == 2 and done.stderr.startswith("minillm: no such model directory: /nothing/there")
    done = command("one", "--model", "another")
    assert done.exit_code == 2 and "given twice, as 'one' and as 'another'" in done.stderr
