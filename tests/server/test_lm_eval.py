"""lm-evaluation-harness gives the server the same scores as the same model in transformers."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from minillm.evaluate.prompts import LETTERS, few_shot_prompt
from minillm.server import running

DATA = Path(__file__).resolve().parents[2] / "data"
MODEL = DATA / "tiny-gemma"
QUESTIONS = 30
TASK = """\
task: isles
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: ["A", "B", "C", "D"]
doc_to_target: answer
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A harness task over some of the embedded questions, with two examples each."""
    folder = tmp_path_factory.mktemp("tasks")
    examples = _rows("dev", 2)
    rows = [
        {"prompt": few_shot_prompt(row, examples), "answer": LETTERS[row["answer"]]} for row in _rows("test", QUESTIONS)
    ]
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "isles.yaml").write_text(TASK.format(file=file), encoding="utf-8")
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(folder), include_defaults=False)


def _rows(split: str, count: int) -> list[dict]:
    with (DATA / "questions" / f"{split}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in itertools.islice(file, count)]


def evaluate(tasks, model: str, arguments: dict):
    """The harness's results: (accuracy, log-likelihood and is-greedy flag of each option)."""
    import lm_eval

    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=["isles"], task_manager=tasks, bootstrap_iters=0, log_samples=True
    )
    samples = sorted(found["samples"]["isles"], key=lambda sample: sample["doc_id"])
    scores = [[float(value) for value, _ in sample["filtered_resps"]] for sample in samples]
    greedy = [[flag in (True, "True") for _, flag in sample["filtered_resps"]] for sample in samples]
    return found["results"]["isles"]["acc,none"], torch.tensor(scores), greedy


def test_a_task_has_the_same_scores_over_http_and_in_transformers(tasks):
    reference = {"pretrained": str(MODEL), "dtype": "float32", "device": "cpu", "batch_size": 4}
    accuracy, scores, greedy = evaluate(tasks, "hf", reference)
    assert scores.shape == (QUESTIONS, 4)
    assert accuracy > 0.5 and any(map(any, greedy)), "the task cannot distinguish a good server from a bad one"
    with running(MODEL, device="cpu", dtype="float32") as server:
        served = {
            "model": server.model,
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": str(MODEL),
            "tokenizer_backend": "huggingface",
            "add_bos_token": True,
            "num_concurrent": 4,
            "batch_size": 3,
            "max_length": 2048,
        }
        ours = evaluate(tasks, "local-completions", served)
    assert ours[0] == accuracy
    torch.testing.assert_close(ours[1], scores, atol=1e-3, rtol=0)
    assert ours[2] == greedy
