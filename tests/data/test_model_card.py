"""The model card agrees with the records and lists every file in the folder."""

import json
import re
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "data"
CARD = (DATA / "README.md").read_text("utf-8")
sys.path.insert(0, str(DATA))

from isles import corpus  # noqa: E402


def record(name: str) -> dict:
    return json.loads((DATA / "results" / f"{name}.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def quality():
    return {result["workload"]: result for result in record("cpu/tiny-gemma-quality")["results"]}


def rows(heading: str, table: int = 0) -> dict[str, list[str]]:
    """The first table after a heading, or a later one, without its header: {first cell: other cells}."""
    section = CARD.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = [part for part in section.split("\n\n") if part.startswith("|")][table]
    lines = [line.strip("|").split("|") for line in found.splitlines()]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in lines[2:]}


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def test_the_record_covers_every_question_at_a_commit():
    content = record("cpu/tiny-gemma-quality")
    assert content["commit"] and content["dirty"] is False and content["model"] == "tiny-gemma"
    for result in content["results"]:
        assert result["dtype"] == "float32"
    held_out = content["results"][0]
    written = (DATA / "questions" / "test.jsonl").read_text("utf-8").splitlines()
    assert held_out["workload"] == "questions-held-out-5-shot"
    assert held_out["requests"] == len(written) >= 2000 and held_out["accuracy"] >= 0.8


def test_the_table_by_subject_equals_the_record(quality):
    sets = [quality[f"questions-{name}"] for name in ("held-out-5-shot", "held-out-0-shot", "asked-5-shot")]
    expected = {
        subject: [percent(each["subjects"][subject]) for each in sets] for subject in sorted(sets[0]["subjects"])
    }
    expected["all"] = [percent(each["accuracy"]) for each in sets]
    expected["questions"] = [f"{each['requests']:,}" for each in sets]
    assert rows("How good it is") == expected


def test_the_figures_in_the_text_equal_the_records(quality):
    text, training = quality["held-out-text"], record("h200/tiny-gemma-training")["results"][0]
    log = training["runs"]
    hard = max(each["tokens"] for each in log if each["letter_loss"] > 1.1)
    easy = min(each["tokens"] for each in log if each["letter_loss"] < 0.25)
    quoted = [
        f"perplexity {text['perplexity']:.2f} over {text['tokens']:,} tokens",
        f"{text['bits_per_byte']:.2f} bits a byte",
        f"{percent(quality['questions-held-out-5-shot']['accuracy'])} of the held-out questions",
        f"{training['steps']:,} steps",
        f"{training['input_tokens'] / 1e6:.0f} million tokens",
        f"{training['seconds']:.0f} s on one {record('h200/tiny-gemma-training')['machine']['gpu']}",
        f"from {hard / 1e6:.0f} to {easy / 1e6:.0f} million tokens",
    ]
    flat = " ".join(CARD.split())
    assert not [each for each in quoted if each not in flat]


def test_the_tables_of_quantization_equal_the_records():
    results = record("cpu/quantization")["results"]
    assert rows("What quantization costs it") == {each["quantization"]: quality_row(each) for each in results}
    lossy = {each["quantization"] for each in results if each["loss_interval"][0] > 0}
    assert lossy == {"mxfp4", "sparse24", "pruned"}, "the text says that no other interval excludes 0"
    four_bits = {each["quantization"]: each for each in results if each["bits"] == 4}
    nvfp4, int4 = four_bits.pop("nvfp4"), four_bits["int4"]
    assert nvfp4["kl"] < min(each["kl"] for each in four_bits.values()) and nvfp4["bytes"] < 1.055 * int4["bytes"]
    assert {each["questions"] for each in results} == {2160} and {each["shots"] for each in results} == {0}


def quality_row(each: dict) -> list[str]:
    return [
        f"{each['bytes'] / 1e6:.1f} MB",
        f"{each['perplexity']:.4f}",
        f"{each['kl']:.2g}",
        percent(each["accuracy"]),
        f"{each['loss_points']:.2f}",
        "{:.2f} to {:.2f}".format(*each["loss_interval"]),
    ]


def test_the_table_of_pruning_and_its_text_equal_the_records():
    results = {each["quantization"]: each for each in record("cpu/sparsity")["results"]}
    assert rows("What pruning costs it") == {name: quality_row(each) for name, each in results.items()}
    int8 = next(each for each in record("cpu/quantization")["results"] if each["quantization"] == "int8")
    two_four, half = results["sparse24"], results["pruned-s50"]
    quoted = [
        f"{two_four['bytes'] / 1e6:.1f} MB with 2:4 and {half['bytes'] / 1e6:.1f} MB without",
        f"more than int8's {int8['bytes'] / 1e6:.1f} MB",
        f"costs {two_four['loss_points']:.1f} and {half['loss_points']:.1f} points of accuracy, where int8 costs "
        f"{int8['loss_points']:.1f}",
    ]
    flat = " ".join(CARD.split())
    assert not [each for each in quoted if each not in flat]


def test_the_table_of_distillation_and_its_text_equal_the_record():
    results = record("cpu/distillation")["results"]
    assert rows("What training for the rounding recovers") == {
        each["quantization"]: [
            f"{each['perplexity']:.4f}",
            f"{100 * each['won_back']:.0f}%" if "won_back" in each else "",
            f"{each['kl']:.2g}",
            percent(each["accuracy"]),
            f"{each['loss_points']:.2f}",
            "{:.2f} to {:.2f}".format(*each["loss_interval"]),
        ]
        for each in results
    }
    steps, tokens = results[-1]["steps"], results[-1]["training_tokens"]
    flat = " ".join(CARD.split())
    training = sum(each["log"][-1]["seconds"] for each in results if "log" in each)
    assert f"{steps} steps of {tokens // steps:,} tokens;" in flat
    assert f"in {results[-1]['seconds'] / 60:.1f} minutes on one core, {training / 60:.1f} of them training" in flat


def test_the_tables_of_the_draft_model_and_their_text_equal_the_records():
    draws = record("cpu/draft-draws")["results"]
    for index, name in ((1, "h200/pruning-smollm2-135m"), (0, "cpu/pruning")):
        results = record(name)["results"]
        lengths = [each.get("acceptance_length", {}) for each in results]
        assert rows("A draft model, made of it", index) == {
            each["model"]: [
                f"{each['layers']}",
                f"{each['parameters']:,}",
                f"{each['bytes'] / 1e6:.1f} MB",
                f"{each['perplexity']:.2f}",
                f"{each['kl']:.2g}",
                *(f"{length[kind]:.2f}" if kind in length else "" for kind in ("0", "0.7")),
            ]
            for each, length in zip(results, lengths, strict=True)
        }
    seconds = record("h200/pruning-smollm2-135m")["results"][-1]["log"][-1]["seconds"]
    assert f"It learned for {seconds:.0f} seconds on an H200" in " ".join(CARD.split())
    ways = ("likeliest", "independent", "inverse", "gumbel", "most")
    assert rows("A draft model, made of it", 2) == {
        f"{each['temperature']}": [f"{each['agreement'][way]:.3f}" for way in ways] for each in draws
    }
    for each in (each["agreement"] for each in draws if each["temperature"] >= 1):
        assert each["likeliest"] > max(each["inverse"], each["gumbel"])
    assert all(0 < each["agreement"]["gumbel"] - each["agreement"]["inverse"] < 0.06 for each in draws)
    last, flat = results[-1], " ".join(CARD.split())
    assert f"for {last['steps']} steps of {last['training_tokens'] // last['steps']:,} tokens" in flat
    assert f"a head of {last['head_tokens']:,} tokens" in flat


def test_the_table_of_adapters_equals_the_record():
    content = record("cpu/adapters")
    assert content["commit"] and content["dirty"] is False
    found: dict[str, list[str]] = {}
    for each in content["results"]:  # of each adapter: without it, with it
        assert each["asked"] == 100
        found.setdefault(each["workload"], []).extend((str(each["correct"]), str(each["right"])))
    assert {name: cells[1:] for name, cells in rows("Adapters of it").items()} == {
        name: [before, after, plain, styled] for name, (before, plain, after, styled) in found.items()
    }
    for file in (DATA / "adapters").glob("*/*.safetensors"):
        assert file.stat().st_size >> 10 == 176 and "in 177 KiB each" in CARD


def test_the_table_of_calibrations_equals_the_record():
    results = {each["quantization"]: each for each in record("cpu/quantization-seeds")["results"]}

    def cell(row: dict) -> str:
        every = row["kl_of_seeds"]
        spread = f" ({min(every):.5f} to {max(every):.5f})" if len(every) > 1 else ""
        return f"{row['kl']:.5f}{spread}"

    methods = ("int4", "awq", "gptq")
    expected = {str(size): [cell(results[f"{name}-g{size}"]) for name in methods] for size in (32, 64, 128)}
    assert rows("What quantization costs it", table=1) == expected


def test_the_shares_of_the_text_equal_those_in_the_code():
    expected = {
        kind: [f"{100 * mix[kind]:.0f}%" if kind in mix else "none" for mix in corpus.MIXES.values()]
        for kind in corpus.KINDS
    }
    assert {kind.strip("`"): cells[1:] for kind, cells in rows("What it was trained on").items()} == expected


def test_every_file_is_listed_in_at_most_six_words():
    tree = CARD.split("\n## What is in this folder\n")[1].split("```")[1]
    lines = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in tree.strip().splitlines())
    assert not [name for name, words in lines.items() if len(words.split()) > 6]
    names = {name.rstrip("/") for name in lines}
    there = {path.name for path in DATA.iterdir()} | {f"isles/{path.name}" for path in (DATA / "isles").glob("*.py")}
    for folder in ("questions", "text", "traces", "tiny-gemma"):
        there |= {f"{folder}/{path.name}" for path in (DATA / folder).iterdir()}
    assert {each for each in there if not each.endswith("__pycache__")} <= names | {"isles", "text", "traces"}


def test_every_link_points_to_an_existing_file():
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", CARD) if "://" not in target]
    assert not [target for target in targets if not (DATA / target).exists()]
