"""What lesson 15 says is what its cells print, what its record has, and what its rules do."""

import statistics

import pytest
import torch

from minillm import LLM
from minillm.adapters.peft import read_adapter
from minillm.bench import records
from minillm.course.lesson_15 import adapting, style
from minillm.course.making import build
from minillm.folders import DATA
from minillm.model.config import PRESETS
from tests.course.lesson import solved

lesson = solved("15")
CUT = r"^ +{} +([\d,]+) +(\d+)% +([\d.]+) +(\d+) of 24 +(\d+) of 24$"


def losses(kind: str) -> dict[int, list[float]]:
    return {rank: [row["loss"] for row in rows] for rank, rows in adapting.recorded(kind).items()}


def test_training_teaches_the_style():
    lesson.says("72 conversations are for training, and 24 are kept to ask afterwards")
    assert lesson.number(r"^answers in this style now: (\d+) of 24$") == 0
    before, after = lesson.numbers(r"^loss of held-out answers: ([\d.]+) before, ([\d.]+) after$")
    assert before > 6 and after < 0.6
    lesson.says("the seven in each of the last three layers", "Two million numbers, for two short strings.")
    assert lesson.numbers(r"^(\d+) matrices, ([\d,]+) numbers$") == (21, 2_260_992)


def test_few_directions_carry_the_style():
    lesson.says(
        "Look at rank 1: with about a sixth of the squares, most of the loss is gone, but no answer begins right.",
        "Cut like this, the change needs about eight directions before the answers begin right",
        "rank 8 loses a third of the squares, rank 16 a fifth, and nearly all answers begin right",
        "Eight directions are a twentieth of the numbers.",
    )
    rows = {rank: lesson.numbers(CUT.format(rank)) for rank in (1, 2, 4, 8, 16)}
    before, _ = lesson.numbers(r"^loss of held-out answers: ([\d.]+) before, ([\d.]+) after$")
    assert 12 <= rows[1][1] <= 22 and rows[1][2] < before / 2 and rows[1][3] == 0 and rows[4][3] < 16
    assert rows[8][0] == pytest.approx(2_260_992 / 20, rel=0.01) and rows[8][3] >= 20 and rows[16][3] >= 20
    assert 30 <= 100 - rows[8][1] <= 37 and 17 <= 100 - rows[16][1] <= 23
    for column, rising in ((1, True), (2, False), (3, True)):
        values = [row[column] for row in rows.values()]
        assert values == sorted(values, reverse=not rising)


def test_an_adapter_of_rank_four_is_better_than_a_change_that_is_cut_to_it():
    lesson.says("At the same low rank, trained factors do better than cut ones")
    _, _, cut_loss, cut_begun, _ = lesson.numbers(CUT.format(4))
    begun, _ = lesson.numbers(r"^trained at rank 4: (\d+) of 24 begin right, (\d+) of 24 end right$")
    assert begun >= 20 and begun > cut_begun
    assert lesson.number(r"^loss of held-out answers: ([\d.]+)$") < cut_loss


def test_so_says_the_record_of_five():
    lesson.says(
        "A committed record has five",
        "fall from about 2 at rank 1 to 0.4 at rank 8",
        "begin at 0.5 and are near 0.3 from rank 4 on",
        "Up to rank 8, every one of them is below every cut change of its rank.",
    )
    cut, trained = losses("cut"), losses("trained")
    assert {len(each) for each in (*cut.values(), *trained.values())} == {5}
    assert statistics.median(cut[1]) == pytest.approx(2, abs=0.2)
    assert statistics.median(cut[8]) == pytest.approx(0.4, abs=0.05)
    assert statistics.median(trained[1]) == pytest.approx(0.5, abs=0.05)
    for rank in (4, 8, 16):
        assert statistics.median(trained[rank]) == pytest.approx(0.3, abs=0.03)
    for rank in (1, 2, 4, 8):
        assert max(trained[rank]) < min(cut[rank])


def test_rounding_errors_have_no_low_rank_and_trained_changes_do():
    """The caption speaks of a change that this machine trained; this of matrices that every machine has."""
    lesson.says(
        "has most of its squares within the first 16 ranks",
        "neither has half of its squares within the first 64",
    )
    with LLM(device="cpu", dtype="float32") as llm:
        (matrix,) = (
            weight.dequantize()[768:]
            for address, weight in llm.engine.model.addressed().items()
            if address == "layers.4.gate_up"
        )
    scales = matrix.abs().amax(1, keepdim=True) / 7.5
    error = (matrix / scales).round().clamp(-8, 7) * scales - matrix
    for each in (error, torch.randn(matrix.shape, generator=torch.Generator().manual_seed(0))):
        squares = torch.linalg.svdvals(each).square()
        assert squares[:64].sum() < squares.sum() / 2


def test_merged_and_unmerged_answers_are_the_same():
    merged = [line.split(":", 1)[1].strip() for line in lesson.printed.splitlines() if line.startswith("merged: ")]
    unmerged = [line.split(":", 1)[1].strip() for line in lesson.printed.splitlines() if line.startswith("unmerged:")]
    assert merged == unmerged and merged[0].startswith("Ahoy!")
    assert "the pirate's answer is that of the merged model: True" in lesson.printed


def test_the_pirate_was_trained_as_the_words_say():
    lesson.says("It is a LoRA too, of rank 3 on all layers, trained for 400 steps on other conversations")
    with adapting.engine() as llm:
        found = read_adapter(adapting.ADAPTERS / "pirate", llm.model_config)
        assert found.rank == 3 and len(found.parts) == 7 * llm.model_config.num_layers
    assert '"pirate": Lesson(pirate, 400, ' in (DATA / "train_adapters.py").read_text(encoding="utf-8")


def test_cells_load_adapters_so_that_they_can_run_again():
    (source,) = build.sources(["15"])
    assert "llm.engine.load_adapter" not in source.read_text(encoding="utf-8")


def test_merging_loses_more_of_a_small_change():
    lesson.says("The pirate's change is large, so it loses only 1%.", "a change of 1% of $W$ would lose a sixth")
    assert lesson.number(r"^the pirate's change of one matrix: (\d+)% of the matrix$") == 19
    error, part = lesson.numbers(r"^rounding the sum: ([\d.]+)% of the matrix, (\d+)% of the change$")
    assert part == 1 and error == pytest.approx(100 / 6 / 100, abs=0.02)
    with adapting.engine() as llm:
        weights = llm.engine.model.addressed()["layers.4.gate_up"].dequantize()[768:]
        change = adapting.product(adapting.ADAPTERS / "pirate", "model.layers.4.mlp.up_proj", llm).double()
    small = change * (0.01 * weights.norm() / change.norm())
    lost = (weights + small).bfloat16().double() - weights - small
    assert (lost.norm() / small.norm()).item() == pytest.approx(1 / 6, abs=0.02)


def test_what_gemma_reads():
    lesson.says(
        "rank 16 on all seven matrices of its 18 layers, a batch of 64 tokens",
        "it costs another copy of all layers each time (4 of the 5 GB)",
        "Even the factors of 64 adapters are only half the size of the model",
        "Merged rises from 5 to more than 250. By token is constant, at 7.5. Grouped rises from 5 to 7.5",
    )
    config = PRESETS["gemma-2b"]
    assert config.num_layers == 18
    shapes = adapting.matrices(config)
    assert len(shapes) == 7 * 18
    matrices, factors = sum(o * i for o, i in shapes), sum(16 * (o + i) for o, i in shapes)
    model = 2e-9 * (matrices + config.vocab_size * config.hidden_size)
    assert round(2e-9 * matrices) == 4 and round(model) == 5
    gb, one, share = lesson.numbers(r"^the model: ([\d.]+) GB; one adapter: ([\d.]+) GB, ([\d.]+)% of it$")
    assert (gb, one) == (round(model, 2), round(2e-9 * factors, 3)) and share == round(200e-9 * factors / model, 1)
    for count in (1, 2, 4, 8, 16, 32, 64):
        printed = lesson.numbers(rf"^ +{count} +([\d.]+) +([\d.]+) +([\d.]+)$")
        merged = 2e-9 * (count * matrices + config.vocab_size * config.hidden_size)
        grouped = [model + 2e-9 * factors * each for each in (64, count)]
        assert printed == pytest.approx((merged, *grouped), abs=0.006)
    assert lesson.number(r"^64 adapters, grouped: predicted .*, computed ([\d.]+) times the model$") == 1.5


def test_one_batch_serves_two_adapters_and_the_model():
    for name, begins in (("pirate ", "Ahoy!"), ("crier ", "Hear ye!")):
        assert any(line.startswith(name) and begins in line for line in lesson.printed.splitlines())
    assert "for all three; the grouped product is yours" in lesson.printed


def test_an_adapted_row_makes_all_calls_of_its_step():
    lesson.says("The model has 6 layers, and in each of them the engine has four matrices")
    assert lesson.number(r"^no request has one: +(\d+) calls a step$") == 0
    assert lesson.number(r"^one of eight has one: predicted .*, measured (\d+) calls a step$") == 24
    assert lesson.number(r"^eight have four of them: +(\d+) calls a step$") == 24


def test_the_planted_keys_serve_what_another_adapter_has_cached():
    lesson.says("These answers are to requests *without* an adapter.")
    wrong = [line for line in lesson.printed.splitlines() if "tokens from the cache: " in line]
    assert len(wrong) == 3 and all(int(line.split()[0]) >= 8 for line in wrong)
    renamed = [line for line in lesson.printed.splitlines() if "tokens cached, not " in line]
    assert len(renamed) == 3
    for line in renamed:
        cached, usual = line.split(" tokens cached, not ")
        assert int(cached) >= 8 > int(usual.split(":")[0])
    assert "the keys: yours" in lesson.printed and "as if it had been loaded alone: True" in lesson.printed


def test_a_planted_key_changes_an_answer():
    """A wrong key must not be harmless, or the lesson shows nothing."""
    lesson.says("One is even the same, one says the same in other words, and one has not stopped after 40 tokens.")
    answers = [line.split(": ", 1)[1] for line in lesson.printed.splitlines() if "tokens from the cache: " in line]
    rights = [line.split("right: ", 1)[1] for line in lesson.printed.splitlines() if line.startswith(" " * 22 + " ri")]
    assert len(answers) == 3 and sum(one == other for one, other in zip(answers, rights, strict=False)) == 1
    assert any(len(one) > 90 > 3 * len(other) for one, other in zip(answers, rights, strict=False))


def test_the_soft_prompt_is_the_weaker_pirate():
    lesson.says("The soft prompt has a twentieth of the adapter's numbers, and is the weaker pirate")
    assert "in place of the tokens, the same answer: True" in lesson.printed
    assert lesson.number(r"^a soft prompt: \[16, 256\] = ([\d,]+) numbers$") == 4096
    begun, whole = lesson.numbers(r"^pirate +(\d+) of 24 begin as a pirate's, +(\d+) also end so$")
    soft_begun, soft_whole = lesson.numbers(r"^soft +(\d+) of 24 begin as a pirate's, +(\d+) also end so$")
    assert whole >= 20 and soft_begun > 12 > soft_whole
    with adapting.engine() as llm:
        config = llm.model_config
    assert pytest.approx(sum(3 * (o + i) for o, i in adapting.matrices(config)), rel=0.06) == 4096 * 20
    assert lesson.number(r"^the same question again: (\d+) positions from the cache") >= 16


@pytest.mark.proof
def test_the_soft_prompt_loses_the_question():
    lesson.says("Of its 24 answers, one has the right fact; of the adapter's, all have it.")
    right = dict.fromkeys(("pirate", "soft"), 0)
    with adapting.engine() as llm:
        adapting.load(llm, "pirate", adapting.ADAPTERS / "pirate")
        adapting.load(llm, "soft", adapting.SOFT_PROMPTS / "pirate")
        for question in style.questions()[1]:
            fact = adapting.answer(llm, question)[0].rstrip(".").split()[-1].lower()
            for name in right:
                right[name] += fact in adapting.answer(llm, question, name)[0].lower()
    assert right == {"pirate": 24, "soft": 1}


def test_times_grow_more_than_reads():
    lesson.says(
        "one request with one adapter takes 8% longer, where the reads grow by only 1%",
        "64 requests with 64 adapters take 31% longer, where the reads grow by half",
    )
    rows = {(row["requests"], row["used"]): row["cost"] for row in records.read("h200/adapter-speed")["results"]}
    assert (round(rows[1, 1], 2), round(rows[64, 64], 2)) == (0.08, 0.31)
    assert lesson.number(r"^the model: .* GB, ([\d.]+)% of it$") == 0.8
    assert lesson.number(r"^64 adapters, grouped: predicted .*, computed ([\d.]+) times the model$") == 1.5
