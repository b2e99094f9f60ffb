"""Servers of others are measured as exactly as they allow, and remote ones only when the user says so."""

import json

import pytest

from minillm.bench import records, serve, targets
from minillm.errors import ConfigError
from tests.bench.fake import Fake, at_once, faked


class Foreign(Fake):
    """OpenAI's fields only: text in events, and usage at the end if it is asked for. It ends answers when it likes."""

    card = {"id": "theirs", "owned_by": "someone"}
    events, spoken = 3, 7

    def chunks(self, body):
        chunks = [{"choices": [{"text": " word"}]} for _ in range(self.events)]
        if body.get("stream_options") == {"include_usage": True}:
            chunks.append({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": self.spoken}})
        return chunks


class Exact(Fake):
    """As vLLM: it knows the fields that make lengths exact, but its card names no vocabulary."""

    card = {"id": "theirs", "owned_by": "vllm"}

    def chunks(self, body):
        assert body["ignore_eos"] and body["return_token_ids"]
        return super().chunks(body)


async def strict(fake, before, body):
    """Only known fields are taken, and only text."""
    return 400 if "ignore_eos" in body or not isinstance(body["prompt"], str) else 200


async def plainest(fake, before, body):
    return 422 if "stream_options" in body or not isinstance(body["prompt"], str) else 200


async def never(fake, before, body):
    return 500


def test_tokens_of_a_server_without_ids_are_counted_by_its_usage():
    with faked(at_once, Foreign) as (url, fake):
        result = serve.run(url, workload="chat", requests=4, concurrency=2, quiet=True)["results"][0]
    assert (result["engine"], result["model"], result["tokens_counted_by"]) == ("someone", "theirs", "usage")
    assert result["exact_lengths"] is False and result["prompts"] == "token ids"
    assert (result["output_tokens"], result["input_tokens"]) == (4 * 7, 4 * 11)
    assert result["tokens_per_event"] == pytest.approx(7 / 3, abs=1e-4)
    assert all(isinstance(body["prompt"], list) for body in fake.bodies)


def test_a_server_that_gives_ids_is_held_to_exact_lengths():
    with faked(at_once, Exact) as (url, fake):
        result = serve.run(url, workload="chat", requests=4, concurrency=2, quiet=True)["results"][0]
    assert (result["engine"], result["tokens_counted_by"]) == ("vllm", "ids") and "exact_lengths" not in result
    assert result["output_tokens"] == 4 * 16
    assert all(max(body["prompt"]) < targets.VOCABULARY for body in fake.bodies)


def test_fields_of_sampling_are_in_each_request_and_in_the_record():
    with faked(strict, Foreign) as (url, fake):
        asked = {"top_p": 0.5, "logprobs": 2}
        result = serve.run(url, workload="chat", requests=2, concurrency=1, sampling=asked, quiet=True)["results"][0]
    assert result["sampling"] == asked and all(asked.items() <= body.items() for body in fake.bodies[-2:])
    with pytest.raises(ConfigError, match="sampling cannot set max_tokens, prompt"):
        serve.run(url, sampling={"prompt": "x", "max_tokens": 1})
    with pytest.raises(ConfigError, match="sampling cannot set stop"):
        serve.run(url, sampling={"stop": "x"})
    with pytest.raises(ConfigError, match="an object of fields"):
        serve.run(url, sampling=[0.5])


def test_a_server_that_takes_only_text_and_known_fields_is_asked_so():
    with faked(strict, Foreign) as (url, fake):
        result = serve.run(url, workload="chat", requests=2, concurrency=1, quiet=True)["results"][0]
    assert result["prompts"] == "words" and result["tokens_counted_by"] == "usage"
    taken = fake.bodies[-1]
    assert set(taken) == {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    assert len(taken["prompt"].split()) == 16


def test_without_usage_every_event_counts_as_a_token():
    with faked(plainest, Foreign) as (url, _):
        result = serve.run(url, workload="chat", requests=2, concurrency=1, quiet=True)["results"][0]
    assert (result["tokens_counted_by"], result["output_tokens"], result["tokens_per_event"]) == ("events", 6, 1)


def test_a_server_that_takes_no_request_is_a_clear_error():
    with faked(never, Foreign) as (url, _), pytest.raises(serve.LoadError, match="answers no request .* status 500"):
        serve.run(url, quiet=True)


def test_a_model_can_be_named_and_a_key_is_sent_but_not_recorded(monkeypatch):
    monkeypatch.setattr("sys.argv", ["minillm", "bench", "serve", "--api-key", "s3cret", "--model", "other"])
    with faked(at_once) as (url, fake):
        record = serve.run(url, model="other", api_key="s3cret", workload="single", requests=1, quiet=True)
    assert {body["model"] for body in fake.bodies} == {"other"}
    assert all("authorization: bearer s3cret" in head for head in fake.heads)
    assert "s3cret" not in json.dumps(record)
    assert record["command"] == "minillm bench serve --api-key ... --model other"


def test_a_key_after_an_equals_sign_is_not_recorded_either():
    assert records._without_keys(["--api-key=s3cret", "--seed=3"]) == ["--api-key=...", "--seed=3"]


def test_several_servers_get_the_same_loads_and_are_compared_with_the_first(capsys, monkeypatch):
    monkeypatch.setattr("minillm.bench.reports.GENERATOR_BUSY", 1.1)  # a busy machine adds no line
    with faked(at_once) as (one, first), faked(at_once) as (other, second):
        record = serve.run([one, other], workload="chat", sweep=[1, 2], requests=4, warmup=0)
    assert [(row["url"], row["concurrency"]) for row in record["results"]] == [
        (one, 1), (other, 1), (one, 2), (other, 2),
    ]  # fmt: skip
    assert [body["prompt"] for body in first.bodies[:4]] == [body["prompt"] for body in second.bodies[:4]]
    sent = [tuple(body["prompt"]) for body in first.bodies]
    assert len(set(sent)) == len(sent) == 12, "no load finds its prompts in a cache"
    alone, compared = record["results"][2:]
    assert "times_first" not in alone
    ratio = compared["output_tokens_per_s"] / alone["output_tokens_per_s"]
    assert compared["times_first"]["output_tokens_per_s"] == pytest.approx(ratio, abs=1e-4)
    assert set(compared["times_first"]) >= {"ttft_s", "e2e_s"}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-2:] == ["vs", "first"] and len(lines) == 1 + 4 + 1


@pytest.mark.parametrize("url", ["http://example.com", "https://api.example.com/v1", "http://10.0.0.1:8000"])
def test_another_machine_is_measured_only_when_allowed(url):
    with pytest.raises(ConfigError, match="allow_remote"):
        targets.address(url)
    assert targets.address(url, allow_remote=True) == url.removesuffix("/v1")


@pytest.mark.parametrize("url", ["ftp://example.com", "example.com", "http://", "file:///etc/passwd"])
def test_what_is_no_servers_url_is_refused_even_then(url):
    with pytest.raises(ConfigError, match="is no server's URL"):
        targets.address(url, allow_remote=True)


def test_a_password_in_the_url_is_refused():
    with pytest.raises(ConfigError, match="pass a key as api_key"):
        targets.address("http://me:secret@127.0.0.1:8000")


class Elsewhere(Fake):
    async def answer(self, writer, status, text):
        writer.write(b"HTTP/1.1 302 -\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n")
        writer.close()


def test_a_redirection_to_another_machine_is_not_followed():
    with faked(at_once, Elsewhere) as (url, _), pytest.raises(serve.LoadError, match="answered with status 302"):
        serve.run(url, quiet=True)


class Bare(Fake):
    card = None


def test_a_server_without_a_model_is_a_clear_error():
    with faked(at_once, Bare) as (url, _), pytest.raises(serve.LoadError, match="did not answer with a list of models"):
        serve.run(url, quiet=True)
