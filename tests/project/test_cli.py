"""The command line starts quickly, offers all engine options, and reports errors in one line."""

import errno
import json
import logging
import re
import subprocess
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from minillm import SamplingParams, Tokenizer, cli
from minillm.bench.ablation import torch_attention
from minillm.cli import options
from minillm.config import EngineConfig
from minillm.engine.inputs import chat_prompt
from minillm.errors import ConfigError
from minillm.from_vllm import command_line
from minillm.model.loader import EMBEDDED


def run(*arguments: str):
    return CliRunner().invoke(cli.app, list(arguments))


def test_help_does_not_import_torch():
    code = "import sys, minillm.cli; print([m for m in ('torch', 'transformers', 'fastapi') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_describes_every_command_in_a_sentence():
    text = run("--help").stdout
    for command in ("generate", "serve", "bench", "course", "eval", "doctor"):
        line = next(line for line in text.splitlines() if line.split()[:1] == [command])
        assert line.rstrip().endswith((".", ")"))


@pytest.mark.parametrize("command", [("generate",), ("serve",), ("bench", "offline"), ("eval",)])
def test_every_engine_option_is_offered_and_explained(command):
    text = run(*command, "--help").stdout
    for field in fields(EngineConfig):
        assert field.metadata.get("flag", "--" + field.name.replace("_", "-")) in text
        words = field.metadata["help"].split()
        assert len(words) > 2 and " ".join(words[1:]) in " ".join(text.split()), field.name


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a", None, "b"), "b: No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "a"), "a: Permission denied"),
        (OSError(errno.EROFS, "Read-only file system", "a"), "a: Read-only file system"),
        (OSError("Not enough disk space. Needed: 3 MB"), "Not enough disk space. Needed: 3 MB"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "[Errno 111] Connection refused"),
        (ConfigError("block_size must be positive"), "block_size must be positive"),
    ],
)
def test_an_error_of_the_machine_or_of_the_user_is_one_line(error, message, capsys):
    with pytest.raises(typer.Exit) as ended, options.friendly_errors():
        raise error
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err == f"minillm: {message}\n"


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "No such file", "x"), ValueError("a bug")])
def test_a_bug_keeps_its_traceback(error):
    with pytest.raises(type(error)), options.friendly_errors():
        raise error


def test_only_the_options_that_were_set_reach_the_server(monkeypatch):
    seen = {}
    monkeypatch.setattr("minillm.server.serve", lambda model, **options: seen.update(options, model=model))
    result = run("serve", "--model", "somewhere", "--max-num-seqs", "7", "--no-enable-prefix-caching")
    assert result.exit_code == 0, result.output
    fixed = {"host": "127.0.0.1", "port": 8000, "served_model_name": None, "profile": None}
    assert seen == fixed | {"model": "somewhere", "max_num_seqs": 7, "enable_prefix_caching": False}


def test_the_served_name_reaches_the_server(monkeypatch):
    seen = []
    monkeypatch.setattr("minillm.server.serve", lambda model, **options: seen.append(options["served_model_name"]))
    assert run("serve", "--served-model-name", "mine").exit_code == 0
    assert seen == ["mine"]


@pytest.mark.parametrize("words", [["somewhere"], ["--model", "somewhere"], ["somewhere", "-m", "somewhere"]])
def test_serve_takes_its_model_with_or_without_the_option(monkeypatch, words):
    seen = []
    monkeypatch.setattr("minillm.server.serve", lambda model, **options: seen.append(model))
    assert run("serve", *words).exit_code == 0
    assert seen == ["somewhere"]


def test_the_key_of_a_server_may_be_in_the_environment(monkeypatch):
    seen = []
    monkeypatch.setattr("minillm.server.serve", lambda model, **options: seen.append(options.get("api_key")))
    for words in ([], ["--api-key", "from-the-option"]):
        assert run("serve", *words).exit_code == 0
    monkeypatch.setenv("MINILLM_API_KEY", "from-the-environment")
    assert run("serve").exit_code == 0
    assert seen == [None, "from-the-option", "from-the-environment"]


def test_two_models_to_serve_are_refused(monkeypatch):
    monkeypatch.setattr("minillm.server.serve", lambda model, **options: pytest.fail("it serves one of them"))
    result = run("serve", "one", "--model", "another")
    assert result.exit_code == 2 and "given twice, as 'one' and as 'another'" in result.output


def test_a_commands_log_goes_to_stdout_and_its_warnings_to_stderr(capsys):
    log = logging.getLogger("minillm.server.serving")
    for _ in range(2):  # the second call adds no second handler
        cli.show_logs("error")
    log.info("it serves")
    log.warning("a worker ended")
    log.error("no worker is left")
    found = capsys.readouterr()
    assert (found.out, found.err) == ("it serves\n", "minillm: no worker is left\n")


def test_bench_offline_passes_its_options_on(monkeypatch):
    seen = {}
    monkeypatch.setattr("minillm.bench.offline.run", lambda model, **options: seen.update(options, model=model))
    result = run("bench", "offline", "--workload", "mixed", "--scale", "8", "--block-size", "32")
    assert result.exit_code == 0, result.output
    assert seen["workload"] == ["mixed"]
    assert (seen["scale"], seen["block_size"], seen["model"]) == (8, 32, None)
    assert "max_num_seqs" not in seen


def test_eval_prints_a_line_per_result_and_then_the_record_it_writes(monkeypatch, tmp_path):
    def quality(llm, limit, measured):
        assert limit == 3 and measured is None and str(llm.engine.model.dtype) == "torch.float64"
        yield {"workload": "questions", "accuracy": 0.5, "seconds": 1.0}
        yield {"workload": "text", "perplexity": 2.25, "seconds": 2.0}

    monkeypatch.setattr("minillm.evaluate.quality", quality)
    monkeypatch.setenv("MINILLM_COMMIT", "abc")  # needed where there is no git history
    path = tmp_path / "quality.json"
    result = run("eval", "--limit", "3", "--dtype", "float64", "--json", str(path))
    assert result.exit_code == 0, result.output
    first, second, last = result.stdout.splitlines()
    assert first.split() == ["questions", "accuracy", "0.5", "1.0", "s"]
    assert second.split() == ["text", "perplexity", "2.25", "2.0", "s"]
    record = json.loads(last)
    assert record == json.loads(path.read_text("utf-8"))
    assert record["model"] == "tiny-gemma" and len(record["results"]) == 2 and record["commit"]


def test_eval_asks_the_tasks_that_are_named(monkeypatch):
    def quality(llm, limit, measured):
        yield {"workload": "+".join(measured), "accuracy": 0.5, "seconds": 1.0}

    monkeypatch.setattr("minillm.evaluate.workloads", lambda names: names)
    monkeypatch.setattr("minillm.evaluate.quality", quality)
    assert run("eval", "--tasks", "mmlu_law,isles").stdout.startswith("mmlu_law+isles ")


def test_eval_compare_prints_a_table_and_then_the_record(monkeypatch):
    def compare(names, model, **options):
        assert (names, model) == (["int8", "awq-g64", "some/dir"], None)
        assert options == {"limit": 5, "seeds": 2, "task": "mmlu", "dtype": "float32"}
        row = {
            "quantization": "int8",
            "bytes": 6_684_832,
            "perplexity": 1.92065,
            "kl": 1.3201e-05,
            "accuracy": 0.89,
            "loss_points": 0.25,
            "loss_interval": [-0.84, 1.34],
            "seconds": 9.4,
            "simulated": False,
        }
        yield row
        yield row | {"quantization": "nvfp4", "simulated": True}

    monkeypatch.setattr("minillm.evaluate.compare", compare)
    words = ["--compare", "int8,awq-g64", "some/dir", "--limit", "5", "--seeds", "2", "--tasks", "mmlu"]
    result = run("eval", *words, "--dtype", "float32")
    assert result.exit_code == 0, result.output
    _, head, row, fp4, last = result.stdout.splitlines()
    assert fp4.split()[0] == "nvfp4" and fp4.split()[-2:] == ["s", "simulated"]
    assert head.split() == ["method", "bytes", "perplexity", "float32", "accuracy", "lost", "of", "the", "loss"]
    assert row.split() == ["int8", "6,684,832", "1.9206", "1.3e-05", "89.00%", "0.25", "-0.84", "to", "1.34", "9", "s"]
    assert json.loads(last)["results"][0]["quantization"] == "int8"


@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "tiny-gemma"),
        ("eval", "--seeds", "5"),
        ("eval", "--compare", "int3"),
        ("eval", "--compare", "--tasks", "isles,mmlu"),
        ("eval", "--streaming", "--compare"),
        ("eval", "--tasks", "nothing"),
        ("eval", "--model", "no/such/directory"),
        ("eval", "--model", "gemma-2b", "--load-format", "no"),
        ("generate", "hello", "--model", "no/such/directory"),
        ("generate", "hello", "--temperature", "-1"),
        ("generate", "hello", "--block-size", "0"),
        ("bench", "offline", "--workload", "nothing"),
        ("bench", "serve", "--url", "DEAD_URL", "--requests", "1"),
        ("bench", "serve", "--rate", "nan"),
        ("bench", "serve", "--rate", "4", "--speed", "2"),
        ("bench", "serve", "--plot", "picture.txt"),
        ("bench", "serve", "--json", "pyproject.toml/record.json"),
        ("course", "grade", "no/such/folder"),
        ("course", "grade", "docs"),
        ("course", "grade", "notebooks", "--time-limit", "nan"),
        ("course", "export", "docs"),
    ],
)
def test_a_user_error_is_reported_in_one_line(arguments, dead_url):
    result = run(*(dead_url if each == "DEAD_URL" else each for each in arguments))
    assert result.exit_code == 2
    assert result.stderr.startswith("minillm: ")
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.output


@pytest.mark.parametrize("given", ["null", "[0.5]", "{top_p", ""])
def test_sampling_that_is_no_object_is_refused_before_anything_is_sent(given, dead_url):
    result = run("bench", "serve", "--url", dead_url, "--sampling", given)
    assert result.exit_code == 2 and "--sampling takes a JSON object" in result.stderr


def test_a_missing_package_points_to_the_doctor(monkeypatch):
    def absent(*arguments, **options):
        raise ModuleNotFoundError("No module named 'fastapi'")

    monkeypatch.setattr("minillm.server.serve", absent)
    result = run("serve")
    assert result.exit_code == 2
    assert "fastapi" in result.stderr
    assert "minillm doctor" in result.stderr


def test_an_internal_error_keeps_its_traceback(monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("a bug")

    monkeypatch.setattr("minillm.server.serve", broken)
    assert isinstance(run("serve").exception, RuntimeError)


def test_a_built_in_exception_counts_as_a_bug_even_if_minillm_raises_it(monkeypatch):
    def broken(*arguments, **options):
        torch_attention(SimpleNamespace(shape=(1, 2, 1, 1)), None, None, None)

    monkeypatch.setattr("minillm.server.serve", broken)
    assert isinstance(run("serve").exception, ValueError)


class Asked:
    """An `LLM` that only notes what it is asked for."""

    prompts: list
    params: SamplingParams

    def __init__(self, model, tokenizer=None, **options):
        self.tokenizer = Tokenizer.from_pretrained(EMBEDDED)

    def __enter__(self):
        return self

    def __exit__(self, *exception): ...

    def generate(self, prompts, params):
        Asked.prompts, Asked.params = prompts, params
        return [SimpleNamespace(text="well")]


def test_generate_samples_as_its_options_say(monkeypatch):
    monkeypatch.setattr("minillm.LLM", Asked)
    options = {"max_tokens": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.25}
    words = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]
    assert run("generate", "a", *words, "--stop", "x", "--stop", "yz").stdout == "well\n"
    assert Asked.params == SamplingParams(**options, stop=("x", "yz"))


def test_a_chat_on_the_command_line_has_one_beginning_of_text(monkeypatch):
    monkeypatch.setattr("minillm.LLM", Asked)
    assert run("generate", "Who are you?", "--chat").exit_code == 0
    (ids,) = Asked.prompts
    tokenizer = Asked(None).tokenizer
    assert ids == chat_prompt(tokenizer, [{"role": "user", "content": "Who are you?"}])
    assert ids.count(tokenizer.bos_token_id) == 1


def test_a_chat_with_a_model_that_has_no_chat_template_is_refused_before_its_weights_are_read(monkeypatch, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((EMBEDDED / name).read_bytes())
    monkeypatch.setattr("minillm.runner.executor.load_model", lambda *_, **__: pytest.fail("weights are read"))
    done = run("generate", "Who are you?", "--chat", "--model", str(tmp_path))
    assert done.exit_code == 2 and "this tokenizer has no chat template" in done.stderr
    (tmp_path / "tokenizer.json").unlink()
    done = run("generate", "Who are you?", "--chat", "--model", str(tmp_path))
    assert done.exit_code == 2 and "this model has no tokenizer files" in done.stderr


@pytest.mark.parametrize("chat", [False, True])
def test_generate_prints_the_completion_streamed_or_not(chat):
    prompt = ["Who are you?"] if chat else ["The island of"]
    arguments = ["generate", *prompt, "--max-tokens", "12", *(["--chat"] if chat else [])]
    whole, streamed = run(*arguments), run(*arguments, "--stream")
    assert whole.exit_code == 0, whole.output
    assert whole.stdout.strip()
    assert streamed.stdout == whole.stdout


def translate(text: str, command: type = command_line.Serve) -> str:
    known = {
        f"--{name}"
        for name in ("max-model-len", "workers", "policy", "quantization", "url", "requests", "rate", "api-key")
    }
    return " ".join(command_line.translated(text.split(), known | {"-m"}, command.missing, command.names))


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("DIR --max_model_len 64 -m x", "DIR --max-model-len=64 -m x"),
        ("DIR --max-model-len -1", "DIR --max-model-len=-1"),
        (
            "DIR --tensor-parallel-size 1 -tp 2 -pp=1 -dcp 2 --swap-space 4",
            "DIR --tensor-parallel-size 1 --tensor-parallel-size 2 --pipeline-parallel-size=1 "
            "--decode-context-parallel-size 2",
        ),
        ("--trust-remote-code DIR --disable-log-requests --enable_chunked_prefill", "DIR"),
        ("DIR --no-enable-lora --no-enable-log-requests -O3 --calculate-kv-scales", "DIR"),
        ("DIR -O 3 -O.level=3 -q fp8", "DIR --quantization fp8"),
        ("DIR --max-model-len 8k --max_model_len=1.5K", "DIR --max-model-len=8000 --max-model-len=1536"),
        ("DIR --max-model-len auto --max-model-len 9x", "DIR --max-model-len=-1 --max-model-len=9x"),
        ("DIR --api-server-count 4 --scheduling-policy=priority", "DIR --workers 4 --policy=priority"),
        ("DIR --other_option 1 -- --tensor-parallel-size 2", "DIR --other-option 1 -- --tensor-parallel-size 2"),
    ],
)
def test_serve_takes_vllms_options_that_ask_for_nothing(given, ours):
    assert translate(given) == ours


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("-dp 2", "start one engine for each"),
        ("--enable-lora", "give --adapter"),
        ("--no-enable-chunked-prefill", "--policy whole runs"),
        ("--compilation-config 3", "--enforce-eager turns"),
        ("--tokenizer-mode mistral", "that of the model's directory"),
        ("--uvicorn-log-level debug", "use --log-level"),
        ("--tool-call-parser=hermes", "calls no tools"),
    ],
)
def test_other_options_of_vllms_server_say_what_to_do_instead(given, reason):
    with pytest.raises(typer.BadParameter, match=f"minillm has no such option; .*{re.escape(reason)}"):
        translate(given)


def test_options_that_both_have_take_vllms_values(monkeypatch):
    seen = []
    monkeypatch.setattr("minillm.server.serve", lambda model, **given: seen.append(given))
    assert run("serve", "--dtype", "half", "--load-format", "safetensors", "--max-model-len", "auto").exit_code == 0
    assert seen[0]["dtype"] == "float16" and seen[0].get("max_model_len") is None
    result = run("serve", "--quantization", "awq")
    assert result.exit_code == 2 and "quantization='awq': leave it out for a checkpoint that is" in result.stderr


def test_what_serve_says_is_for_the_command_line():
    offered = run("serve", "--help").stdout
    for name, (_, instead) in command_line.SERVE.items():
        if name not in command_line.SERVE_NAMES:
            assert not re.search(r"\w=|LLM|SamplingParams|[a-z]+_[a-z]+ *\(|close", instead), (name, instead)
            for option in re.findall("--[a-z-]+", instead):
                assert option in offered


@pytest.mark.parametrize(
    "words", [["--model", "DIR", "--served-model-name", "m"], ["--served_model_name=m"], ["--model=m"]]
)
def test_bench_serve_asks_for_the_served_name(monkeypatch, words):
    seen = []
    monkeypatch.setattr("minillm.bench.serve.run", lambda url, model, **options: seen.append(model))
    for each in (words, words[::-1] if len(words) == 1 else words[2:] + words[:2]):
        assert run("bench", "serve", *each).exit_code == 0
    assert seen == ["m", "m"]


def test_bench_serve_takes_vllms_names():
    given = "--base-url U --num-prompts 8 --request-rate 2 --backend vllm --ignore-eos --dataset-name random"
    assert translate(given, command_line.BenchServe) == "--url U --requests 8 --rate 2"
    for command, option, reason in (("bench serve", "--goodput", "use --slo"), ("serve", "--ssl-keyfile", "end TLS")):
        result = run(*command.split(), option, "x", "--help")
        assert result.exit_code == 2 and reason in result.stderr, "refused before anything else is read"
    with pytest.raises(typer.BadParameter, match="no such option; use --json FILE"):
        translate("--save-result --num-prompts 8", command_line.BenchServe)


def test_commands_of_vllm_say_what_to_do_instead():
    for name, instead in command_line.COMMANDS.items():
        measures = name in ("throughput", "latency", "startup", "sweep")
        result = run(*(["bench"] if measures else []), name, "--model", "x")
        assert result.exit_code == 2 and f"no such command; {instead}" in " ".join(result.stderr.split())
