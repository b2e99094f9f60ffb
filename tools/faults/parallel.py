"""Faults in what several processes do together: collectives, steps, failures."""

from . import Fault

RANKS, COLLECTIVES = "minillm/parallel/ranks.py", "minillm/parallel/collectives.py"
KEYS, PAGES = "minillm/ops/split_keys.py", "tests/parallel/test_split_pages.py"
SUMS, REPLACEMENTS = "minillm/model/parallel.py", "minillm/parallel/replacements.py"
REPLACED = "tests/parallel/test_replacements.py"
TOKENS, FAILURES = "tests/parallel/test_tensor_parallel.py", "tests/parallel/test_failures.py"

INTERRUPTS = "tests/parallel/test_interrupts.py"
PIPELINE, STAGES, TURNS = (
    "tests/parallel/test_pipeline.py",
    "tests/model/test_stages.py",
    "tests/scheduler/test_turns.py",
)

FAULTS = (
    Fault(
        "a stage starts with the embedding instead of what it receives",
        "minillm/model/parallel.py",
        "if parallel.stage.first:",
        "if True:",
        f"{PIPELINE} -k all_options",
    ),
    Fault(
        "a stage drops the last layer's output",
        "minillm/model/parallel.py",
        "torch.stack((x, residual))",
        "torch.stack((x * 0, residual))",
        f"{PIPELINE} -k all_options",
    ),
    Fault(
        "the first stage is not told what the last one sampled",
        "minillm/parallel/executor.py",
        "StepOfStages(step, self._sampled)",
        "StepOfStages(step, [])",
        f"{PIPELINE} -k all_options",
    ),
    Fault(
        "tokens of steps that were given up reach the first stage",
        "minillm/parallel/executor.py",
        "        oldest.results = results\n",
        "        oldest.results = results\n        self.tell(oldest.step, results)\n",
        f"{PIPELINE} -k follow_a_failure",
    ),
    Fault(
        "a row runs before its last token has been read",
        "minillm/scheduler/scheduler.py",
        "self.waits[row] = self.stages > 1 or request.matcher is not None",
        "self.waits[row] = request.matcher is not None",
        f"{TURNS} -k share_the_rows",
    ),
    Fault(
        "older rows go first in every step of a pipeline",
        "minillm/scheduler/turns.py",
        'np.argsort(self.last_step[rows], kind="stable")',
        "np.arange(len(rows))",
        f"{TURNS} -k never_kept_waiting",
    ),
    Fault(
        "all rows of a pipeline run in one step",
        "minillm/scheduler/turns.py",
        "most = -(-len(self.order) // self.stages)",
        "most = len(self.order)",
        f"{TURNS} -k share_the_rows",
    ),
    Fault(
        "a stage reads the embedding that others need",
        "minillm/model/decoder.py",
        "vocab if stage.last or tied and stage.first else 0",
        "vocab",
        f"{STAGES} -k reads_only",
    ),
    Fault(
        "a stage has a cache for all layers",
        "minillm/model/parallel.py",
        "size=1 + max(index for _, index in found)",
        "size=whole.size",
        f"{STAGES} -k has_room",
    ),
    Fault(
        "a stage that waits for another counts as working",
        "minillm/parallel/rank.py",
        "self.working and not waiting",
        "self.working",
        f"{FAILURES} -k stage_that_fails",
    ),
    Fault(
        "a step that is interrupted while it is waited for leaves its answers to the next one",
        "minillm/parallel/executor.py",
        "        self.ranks.wait()  # an interrupt leaves the step unanswered, and the next wait takes its answers\n"
        "        with self.ranks.whole():\n"
        "            answers, oldest = self.ranks.take(), self._unanswered.popleft()\n",
        "        oldest = self._unanswered.popleft()\n        self.ranks.wait()\n        answers = self.ranks.take()\n",
        f"{INTERRUPTS} -k given_up",
    ),
    Fault(
        "ranks that were interrupted within a message go on",
        RANKS,
        "            if self.failure is None:\n",
        "            if False:\n",
        f"{INTERRUPTS} -k half_of_a_message",
    ),
    Fault(
        "a rank that failed carries out the next messages",
        "minillm/parallel/rank.py",
        "            if self._failed.is_set():\n",
        "            if False:\n",
        f"{FAILURES} -k nothing_more",
    ),
    Fault(
        "a stage answers before its device has run the step",
        "minillm/parallel/rank.py",
        "    launched.finish()\n",
        "",
        f"{FAILURES} -k answers_once",
    ),
    Fault(
        "a failure that is reported behind an answer is overlooked",
        RANKS,
        "(each, each.inbox[-1])",
        "(each, each.inbox[0])",
        f"{FAILURES} -k behind_an_answer",
    ),
    Fault(
        "of processes that ended, that of the first rank is blamed",
        RANKS,
        "(killed or exited or list(ended))[0]",
        "list(ended)[0]",
        f"{FAILURES} -k no_library_aborted",
    ),
    Fault(
        "a sum leaves out the last rank",
        SUMS,
        "for other in others:",
        "for other in others[:-1]:",
        f"{TOKENS} -k another_family",
    ),
    Fault(
        "ranks that sample other tokens go on",
        "minillm/parallel/executor.py",
        "if reported != checksum(results):",
        "if reported is None:",
        f"{FAILURES} -k diverges",
    ),
    Fault(
        "a rank that hangs is taken for the one that waits",
        RANKS,
        "if member.working]",
        "if not member.working]",
        f"{FAILURES} -k hangs",
    ),
    Fault(
        "what another rank's failure did to a rank counts as its own",
        "minillm/parallel/messages.py",
        "isinstance(error, PeerLost)\n",
        "False\n",
        f"{FAILURES} -k failed_first",
    ),
    Fault(
        "functions of the user's are left out in silence",
        "minillm/parallel/executor.py",
        "if blocks == self._blocks:",
        "if True:",
        f"{REPLACED} -k until_its_block_ends",
    ),
    Fault(
        "calls in the ranks are counted again with every step",
        "minillm/parallel/executor.py",
        "            self._used[i] = ran.used\n",
        "",
        f"{REPLACED} -k count_them",
    ),
    Fault(
        "what is replaced when an engine is made is left out",
        "minillm/parallel/rank.py",
        "if problem := self.replacements.follow(message.replace):",
        "if problem := None:",
        f"{REPLACED} -k count_them",
    ),
    Fault(
        "ranks look for modules only where their own are",
        REPLACEMENTS,
        "sys.path += [each for each in message.path if each not in sys.path]",
        "pass",
        f"{REPLACED} -k modules_are_found",
    ),
    Fault(
        "a shard of a size that the model has no room for is loaded",
        "minillm/model/loader.py",
        "if found != wanted:",
        "if False:",
        f"{REPLACED} -k another_size",
    ),
    Fault(
        "a message goes to the rank that one comes from",
        COLLECTIVES,
        "dist.isend(x.contiguous(), first + to)",
        "dist.isend(x.contiguous(), first + source)",
        f"{REPLACED} -k sent_to",
    ),
    Fault(
        "an engine that has lost a rank counts as working",
        RANKS,
        'return f"{member} {member.end()}"',
        "return None",
        f"{FAILURES} -k while_nothing_runs",
    ),
    Fault(
        "of equally likely tokens in two shards, the later one is taken",
        SUMS,
        "masked_fill(largest < highest[:, None], torch.inf).amin(-1)",
        "masked_fill(largest < highest[:, None], -torch.inf).amax(-1)",
        "tests/runner/test_sharded_sampling.py -k likeliest",
    ),
    Fault(
        "a shard's sum is not scaled to the largest logit of all",
        "minillm/runner/sharded_sampling.py",
        "shares = every[:, :, 2] * ((every[:, :, 0] - highest[:, None]) / divisor[:, None]).exp()",
        "shares = every[:, :, 2]",
        "tests/runner/test_sharded_sampling.py -k draw",
    ),
    Fault(
        "each rank reads all columns",
        "minillm/quantization/weight.py",
        "return pieces.part(self.rows, self.columns)",
        "return (piece[:, self.columns.start : self.columns.stop] for piece in pieces.part(self.rows))",
        "tests/model/test_parallel.py -k reads_only",
    ),
    Fault(
        "a rank that divides blocks sees keys after its queries",
        KEYS,
        "* cache.share.of + cache.share.first",
        "* cache.share.of",
        f"tests/ops/test_split_keys.py {PAGES} -k 'merge_to_the_whole or windows_free'",
    ),
    Fault(
        "parts of attention are merged without their sums",
        KEYS,
        "total += part * own[..., None]",
        "total += part",
        "tests/ops/test_split_keys.py",
    ),
    Fault(
        "results of divided blocks go to the next rank's heads",
        "minillm/model/split_attention.py",
        "movedim(1, 0)",
        "movedim(1, 0).flip(0)",
        f"{PAGES} -k windows_free",
    ),
    Fault(
        "all ranks divide a cache block, whichever KV head they have",
        COLLECTIVES,
        "dist.new_group([*range(first, first + ranks)])",
        "dist.new_group([*range(ranks)])",
        f"{PAGES} -k same_head",
    ),
    Fault(
        "each rank stores another's tokens",
        "minillm/kv_cache/split_pages.py",
        "slots % self.of == self.first",
        "slots % self.of != self.first",
        "tests/kv_cache/test_split_pages.py",
    ),
    Fault(
        "with divided blocks, adapters leave out what comes out of attention",
        "minillm/model/decoder.py",
        "            return run.adapted_linear(attended.flatten(1), layer.attention_out, batch.adapted)",
        "            return run.linear(attended.flatten(1), layer.attention_out)",
        f"{PAGES} -k adapters",
    ),
)
