"""Faults in the scheduler: admission, preemption, block reuse, policies."""

from . import Fault

SCHEDULER, POLICIES = "minillm/scheduler/scheduler.py", "minillm/scheduler/policies.py"

FAULTS = (
    Fault(
        "a row keeps the previous request's stop tokens",
        SCHEDULER,
        "        self.stop_ids[row] = -1\n",
        "",
        "tests/scheduler/test_scheduler.py -k stop_token",
    ),
    Fault(
        "a preempted request loses its output",
        SCHEDULER,
        "request.known = self.tokens[row, : self.confirmed[row]].copy()",
        "request.known = self.tokens[row, : self.prompt[row]].copy()",
        "tests/scheduler/test_scheduler.py -k keeps_its_output",
    ),
    Fault(
        "blocks are freed before the steps in flight are read",
        SCHEDULER,
        "self._fence[0][0] <= self.read:",
        "self._fence[0][0] <= self.launched:",
        "tests/scheduler/test_scheduler.py -k wait_for_the_steps",
    ),
    Fault(
        "an admission takes only one token from the budget",
        SCHEDULER,
        "budget -= count",
        "budget -= 1",
        "tests/scheduler/test_scheduler.py tests/scheduler/test_policies.py",
    ),
    Fault(
        "no blocks are reserved at admission",
        SCHEDULER,
        "if needed + reserve > self.pool.available:",
        "if needed > self.pool.available:",
        "tests/scheduler/test_scheduler.py -k leaves_the_blocks",
    ),
    Fault(
        "a fully cached prompt leaves no token to compute",
        SCHEDULER,
        "full = (len(request.known) - 1) // self.block_size",
        "full = len(request.known) // self.block_size",
        "tests/engine/test_engine.py -k prefix_cache_hits",
    ),
    Fault(
        "a stop token at the length limit is reported as length",
        SCHEDULER,
        "            if stopped[i]:\n",
        "            if stopped[i] and not full[i]:\n",
        "tests/engine/test_engine.py -k 'stop_token or end_token'",
    ),
    Fault(
        "a request ends one token too early",
        SCHEDULER,
        "full = self.confirmed[rows] == self.limit[rows]",
        "full = self.confirmed[rows] == self.limit[rows] - 1",
        "tests/scheduler/test_accepted.py",
    ),
    Fault(
        "the first request is preempted instead of the last",
        SCHEDULER,
        "request = max((each for each in self.requests",
        "request = min((each for each in self.requests",
        "tests/scheduler/test_policies.py -k last_request_is_preempted",
    ),
    Fault(
        "a request that wants prompt scores uses the prefix cache",
        SCHEDULER,
        "if not self._shares(request) or request.params.prompt_logprobs is not None:",
        "if not self._shares(request):",
        "tests/scheduler/test_scheduler.py -k prompt_scored",
    ),
    Fault(
        "rejected tokens still count as computed",
        SCHEDULER,
        "self.computed[rows[going]] -= count[going]",
        "self.computed[rows[going]] -= 0",
        "tests/scheduler/test_accepted.py",
    ),
    Fault(
        "prompts run before decodes",
        POLICIES,
        'np.argsort(pending > 1, kind="stable")',
        'np.argsort(pending <= 1, kind="stable")',
        "tests/scheduler/test_policies.py -k decode_runs_before",
    ),
    Fault(
        "the highest priority number is served first",
        POLICIES,
        "return request.options.priority",
        "return -request.options.priority",
        "tests/scheduler/test_policies.py -k lowest_priority",
    ),
    Fault(
        "a static batch stays open when no request joins",
        POLICIES,
        "running > self._seen)",
        "running >= self._seen)",
        "tests/scheduler/test_policies.py -k no_longer_grows",
    ),
    Fault(
        "a custom policy may exceed the budget by one token",
        "minillm/scheduler/replaceable.py",
        "elif given.sum() > budget:",
        "elif given.sum() > budget + 1:",
        "tests/scheduler/test_policies.py -k may_not_exceed",
    ),
    Fault(
        "a row with a grammar runs ahead of its tokens",
        SCHEDULER,
        "ready &= ~np.isin(rows, list(self.matchers)) | (known == self.confirmed[rows])",
        "pass",
        "tests/engine/test_structured_output.py -k far_ahead",
    ),
    Fault(
        "a row holds the next request back as if it had a grammar too",
        SCHEDULER,
        "self.matchers.pop(row, None)",
        "pass",
        "tests/engine/test_structured_output.py -k forgets",
    ),
)
