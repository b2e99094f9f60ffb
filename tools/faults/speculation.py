"""Faults in speculation: what is drafted, what is accepted, and what is taken back."""

from . import Fault

NGRAM, CONTROL = "minillm/speculation/ngram.py", "minillm/speculation/control.py"
DRAFTING, SCHEDULER = "minillm/scheduler/drafting.py", "minillm/scheduler/scheduler.py"
LAUNCHED, RUNNER = "minillm/runner/launched.py", "minillm/runner/runner.py"
GRAPHS = "minillm/runner/decode_graphs.py"
DRAFT_MODEL, DRAFTS = "minillm/runner/draft_model.py", "tests/runner/test_draft_model.py"
DRAFTING_AHEAD, AHEAD = "minillm/scheduler/drafting_ahead.py", "tests/speculation/test_drafts_ahead.py"
LOOKUP = "tests/kernels/test_prompt_lookup.py"
ACCEPTED, SAME = "tests/scheduler/test_accepted.py", "tests/speculation/test_same_tokens.py"

FAULTS = (
    Fault(
        "a row that a plan pauses takes no drafts when it goes on",
        CONTROL,
        "np.where(known < self._next[rows], -1, chosen)",
        "chosen",
        "tests/speculation/test_control.py -k planned_anew",
    ),
    Fault(
        "a head for a draft model is ignored where no model drafts",
        DRAFT_MODEL,
        "if config.speculate_head is not None:",
        'if config.speculate_head is not None and config.speculate == "off":',
        f"{DRAFTS} -k needs_the_models_tokenizer",
    ),
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
        "self._seen + 1 - size, 0) : -1]",
        "self._seen + 1 - size, 0) : -2]",
        "tests/speculation/test_ngram.py",
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
        CONTROL,
        "counts = np.minimum(counts, np.maximum(left + counts - counts.cumsum(axis=1), 0))",
        "counts = np.minimum(counts, max(left, 0))",
        "tests/speculation/test_control.py",
    ),
    Fault(
        "a step without drafts writes over the end of a block after steps that had some",
        RUNNER,
        "return bool((step.starts % self.state.block_size == 0).any())",
        "return False",
        f"{SAME} -k blocks_that_drafts",
    ),
    Fault(
        "requests get their tokens before the next step with drafts is launched",
        "minillm/engine/engine.py",
        "if not self.in_flight and self.scheduler.continues_at_once:",
        "if False:",
        f"{SAME} -k launched_before",
    ),
    Fault(
        "a step is launched before a grammar has read the last tokens",
        DRAFTING,
        "self.speculation.runs_ahead and not self.matchers",
        "self.speculation.runs_ahead",
        f"{SAME} -k launched_before",
    ),
    Fault(
        "a row runs the drafts that were planned, although its step has no room for them",
        DRAFTING,
        "counts = np.clip(left + counts - counts.cumsum(), 0, counts)",
        "pass",
        f"{ACCEPTED} -k planned",
    ),
    Fault(
        "what was planned for a row's last request counts for its next one",
        CONTROL,
        "self._next[row], self._chosen[row] = 0 if wanted else NEVER, -1",
        "self._next[row] = 0 if wanted else NEVER",
        "tests/speculation/test_control.py -k planned",
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
    Fault(
        "penalties see what a graph sampled in place of drafts",
        GRAPHS,
        "            state.store_drafts(step)\n",
        "            pass\n",
        "tests/runner/test_decode_graphs.py -k drafts_of_a_request",
    ),
    Fault(
        "a graph runs the drafts of the step before, if they are one position further",
        GRAPHS,
        "self._sent = (rows, positions + 1) if step.drafts is None else NOTHING",
        "self._sent = (rows, positions + 1)",
        "tests/runner/test_decode_graphs.py -k drafts_of_a_request",
    ),
    Fault(
        "the device accepts one token too many",
        "kernels/prompt_lookup.py",
        "accepted = 1 + tl.min(",
        "accepted = 2 + tl.min(",
        LOOKUP,
    ),
    Fault(
        "the device looks up what is past a row's end",
        "kernels/prompt_lookup.py",
        "matches = ends < last",
        "matches = ends != last",
        LOOKUP,
    ),
    Fault(
        "the device looks drafts up in another row's tokens",
        "kernels/prompt_lookup.py",
        "history = tokens_ptr + row * tokens_stride",
        "history = tokens_ptr + (row + 1) % PAD_ROW * tokens_stride",
        LOOKUP,
    ),
    Fault(
        "the device keeps a stale length",
        "minillm/runner/device_drafts.py",
        "state.lengths[rows] = (lengths + accepted).int()",
        "state.lengths[rows] = lengths.int()",
        f"{AHEAD} -k planted",
    ),
    Fault(
        "steps start where the host expects them, as if all drafts in flight were right",
        DRAFTING_AHEAD,
        "given[rows] = ~counted",
        "given[rows] = True",
        "tests/scheduler/test_drafting_ahead.py",
    ),
    Fault(
        "the device goes on from drafts of the host's that are not read",
        DRAFTING_AHEAD,
        "if (unread != speculation.unread[rows]).any():",
        "if len(rows) == 0:",
        "tests/scheduler/test_drafting_ahead.py",
    ),
    Fault(
        "captured steps in flight overwrite tokens that are not read",
        DRAFTING_AHEAD,
        "room = MOST_AHEAD - (known - self.confirmed[rows])",
        "room = 1000 - (known - self.confirmed[rows])",
        "tests/scheduler/test_drafting_ahead.py",
    ),
    Fault(
        "what the device has not found counts as wrong",
        "minillm/speculation/control.py",
        "self.learn(rows[had], drafted[had], accepted[had])",
        "self.learn(rows[had], drafted[had] + 1, accepted[had])",
        "tests/scheduler/test_drafting_ahead.py",
    ),
    Fault(
        "the device drafts while a request could join",
        DRAFTING_AHEAD,
        "return not (self.waiting and self._free_rows) and bool(",
        "return bool(",
        "tests/scheduler/test_drafting_ahead.py",
    ),
    Fault(
        "a row's drafts run at the positions of its prompt's chunk",
        "minillm/runner/mixed_graphs.py",
        "sent.positions[every] = _up_to(step.ends - 1, counts)",
        "sent.positions[every] = _up_to(step.starts, counts)",
        "tests/runner/test_mixed_graphs.py -k once_for_each",
    ),
)
