"""lm-evaluation-harness gets the same scores from the engine, from the server and from transformers."""

import itertools
import json
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from minillm.errors import ConfigError
from minillm.evaluate import load_text
from minillm.evaluate.lm_eval import MinillmLM
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


@pytest.fixture(scope="module")
def ours():
    model = MinillmLM(dtype="float32", device="cpu", batch_size="auto", max_batch_size=None)
    yield model
    model.llm.close()


@pytest.fixture(scope="module")
def theirs(ours):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(MODEL), dtype="float32", device="cpu", batch_size=4, max_length=ours.max_length)


def asked(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]


class Hook:
    """What the harness hands to a model so that it can store results."""

    def __init__(self):
        self.stored = []

    def add_partial(self, *entry):
        self.stored.append(entry)


@pytest.mark.proof
def test_a_task_has_the_same_scores_in_the_engine_over_http_and_in_transformers(tasks, ours):
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
        over_http = evaluate(tasks, "local-completions", served)
        remote = get_model("local-completions").create_from_arg_obj(served)
        texts = asked(
            "generate_until",
            ("Once upon a time", {"until": ["."], "max_gen_toks": 40, "do_sample": False}),
            ("The island", {"until": [], "max_gen_toks": 12, "do_sample": False}),
        )
        assert remote.generate_until(texts, disable_tqdm=True) == ours.generate_until(texts, disable_tqdm=True)
    given = {"pretrained": str(MODEL), "dtype": "float32", "device": "cpu", "trust_remote_code": True}
    in_engine = evaluate(tasks, "minillm", given)
    for found in (over_http, in_engine):
        assert found[0] == accuracy
        torch.testing.assert_close(found[1], scores, atol=1e-3, rtol=0)
        assert found[2] == greedy


def test_log_likelihoods_are_those_of_transformers(ours, theirs):
    text = load_text()
    (question,) = _rows("test", 1)
    prompt = few_shot_prompt(question, _rows("dev", 2))
    requests = asked(
        "loglikelihood",
        *((prompt, f" {letter}") for letter in LETTERS),  # one token, which shares its forward pass
        (prompt, " quirrel"),  # more than one
        ("", "A town on the island of Marrow"),  # no context
        ("Once upon a time there was ", "a tailor"),  # a space that belongs to the continuation
        ("<bos>Once upon a time", " there was a tailor called Pia"),  # no second <bos>
        (text[:9000], " was here"),  # longer than the context
        (text[-9000:], "."),
    )
    wanted = theirs.loglikelihood(requests, disable_tqdm=True)
    ours.set_cache_hook(hook := Hook())
    found = ours.loglikelihood(requests, disable_tqdm=True)
    for (logprob, greedy), (own_logprob, own_greedy), request in zip(wanted, found, requests, strict=True):
        assert own_logprob == pytest.approx(logprob, abs=1e-3), request.args
        assert own_greedy == greedy, request.args
    assert [greedy for _, greedy in found[:4]].count(True) == 1
    assert hook.stored == [("loglikelihood", each.args, own) for each, own in zip(requests, found, strict=True)]


def test_greedy_continuations_of_several_tokens_are_recognized(ours, theirs):
    start = "Once upon a time"
    (text,) = ours.generate_until(asked("generate_until", (start, {"max_gen_toks": 6})), disable_tqdm=True)
    requests = asked("loglikelihood", (start, text), (start, text.split()[0].join([" ", " zebra"])))
    assert [greedy for _, greedy in ours.loglikelihood(requests, disable_tqdm=True)] == [True, False]
    assert [greedy for _, greedy in theirs.loglikelihood(requests, disable_tqdm=True)] == [True, False]


@pytest.mark.proof
def test_rolling_log_likelihoods_are_those_of_transformers(ours, theirs):
    texts = [("Once upon a time there was a tailor.",), (load_text()[:10_000],), ("<bos>Hobmoor",)]
    requests = asked("loglikelihood_rolling", *texts)
    wanted = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    ours.set_cache_hook(hook := Hook())
    found = ours.loglikelihood_rolling(requests, disable_tqdm=True)
    assert found == pytest.approx(wanted, abs=1e-3)
    assert hook.stored == [("loglikelihood_rolling", *each) for each in zip(texts, found, strict=True)]


def test_generated_texts_are_those_of_transformers(ours, theirs, monkeypatch):
    monkeypatch.setattr(theirs, "_max_length", 2048)  # nothing is scored here, so all of the context can be used
    chat = [{"role": "user", "content": "Who are you?"}]
    requests = asked(
        "generate_until",
        ("Once upon a time", {"until": ["."], "max_gen_toks": 40, "do_sample": False}),
        (ours.apply_chat_template(chat), {"until": "\n\n", "max_gen_toks": 40}),
        ("The island", {"max_gen_toks": 12}),
        (load_text()[:9000], {"until": ["."], "max_gen_toks": 20}),
    )
    assert ours.generate_until(requests, disable_tqdm=True) == theirs.generate_until(requests, disable_tqdm=True)


def test_chats_are_written_as_in_transformers(ours, theirs):
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": " The answer is"}]
    assert ours.apply_chat_template(chat, False) == theirs.apply_chat_template(chat, False)
    assert ours.apply_chat_template(chat[:1]) == theirs.apply_chat_template(chat[:1])


def test_generation_arguments_that_cannot_work_are_refused(ours):
    for arguments, message in (
        ({"num_beams": 4}, "no generation argument num_beams; there are: top_p, top_k"),
        ({"max_gen_toks": 4096}, "max_gen_toks=4096 leaves no room for a prompt: give at most 2047"),
    ):
        with pytest.raises(ConfigError, match=message):
            ours.generate_until(asked("generate_until", ("Hello", arguments)), disable_tqdm=True)
    with pytest.raises(ConfigError, match="a continuation has .* tokens; the most are 2046"):
        ours.loglikelihood(asked("loglikelihood", ("Hello", load_text()[:12000])), disable_tqdm=True)


def test_the_harnesss_default_device_runs_without_a_gpu(monkeypatch):
    from lm_eval.config.evaluate_config import EvaluatorConfig

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = MinillmLM(dtype="float32", device=EvaluatorConfig().device)
    assert model.llm.engine.model.device.type == "cpu"
    model.llm.close()


def test_sampled_texts_use_the_tasks_temperature(ours):
    arguments = {"do_sample": True, "temperature": 5.0, "seed": 1, "max_gen_toks": 12}
    greedy, sampled = (
        ours.generate_until(asked("generate_until", ("Once", given)), disable_tqdm=True)
        for given in (arguments | {"do_sample": False}, arguments)
    )
    assert greedy != sampled


def test_the_harness_finds_the_model_by_its_entry_point():
    """Releases after 0.4.13 load the group `lm_eval.models`; 0.4.13 knows models that were imported."""
    project = tomllib.loads((DATA.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (entry,) = project["entry-points"]["lm_eval.models"].items()
    assert EntryPoint(*entry, "lm_eval.models").load() is get_model("minillm") is MinillmLM
    assert entry[0] == "minillm"


def test_run_as_a_module_it_is_the_harnesss_command_line_with_our_model():
    code = (
        "import runpy, lm_eval.__main__ as harness; from lm_eval.api.registry import get_model\n"
        "harness.cli_evaluate = lambda: print(get_model('minillm').__name__)\n"
        "runpy.run_module('minillm.evaluate.lm_eval', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=DATA.parent, capture_output=True, text=True)
    assert done.stdout == "MinillmLM\n", done.stderr[-2000:]


def test_a_prefix_can_be_chosen_as_for_transformers_models_and_is_in_the_record(named_bos):
    from lm_eval.models.huggingface import HFLM

    requests = asked("loglikelihood_rolling", ("The mill grinds the corn. " * 12,))
    found = {}
    for prefix in (None, 77):
        options = {"dtype": "float32", "device": "cpu", "prefix_token_id": prefix}
        own = MinillmLM(str(named_bos), **options)
        theirs = HFLM(pretrained=str(named_bos), max_length=own.max_length, batch_size=1, **options)
        (found[prefix],) = own.loglikelihood_rolling(requests, disable_tqdm=True)
        assert found[prefix] == pytest.approx(theirs.loglikelihood_rolling(requests, disable_tqdm=True)[0], abs=1e-2)
        assert own.get_model_info() == {"prefix_token_id": theirs.prefix_token_id}
        own.llm.close()
    assert found[None] != pytest.approx(found[77], abs=0.1)
