"""A step is a message: an engine whose model is in another process gives the same results as one with its own."""

import multiprocessing
import pickle
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from minillm import LLM, SamplingParams
from minillm.config import EngineConfig
from minillm.errors import ConfigError
from minillm.model.loader import EMBEDDED
from minillm.runner.executor import LocalExecutor

from .remote_executor import RemoteExecutor, other_process

TIGHT = {"max_num_seqs": 5, "num_blocks": 14, "block_size": 4, "max_num_batched_tokens": 16, "max_model_len": 48}
STREAMS = {"attention_sinks": 2, "attention_window": 8, "block_size": 4, "max_model_len": 32, "num_blocks": 64}
OPTIONS = {"greedy": {"temperature": 0}, "seeded": {"seed": 3}, "other seed": {"seed": 4, "temperature": 1.5}}
OPTIONS |= {
    "truncated": {"seed": 5, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias": {"temperature": 0, "logit_bias": {7: 4.0}, "min_tokens": 6, "stop_token_ids": list(range(90, 200))},
    "scores": {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
    "grammar": {"temperature": 0, "regex": "[a-d]{3,9}"},
    "ends": {"temperature": 1, "seed": 6, "stop_token_ids": list(range(2, 400))},
}


@pytest.fixture(scope="module")
def pipe():
    with other_process() as pipe:
        yield pipe


@contextmanager
def remote(pipe, monkeypatch, **options):
    with monkeypatch.context() as patch:
        patch.setattr("minillm.engine.engine.LocalExecutor", partial(RemoteExecutor, pipe))
        llm = LLM(device="cpu", cpu_threads=1, run_ahead=2, **options)
    with llm:
        yield llm


@contextmanager
def local(**options):
    with LLM(device="cpu", cpu_threads=1, run_ahead=2, **options) as llm:
        yield llm


def requests():
    """Prompts of several lengths, two with the same beginning, with every kind of sampling options twice."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(300, 4000, length).tolist() for length in (3, 21, 9, 14, 5, 17, 2, 11, 8)] * 2
    return prompts, [SamplingParams(**{"max_tokens": 16, **more}) for more in (*OPTIONS.values(), *OPTIONS.values())]


def outcome(done):
    return done.token_ids, done.text, done.finish_reason, done.stop_reason, done.logprobs, done.prompt_logprobs


def test_the_results_of_steps_in_another_process_are_the_engines_own(pipe, monkeypatch):
    with local(**TIGHT) as own, remote(pipe, monkeypatch, **TIGHT) as other:
        assert isinstance(own.engine.executor, LocalExecutor)
        assert other.engine.facts == own.engine.facts, "what an engine knows of its model came through the pipe, too"
        with pytest.raises(TypeError, match="RemoteExecutor has no model in this process"):
            print(other.engine.model)
        wanted, found = own.generate(*requests()), other.generate(*requests())
        assert [*map(outcome, found)] == [*map(outcome, wanted)]
        assert {each.finish_reason for each in found} == {"stop", "length"}
        assert other.stats() == own.stats() and other.stats()["preemptions"] > 0, "rows were released and taken again"
        assert other.stats()["prefix_hit_tokens"] > 0
        assert other.engine.executor.steps > 20
        other.engine.scheduler.check()


def test_a_request_that_is_aborted_in_flight_leaves_the_others_alone(pipe, monkeypatch):
    found = []
    with local(**TIGHT) as own, remote(pipe, monkeypatch, **TIGHT) as other:
        for engine in (own.engine, other.engine):
            batch = [engine.prepare(*each) for each in zip(*requests(), strict=True)]
            for tracked in batch:
                engine.submit(tracked)
            for _ in range(6):
                engine.step()
            assert engine.in_flight
            engine.abort(batch[2])
            while engine.has_work:
                engine.step()
            found.append([outcome(each.completion) for each in batch])
    assert found[1] == found[0] and found[1][2][2] == "abort"


def test_streams_move_their_blocks_in_another_process_too(pipe, monkeypatch):
    params = [SamplingParams(max_tokens=60, ignore_eos=True, seed=seed) for seed in (1, 2)]
    with local(**STREAMS) as own, remote(pipe, monkeypatch, **STREAMS) as other:
        wanted, found = (llm.generate([[9, 8, 7], [5] * 20], params) for llm in (own, other))
    assert [*map(outcome, found)] == [*map(outcome, wanted)] and len(found[0].token_ids) == 60


def test_an_error_in_the_other_process_ends_the_requests_with_it(pipe, monkeypatch):
    too_long = EngineConfig(max_model_len=9_999_999).on("cpu")
    with pytest.raises(ConfigError, match="max_model_len=9999999 is more than"):
        RemoteExecutor(pipe, EMBEDDED, too_long)
    with remote(pipe, monkeypatch, num_blocks=16) as other:
        launch = other.engine.executor.launch
        monkeypatch.setattr(other.engine.executor, "launch", lambda step: launch(replace(step, rows=step.rows + 999)))
        with pytest.raises(IndexError, match="out of bounds"):
            other.generate([[5, 6]])
        monkeypatch.undo()
        (done,) = other.generate([[5, 6]], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(done.token_ids) == 4 and not other.engine.has_work


def test_an_engine_does_not_wait_for_a_process_that_has_ended_or_hangs(monkeypatch):
    ours, theirs = multiprocessing.Pipe()
    with local(num_blocks=16) as own, ours:
        theirs.send_bytes(pickle.dumps(own.engine.facts))
        with remote(ours, monkeypatch, num_blocks=16) as other:
            other.engine.executor.patience = 0.01
            with pytest.raises(TimeoutError, match="no answer"):
                other.generate([[5, 6]])
            theirs.close()
            with pytest.raises(OSError):  # the pipe is broken
                other.generate([[5, 6]])
            assert not other.engine.has_work
            other.engine.executor.unanswered.clear()
