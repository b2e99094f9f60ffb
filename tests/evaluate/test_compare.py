"""The table of what each method loses: its figures by definition, its bounds on the embedded model, its record."""

import json
import math
import re
import statistics
import sys
from types import SimpleNamespace

import pytest
import torch

from minillm import LLM
from minillm.bench import records
from minillm.calibration.methods import METHODS, Method, MethodRecipe
from minillm.calibration.names import named
from minillm.calibration.quantize import quantize
from minillm.calibration.rotation import rotate
from minillm.errors import ConfigError
from minillm.evaluate import compare, load_text, paired_loss
from minillm.evaluate.compare import Comparison, Reference, default_methods
from minillm.evaluate.tasks import held_out
from minillm.model import load_model
from minillm.model.loader import EMBEDDED
from minillm.model.saver import save_model
from minillm.tokenizer import Tokenizer
from tests import models
from tests.proofs import only_in_proofs

MODULE = sys.modules["minillm.evaluate.compare"]


@pytest.fixture(scope="module")
def ids():
    """Token ids of held-out text."""
    return Tokenizer.from_pretrained(EMBEDDED).encode(load_text()[:20_000], add_special_tokens=False)


@pytest.fixture(scope="module")
def reference(ids):
    return Reference(load_model(dtype="float32"), ids[:3000], [2])


def quantized(tmp_path, method, rows=4, length=128, seed=0, layers="layers.*"):
    out = tmp_path / "-".join(map(str, (method.name, method.group_size, seed)))
    quantize(None, MethodRecipe({layers: method}), out, rows=rows, length=length, seed=seed)
    return load_model(out, dtype="float32")


def test_a_models_divergence_from_itself_is_zero_and_its_perplexity_is_the_engines(ids):
    model = load_model(dtype="float32")
    found = Reference(model, ids[:900], [2]).divergence(model)
    assert abs(found.kl) < 1e-9
    with LLM(dtype="float32") as llm:
        from minillm.evaluate import perplexity

        assert found.perplexity == pytest.approx(perplexity(llm, ids[:900], window=1024)["perplexity"], rel=1e-5)


def test_kl_and_perplexity_have_their_definitions(ids, tmp_path):
    """Of two random models, whose distributions are far apart, over windows that do not divide the text."""
    for seed, name in enumerate("pq"):
        models.make("gemma-grouped", seed=seed).save_pretrained(tmp_path / name)
    p, q = (load_model(tmp_path / name, dtype="float64") for name in "pq")
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 96, (40,), generator=generator).tolist()
    p.max_model_len = 17  # so that windows have 16 tokens after <bos>
    found = Reference(p, text, [2]).divergence(q)
    kl, surprise, count = 0.0, 0.0, 0
    for start in range(0, 40, 16):
        row = torch.tensor([[2, *text[start : start + 16]]])
        with torch.inference_mode():
            log_p, log_q = (
                torch.log(model.logits(MODULE.hidden_states(model, row)[:-1]).softmax(-1)) for model in (p, q)
            )
        kl += (log_p.exp() * (log_p - log_q)).sum().item()
        surprise -= sum(log_q[i, token].item() for i, token in enumerate(row[0, 1:].tolist()))
        count += row.shape[1] - 1
    assert count == 40 and kl / count > 0.01
    assert found.kl == pytest.approx(kl / count, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(surprise / count), rel=1e-6)


def test_paired_loss_is_agresti_and_mins_interval():
    before = [True] * 90 + [False] * 10
    after = [False] * 6 + [True] * 84 + [True] * 2 + [False] * 8  # 6 lost, 2 won
    found = paired_loss(before, after)
    assert found.points == pytest.approx(4)
    b, c, n = 6.5, 2.5, 102
    middle, error = (b - c) / n, 1.959964 * math.sqrt((b + c) - (b - c) ** 2 / n) / n
    assert (found.low, found.high) == pytest.approx((100 * (middle - error), 100 * (middle + error)))
    assert paired_loss(after, before).points == pytest.approx(-4)


def test_paired_losss_interval_contains_the_true_loss_as_often_as_it_says():
    """The probability over all outcomes of 60 questions, of which 6% are lost and 2% won: exact, no sampling."""
    n, lost, won = 60, 0.06, 0.02
    inside = 0.0
    for b in range(n + 1):
        for c in range(n + 1 - b):
            weight = math.comb(n, b) * math.comb(n - b, c) * lost**b * won**c * (1 - lost - won) ** (n - b - c)
            if weight > 1e-12:
                found = paired_loss([True] * b + [False] * (n - b), [False] * b + [True] * c + [False] * (n - b - c))
                inside += weight * (found.low <= 100 * (lost - won) <= found.high)
    assert 0.93 < inside < 0.99


def test_equal_answers_leave_an_interval_that_shrinks_with_the_number_of_questions():
    few, many = (paired_loss([True] * n, [True] * n) for n in (50, 5000))
    assert few.points == many.points == 0
    assert -few.low == few.high > 20 * many.high > 0


def test_answers_to_different_questions_cannot_be_paired():
    with pytest.raises(ConfigError, match="2 and 3 answers cannot be paired"):
        paired_loss([True] * 2, [True] * 3)


@pytest.mark.parametrize("name", ["int8", *only_in_proofs("fp8")])
def test_8_bit_weights_lose_at_most_a_hundredth_of_perplexity(name, reference, tmp_path):
    exact = reference.divergence(load_model(dtype="float32"))
    found = reference.divergence(quantized(tmp_path, Method(name)))
    assert 1e-6 < found.kl < 1e-3
    assert found.perplexity < 1.01 * exact.perplexity


@pytest.mark.parametrize("name", ["int8", *only_in_proofs("fp8")])
def test_a_quantized_cache_loses_at_most_a_hundredth_of_perplexity(name, reference):
    exact = reference.divergence(load_model(dtype="float32"))
    found = reference.divergence(load_model(dtype="float32", kv_cache_dtype=name))
    assert 1e-6 < found.kl < 1e-3
    assert found.perplexity < 1.01 * exact.perplexity


def test_a_comparison_with_a_quantized_cache_measures_from_a_float32_one(quick):
    base, int8 = compare(["int8"], limit=8, device="cpu", kv_cache_dtype="fp8")
    assert (base["kv_cache_dtype"], int8["kv_cache_dtype"]) == ("float32", "fp8")


@pytest.mark.proof
def test_awq_and_gptq_diverge_less_than_int4_in_groups_of_32(ids, tmp_path):
    """The smallest groups leave them the least to gain. One layer: the record has the whole model and all groups."""
    reference, layer = Reference(load_model(dtype="float32"), ids[:1000], [2]), "layers.1.*"
    found = {
        name: statistics.median(
            reference.divergence(quantized(tmp_path, Method(name, 32), rows=16, seed=seed, layers=layer)).kl
            for seed in range(3)
        )
        for name in ("awq", "gptq")
    }
    nearest = reference.divergence(quantized(tmp_path, Method("int4", 32), layers=layer)).kl
    assert found["awq"] < 0.85 * nearest and found["gptq"] < 0.8 * nearest, (found, nearest)


def rows_of(record: str) -> dict[str, dict]:
    return {row["quantization"]: row for row in records.read(f"cpu/{record}")["results"]}


def test_the_record_has_every_method_and_keeps_the_bounds():
    rows = rows_of("quantization")
    assert set(rows) == {"float32", *default_methods(load_model())[0]}
    for row in rows.values():
        assert row["questions"] == 2160 and len(row["kl_of_seeds"]) == 1
        assert row["loss_points"] == pytest.approx(100 * (rows["float32"]["accuracy"] - row["accuracy"]), abs=0.011)
        assert row["loss_interval"][0] <= row["loss_points"] <= row["loss_interval"][1]
    for name in ("int8", "fp8", "w8a8", "w8a8-rotate", "smoothquant"):
        assert rows[name]["perplexity"] < 1.01 * rows["float32"]["perplexity"]
        assert rows[name]["bytes"] < 0.61 * rows["float32"]["bytes"]
    assert rows["w8a8-rotate"]["kl"] < 0.5 * rows["w8a8"]["kl"]
    four = {
        "nvfp4": 9 / 16,
        "mxfp4": 17 / 32,
        "int4": 33 / 64,
    }  # bytes of a weight: a scale of 1 or 2 bytes for a block
    for name, bytes_each in four.items():
        layers = rows[name]["bytes"] - 2 * (4096 * 256 + 13 * 256)
        assert layers == pytest.approx(bytes_each * 4_521_984, rel=1e-3)
    assert {name for name, row in rows.items() if row["simulated"]} == {"nvfp4", "mxfp4", "sparse24", "pruned"}
    assert rows["nvfp4"]["kl"] < 0.7 * rows["int4"]["kl"] and rows["pruned"]["kl"] < rows["sparse24"]["kl"]
    assert rows["awq"]["bytes"] == rows["gptq"]["bytes"] == rows["int4"]["bytes"] < 0.41 * rows["float32"]["bytes"]


@pytest.mark.parametrize("group", ["-g32", "-g64", "-g128"])
def test_in_the_record_awq_and_gptq_diverge_less_than_int4_with_the_median_of_five_calibrations(group):
    rows = rows_of("quantization-seeds")
    for name in ("awq", "gptq"):
        row = rows[name + group]
        assert len(set(row["kl_of_seeds"])) == 5
        assert row["kl"] == sorted(row["kl_of_seeds"])[2] < 0.9 * rows["int4" + group]["kl"]


@pytest.fixture
def quick(monkeypatch):
    """A short text, short calibrations, and the seed of each."""
    seeds = []

    def calibrated(source, methods, out, *, seed, device):
        seeds.append(seed)
        return quantize(source, methods, out, seed=seed, device=device, rows=2, length=64)

    text = load_text()[:4000]
    monkeypatch.setattr(MODULE, "load_text", lambda: text)
    monkeypatch.setattr(MODULE, "quantize", calibrated)
    return seeds


def test_a_comparison_has_a_row_for_the_model_and_each_name(quick, tmp_path):
    quantize(None, MethodRecipe.of(Method("int8"), "int8"), tmp_path / "mine")
    names = ["int4-g32-zeros", "fp8-tensor+fp8", str(tmp_path / "mine")]
    base, int4, fp8, mine = compare(names, limit=24, device="cpu")
    assert [row["quantization"] for row in (base, int4, fp8, mine)] == ["float32", *names]
    stored = [(row["bits"], row["group_size"], row["head"]) for row in (base, int4, fp8, mine)]
    assert stored == [(32, None, "dense"), (4, 32, "dense"), (8, None, "fp8"), (8, None, "int8")]
    assert base["kl"] < 1e-9 < mine["kl"] < int4["kl"]
    assert (base["loss_points"], base["loss_interval"], base["bytes"]) == (0, [0, 0], 11_147_776)
    assert int4["perplexity_loss"] == pytest.approx(int4["perplexity"] / base["perplexity"] - 1, abs=2e-5)
    for row in (int4, fp8, mine):
        assert row["questions"] == 24 and row["shots"] == 0 and row["kv_cache_dtype"] == "float32"
        assert row["loss_points"] == pytest.approx(100 * (base["accuracy"] - row["accuracy"]), abs=0.01)


def test_a_comparison_may_read_only_the_texts_first_tokens(quick):
    with LLM(dtype="float32", device="cpu") as llm:
        part, whole = (Comparison(llm, EMBEDDED, held_out("isles"), 4, tokens) for tokens in (100, None))
    assert part.reference.tokens == 100 < whole.reference.tokens
    assert torch.equal(part.reference.rows[0][0, :101], whole.reference.rows[0][0, :101])


@pytest.mark.proof
def test_of_several_calibrations_the_median_is_the_result(quick):
    _, int4, fp8, w8a8 = compare(["int4", "fp8-static", "w8a8-rotate"], limit=8, seeds=3, device="cpu")
    assert quick == [0, 0, 1, 2, 0, 1, 2], "int4 has neither a calibration nor random signs to repeat"
    assert len(int4["kl_of_seeds"]) == 1
    for row in (fp8, w8a8):
        assert len(set(row["kl_of_seeds"])) == 3
        assert row["kl"] == sorted(row["kl_of_seeds"])[1]


FITTING = {"hidden_size": 64, "intermediate_size": 128}


@pytest.mark.parametrize(
    ("family", "rotated"), [("gemma-grouped", ["w8a8-rotate"]), ("gemma2-multi-query", []), ("rotated", [])]
)
def test_all_methods_are_compared_unless_it_is_said_and_w8a8_rotated_where_the_model_can_be(family, rotated, tmp_path):
    models.make("gemma-grouped" if family == "rotated" else family, **FITTING).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32")
    if family == "rotated":
        rotate(model, torch.float32, down=False)
    found, left_out = default_methods(model)
    assert found == {name: named(name) for name in (*METHODS, *rotated)}
    assert list(found)[:5] == ["int8", "int4", "fp8", "w8a8", *rotated, "smoothquant"][:5]
    assert list(left_out) == ([] if rotated else ["w8a8-rotate"])
    assert rotated or re.search("cannot be rotated|rotated already", left_out["w8a8-rotate"])


def test_methods_that_do_not_fit_a_model_are_left_out_with_a_line_that_says_why(monkeypatch, tmp_path, caplog):
    """Of 48 and 80 inputs, no power of two from 32 divides both."""
    models.make("gemma-grouped", vocab_size=4096).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((EMBEDDED / "tokenizer.json").read_bytes())
    monkeypatch.setattr(MODULE, "load_text", lambda: load_text()[:500])
    monkeypatch.setattr(MODULE, "quantize", lambda *_, **__: pytest.fail("a method is tried"))
    rows = compare([], tmp_path, limit=2, device="cpu")
    assert next(rows)["quantization"] == "float32"
    found, left_out = default_methods(load_model(tmp_path, dtype="float32"))
    assert list(left_out) == ["int4", "awq", "gptq", "w4a8", "mxfp4"] and len(found) == len(METHODS) + 1 - 5
    assert caplog.messages == [f"{name} is left out: {why}" for name, why in left_out.items()]
    assert all("layers.0.qkv: " in why and "48 inputs" in why for why in left_out.values())


def test_a_broken_model_is_not_one_that_no_method_fits():
    model = load_model(dtype="float32")
    model.layers[0].mlp_norm.fill_(float("nan"))
    with pytest.raises(ConfigError, match="layers.0.post_attention_layernorm.weight has numbers that are not finite"):
        default_methods(model)


@pytest.fixture(scope="module")
def unfit(tmp_path_factory):
    """Directories that cannot be compared: a quantized model, a rotated one, and one with another tokenizer."""
    place = tmp_path_factory.mktemp("unfit")
    model = load_model(dtype="float32")
    save_model(model, EMBEDDED, place / "other")
    tokenizer = json.loads((place / "other" / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["merges"] = []
    (place / "other" / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    quantize(None, MethodRecipe.of(Method("int8")), place / "quantized")
    rotate(model, torch.float32, down=False)
    save_model(model, EMBEDDED, place / "rotated", torch.float32)
    return place


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["int8", "int3"], {}, "int3 is neither a method nor a directory"),
        (["int8", "awq-g96"], {}, "group_size=96 does not divide"),
        (["int8", "{}"], {}, "has no \\*.safetensors"),
        (["int8", "{}/other"], {}, "other has another tokenizer"),
        ([], {"model": "{}/quantized"}, "is no unquantized model to compare with"),
        ([], {"model": "gemma-2b"}, "gemma-2b is no unquantized model"),
        (["int8", "w8a8-rotate"], {"model": "{}/rotated"}, "the model is rotated already"),
        ([], {"quantization": "int8"}, "a comparison sets quantization itself"),
        ([], {"task": "text"}, "a comparison reads the text in any case"),
        ([], {"task": "law"}, "no task 'law'; tasks are isles, text, mmlu"),
    ],
)
def test_names_that_cannot_be_compared_are_refused_before_any_work(names, options, message, unfit, monkeypatch):
    for work in ("hidden_states", "answers", "quantize"):
        monkeypatch.setattr(MODULE, work, lambda *_, **__: pytest.fail("work has begun"))
    options = {name: value.format(unfit) for name, value in options.items()}
    with pytest.raises(ConfigError, match=message):
        next(compare([name.format(unfit) for name in names], **options))


def test_a_text_without_a_token_to_predict_is_refused():
    with pytest.raises(ConfigError, match="too short"):
        Reference(SimpleNamespace(max_model_len=16, device="cpu"), [], [2])
