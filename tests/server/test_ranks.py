"""A server whose engine spans several processes starts it again when it loses one of them."""

import json
import os
import signal

import httpx
import psutil
import pytest

from tests.parallel.test_processes import ranks_of
from tests.server.processes import serving
from tests.server.test_supervisor import BODY, ENDLESS, UNBOUNDED, engine_of, status, workers_of
from tests.waiting import TIMEOUT, wait_until


@pytest.mark.proof
@pytest.mark.parametrize("option", ["--tensor-parallel-size", "--pipeline-parallel-size"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_server_brings_an_engine_back_that_has_lost_a_rank(model_directory, number, option):
    with serving(model_directory, option, "2", *UNBOUNDED) as (process, url):
        before, engine = workers_of(process), engine_of(process)
        lost = ranks_of(engine)
        with httpx.stream("POST", url + "/v1/completions", json=ENDLESS, timeout=TIMEOUT) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            os.kill(lost[1], number)
            *_, error, end = lines
        assert "rank 1" in json.loads(error.removeprefix("data: "))["error"]["message"] and end == "data: [DONE]"
        wait_until(lambda: engine_of(process) not in (None, engine) and status(url) == 200)
        assert httpx.post(url + "/v1/completions", json=BODY, timeout=TIMEOUT).status_code == 200
        assert workers_of(process) == before and not set(ranks_of(engine_of(process))) & set(lost)
        assert not any(map(psutil.pid_exists, lost))
        process.terminate()
        _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0 and "rank 1" in errors and "the engine is back" in errors
