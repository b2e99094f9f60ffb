"""Faults in the scheduler: admission, preemption, block reuse, policies."""

from . import Fault

SCHEDULER, POLICIES = "minillm/scheduler/scheduler.py", "minillm/scheduler/policies.py"
ADMISSION = "minillm/scheduler/admission.py"

FAULTS = (
    Fault(
        "a token budget that was tried stays",
        "minillm/scheduler/settings.py",
        "scheduler.policy, scheduler.max_num_batched_tokens, scheduler.prefix_caching = before",
        "scheduler.policy, _, scheduler.prefix_caching = before",
        "tests/bench/test_batching.py -k afterwards",
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
        "self.fence.release(self.read)",
        "self.fence.release(self.newest)",
        "tests/scheduler/test_scheduler.py -k wait_for_the_steps",
    ),
    Fault(
        "an admission takes only one token from the budget",
        ADMISSION,
        "budget -= count",
        "budget -= 1",
        "tests/scheduler/test_scheduler.py tests/scheduler/test_policies.py",
    ),
    Fault(
        "a stop token at the length limit is reported as length",
        SCHEDULER,
        "            elif stopped[i]:\n",
        "            elif stopped[i] and not full[i]:\n",
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
        "prompts have only the whole step's budget",
        SCHEDULER,
        "if self.max_prefill_tokens and (decodes :=",
        "if self.max_prefill_tokens < 0 and (decodes :=",
        "tests/scheduler/test_policies.py -k smaller_budget",
    ),
    Fault(
        "prompts are limited although no stream waits",
        SCHEDULER,
        "if self.max_prefill_tokens and (decodes := int((pending == 1).sum())):",
        "if self.max_prefill_tokens and (decodes := int((pending == 1).sum())) >= 0:",
        "tests/scheduler/test_policies.py -k smaller_budget",
    ),
    Fault(
        "a request pays for the damaged blocks of another",
        "minillm/scheduler/scheduler.py",
        "retry, request.alone = request.borrowed, True",
        "retry, request.alone = False, True",
        "tests/engine/test_not_numbers.py -k share_a_failed_ones",
    ),
)
