"""Faults in speculation: what is drafted, what is accepted, and what is taken back."""

from . import Fault

NGRAM, CONTROL = "minillm/speculation/ngram.py", "minillm/speculation/control.py"
DRAFTING, SCHEDULER = "minillm/scheduler/drafting.py", "minillm/scheduler/scheduler.py"
LAUNCHED, RUNNER = "minillm/runner/launched.py", "minillm/runner/runner.py"
DRAFT_MODEL, DRAFTS = "minillm/runner/draft_model.py", "tests/runner/test_draft_model.py"
ACCEPTED, SAME = "tests/scheduler/test_accepted.py", "tests/speculation/test_same_tokens.py"

FAULTS = (
    Fault(
        "an n-gram of the last token is learned before it is looked up",
        NGRAM,
        "for end in range(self._seen, count - 1):",
        "for end in range(self._seen, count):",
        "tests/speculation/test_ngram.py",
    ),
    Fault(
        "many tokens at once lose their last n-gram",
        NGRAM,
        "count = len(tokens) - size - first",
        "count = len(tokens) - size - first - 1",
        "tests/speculation/test_ngram.py",
    ),
    Fault(
        "a draft outside the vocabulary runs",
        CONTROL,
        "drafts.max() >= self.vocab_size",
        "drafts.max() > self.vocab_size",
        ACCEPTED,
    ),
    Fault(
        "a draft that is wrong is accepted",
        LAUNCHED,
        "return Results(tokens, 1 + np.cumprod(right, axis=1).sum(axis=1))",
        "return Results(tokens, 1 + right.sum(axis=1))",
        f"{SAME} -k coin",
    ),
    Fault(
        "rejected tokens stay in the cache as if they were right",
        SCHEDULER,
        "self.computed[rows] -= drafted - right",
        "self.computed[rows] -= 0",
        ACCEPTED,
    ),
    Fault(
        "a row with drafts runs past its length limit",
        DRAFTING,
        "self.limit[rows] - known - 1)",
        "self.limit[rows] - known)",
        ACCEPTED,
    ),
    Fault(
        "drafts are not counted in the token budget",
        DRAFTING,
        "found[i], left = np.array(drafts, np.int32), left - len(drafts)",
        "found[i] = np.array(drafts, np.int32)",
        ACCEPTED,
    ),
    Fault(
        "a step without drafts writes over the end of a block after steps that had some",
        RUNNER,
        "return bool((step.starts % self.state.block_size == 0).any())",
        "return False",
        f"{SAME} -k blocks_that_drafts",
    ),
    Fault(
        "a draft model keeps the keys of drafts that were wrong",
        DRAFT_MODEL,
        "np.minimum(np.minimum(self.computed[rows], right), counts - 1)",
        "np.minimum(self.computed[rows], counts - 1)",
        f"{DRAFTS} -k first_time",
    ),
    Fault(
        "a draft model goes on from its own draft, although another token came",
        RUNNER,
        "        self._decoding = None  # its tokens are no longer the next step's\n",
        "",
        f"{DRAFTS} -k wrong_is_not",
    ),
    Fault(
        "a draft model takes the row of a request that it is asked for",
        DRAFT_MODEL,
        "self.rows.move_to_end(each.request_id)",
        "pass",
        f"{DRAFTS} -k first_time",
    ),
    Fault(
        "drafts are sampled with the number of another position",
        DRAFT_MODEL,
        "each.prompt_length, params, each.seed, each.stop_ids",
        "each.prompt_length, params, each.seed + 1, each.stop_ids",
        f"{SAME} -k for_itself",
    ),
    Fault(
        "the time of drafting is not weighed",
        CONTROL,
        "seconds += counts.max(axis=1) * self.costs.drafting(len(rows))",
        "seconds += 0",
        "tests/speculation/test_control.py",
    ),
)
