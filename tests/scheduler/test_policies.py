"""The order of admission and the shares of a step under each policy, observed in the scheduler's steps."""

import numpy as np
import pytest

from minillm import LLM
from minillm.config import EngineConfig
from minillm.errors import ConfigError
from minillm.request import Request, RequestOptions, SamplingParams
from minillm.scheduler import Scheduler
from minillm.scheduler.checked import CheckedPolicy
from minillm.scheduler.policies import POLICIES, FirstComeFirstServed, PolicyError, ShortestPromptFirst
from tests.chance import SEED

pytestmark = pytest.mark.key


def request(name: str, prompt: int = 4, output: int = 3, **options) -> Request:
    params, limit = SamplingParams(max_tokens=output), prompt + output
    return Request(name, np.zeros(prompt, np.int32), params, limit, options=RequestOptions(**options))


def scheduler(policy: str, **options) -> Scheduler:
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "num_blocks": 100} | options
    return Scheduler(**sizes, max_model_len=64, block_size=4, prefix_caching=False, policy=POLICIES[policy]())


def admissions(waiting: Scheduler, later: dict[int, list[Request]] | None = None) -> list[tuple[int, str]]:
    """(step, name) of each admission until all requests finish; `later`: requests that arrive before a step."""
    found, later = [], later or {}
    for number in range(200):
        for each in later.pop(number, ()):
            waiting.submit(each)
        step = waiting.schedule()
        if step is None:
            if not later:
                return found
            continue
        found += [(number, waiting.requests[new.row].request_id) for new in step.new_rows]
        waiting.complete(step, np.ones(int(step.samples.sum()), np.int64))
    raise AssertionError("requests wait forever")


def names(found: list[tuple[int, str]]) -> str:
    return "".join(name for _, name in found)


def test_first_come_is_first_served():
    waiting = scheduler("fcfs", max_num_seqs=1)
    for name, prompt in zip("abcd", (9, 3, 7, 1), strict=True):
        waiting.submit(request(name, prompt))
    assert names(admissions(waiting)) == "abcd"


def test_the_lowest_priority_number_goes_first_and_ties_go_by_arrival():
    waiting = scheduler("priority", max_num_seqs=1)
    for name, priority in zip("abcde", (5, 0, 5, -3, 0), strict=True):
        waiting.submit(request(name, priority=priority))
    assert names(admissions(waiting)) == "dbeac"


def test_the_shortest_prompt_goes_first():
    waiting = scheduler("shortest", max_num_seqs=1)
    for name, prompt in zip("abcd", (40, 30, 20, 1), strict=True):
        waiting.submit(request(name, prompt))
    assert names(admissions(waiting)) == "dcba"


def test_a_long_prompt_is_overtaken_no_more_often_than_its_policy_promises():
    waiting = scheduler("shortest", max_num_seqs=1)
    waiting.submit(request("L", prompt=40, output=1))
    stream = {number: [request("s", prompt=1, output=1)] for number in range(60)}
    overtaken = names(admissions(waiting, stream)).index("L")
    assert 5 <= overtaken <= 40 / ShortestPromptFirst().patience + 1


@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if policy.fair])
def test_starvation_free_policies_admit_every_request(policy):
    waiting = scheduler(policy, max_num_seqs=2)
    for each in (request("a", output=2), request("b", output=2), request("L", prompt=40, output=1)):
        waiting.submit(each)
    stream = {number: [request("s", prompt=1, output=2)] for number in range(80)}
    assert names(admissions(waiting, stream)).index("L") < 20, "other requests go first while there are any"


@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if policy.fair])
@pytest.mark.parametrize("budget", [1, 3, 8, 64])
def test_a_request_that_needs_nearly_all_blocks_runs_however_many_arrive_later(policy, budget):
    waiting = scheduler(policy, max_num_seqs=6, max_num_batched_tokens=budget, num_blocks=11)
    large = request("L", prompt=30, output=14)
    for each in (request("a"), request("b"), large):
        waiting.submit(each)
    finished = []
    for number in range(2000):
        if number % 2:
            waiting.submit(request("s", prompt=3, output=3))
        step = waiting.schedule()
        finished += waiting.complete(step, np.ones(int(step.samples.sum()), np.int64))
        waiting.check()
        if large in finished:
            return
    raise AssertionError("the large one never ends")


def test_cached_blocks_do_not_block_a_request_that_needs_the_whole_pool():
    waiting = Scheduler(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, block_size=4, num_blocks=12)
    rng = np.random.default_rng(SEED)
    for name in "abcd":
        each = request(name, prompt=12, output=2)
        each.prompt = each.known = rng.integers(0, 99, 12).astype(np.int32)
        waiting.submit(each)
    admissions(waiting)
    assert waiting.pool.cached > 10
    shares = request("L", prompt=40, output=8)
    shares.prompt = shares.known = np.concatenate([each.prompt, rng.integers(0, 99, 28)]).astype(np.int32)
    for other in (shares, request("M", prompt=40, output=8)):
        waiting.submit(other)
    assert names(admissions(waiting)) == "LM" and waiting.prefix_hits == 12


# ---- shares of a step


def steps(waiting: Scheduler, *prompts: int, output: int = 3) -> list[list[int]]:
    """Tokens per row in each step, in order of arrival; 0: the row waits."""
    requests = [request(str(i), prompt, output) for i, prompt in enumerate(prompts)]
    for each in requests:
        waiting.submit(each)
    found = []
    while (step := waiting.schedule()) is not None:
        counts = dict(zip(step.rows.tolist(), step.queries.tolist(), strict=True))
        found.append([counts.get(each.row, 0) for each in requests])
        waiting.complete(step, np.ones(int(step.samples.sum()), np.int64))
    return found


def test_decodes_run_first_and_chunks_share_the_rest_oldest_first():
    found = steps(scheduler("fcfs", max_num_seqs=3, max_num_batched_tokens=10), 4, 14, 9, output=4)
    assert found == [[4, 6, 0], [1, 8, 1], [1, 1, 8], [1, 1, 1], [0, 1, 1], [0, 0, 1]]


def test_prompts_may_have_a_smaller_budget_of_their_own_and_decodes_go_on():
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 10, "max_prefill_tokens": 5}
    found = steps(scheduler("fcfs", **options), 4, 14, 9, output=4)
    assert found == [[4, 6, 0], [1, 5, 0], [1, 3, 2], [1, 1, 5], [0, 1, 2], [0, 1, 1], [0, 0, 1], [0, 0, 1]]
    most = scheduler("fcfs", **options | {"max_prefill_tokens": 20})
    assert steps(most, 4, 14, output=1)[0] == [4, 6], "the budget of the whole step still holds"


def test_a_whole_prompt_waits_for_room_and_one_over_any_budget_is_chunked():
    found = steps(scheduler("whole", max_num_seqs=4, max_num_batched_tokens=10), 4, 9, 23, 8, output=4)
    assert list(zip(*found, strict=True)) == [
        (4, 1, 1, 1, 0, 0, 0, 0, 0),
        (0, 9, 1, 1, 1, 0, 0, 0, 0),
        (0, 0, 8, 8, 7, 1, 1, 1, 0),
        (0, 0, 0, 0, 0, 8, 1, 1, 1),
    ]


def test_lowering_the_budget_starves_no_whole_prompt():
    waiting = scheduler("whole", max_num_batched_tokens=20)
    assert steps(waiting, 18, output=1) == [[18]]
    waiting.max_num_batched_tokens = 10
    assert steps(waiting, 18, output=1) == [[10], [8]]


@pytest.mark.explore
@pytest.mark.parametrize("policy", POLICIES)
def test_every_share_respects_pending_tokens_and_uses_the_whole_budget(policy):
    rng = np.random.default_rng(SEED)
    for _ in range(500):
        pending = np.where(rng.random(9) < 0.5, 1, rng.integers(1, 40, 9)).astype(np.int32)[: rng.integers(1, 9)]
        budget = int(rng.integers(1, 120))
        given = CheckedPolicy(POLICIES[policy](), lambda: None).share(pending, budget)
        assert given.sum() == min(budget, pending.sum())


def test_a_static_batch_admits_no_request_before_its_last_one_finishes():
    outputs = dict(zip("abcd", (2, 9, 4, 1), strict=True))
    waiting, joining = scheduler("static"), scheduler("fcfs")
    for each in (waiting, joining):
        for name, output in outputs.items():
            each.submit(request(name, output=output))
    assert admissions(waiting) == [(0, "a"), (0, "b"), (9, "c"), (9, "d")]
    assert admissions(joining) == [(0, "a"), (0, "b"), (2, "c"), (6, "d")]


def test_a_static_batch_fills_over_several_steps_if_its_prompts_exceed_the_budget():
    waiting = scheduler("static", max_num_seqs=4, max_num_batched_tokens=10)
    for name in "abcde":
        waiting.submit(request(name, prompt=10, output=5))
    found = {name: number for number, name in admissions(waiting)}
    assert found["a"] < found["b"] < found["c"] < found["d"]
    assert found["e"] >= found["d"] + 5, "the fifth request waits until all four have finished"


def test_when_blocks_run_out_the_last_request_is_preempted():
    waiting = scheduler("priority", num_blocks=8)
    urgent, idle = request("u", prompt=8, output=20, priority=0), request("i", prompt=8, output=20, priority=9)
    for each in (idle, urgent):
        waiting.submit(each)
    while not waiting.preemptions:
        step = waiting.schedule()
        waiting.complete(step, np.ones(int(step.samples.sum()), np.int64))
    assert idle.row < 0 <= urgent.row


def test_an_unknown_policy_error_lists_the_available_ones():
    with pytest.raises(ConfigError, match="policy must be one of fcfs, priority, shortest, static, whole, not 'lifo'"):
        EngineConfig(policy="lifo")


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_do_not_depend_on_the_policy(policy):
    prompts = [list(range(5, 5 + length)) for length in (9, 2, 30, 5, 17)]
    params = SamplingParams(max_tokens=6, temperature=0)
    options = [RequestOptions(priority=i % 3) for i in range(5)]
    with LLM(device="cpu", dtype="float64", max_num_seqs=2, policy=policy) as llm:
        found = [each.token_ids for each in llm.generate(prompts, params, options)]
    with LLM(device="cpu", dtype="float64") as llm:
        assert found == [llm.generate([prompt], params)[0].token_ids for prompt in prompts]


def test_a_key_too_large_for_a_float_is_reported_as_the_policys_error():
    waiting = scheduler("fcfs")
    waiting.policy.key = lambda request: 10**400
    waiting.policy = CheckedPolicy(waiting.policy, lambda: None)
    with pytest.raises(PolicyError, match="FirstComeFirstServed: key must give a number to sort by"):
        waiting.submit(request("first"))
    assert not waiting.has_work


def test_a_static_batch_is_closed_once_it_no_longer_grows():
    policy = POLICIES["static"]()
    assert [policy.admits(running) for running in (0, 1, 2, 2, 2, 1, 0)] == [
        True,
        True,
        True,
        False,
        False,
        False,
        True,
    ]


def test_a_user_supplied_policy_may_not_exceed_the_budget_by_one_token():
    checked = CheckedPolicy(Everything(), lambda: None)
    assert checked.share(np.array([3, 3], np.int32), 6).tolist() == [3, 3]
    with pytest.raises(PolicyError, match="that is 6 tokens in all"):
        checked.share(np.array([3, 3], np.int32), 5)


class Everything(FirstComeFirstServed):
    def share(self, pending, budget):
        return pending


def test_a_decode_runs_before_the_chunk_of_an_older_prompt():
    assert FirstComeFirstServed().share(np.array([9, 1, 7], np.int32), 6).tolist() == [5, 1, 0]
