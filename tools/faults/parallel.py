"""Faults in what several processes do together: collectives, steps, failures."""

from . import Fault

RANKS, COLLECTIVES = "minillm/parallel/ranks.py", "minillm/parallel/collectives.py"
TOKENS, FAILURES = "tests/parallel/test_tensor_parallel.py", "tests/parallel/test_failures.py"

FAULTS = (
    Fault(
        "a sum leaves out the last rank",
        COLLECTIVES,
        "for other in others:",
        "for other in others[:-1]:",
        f"{TOKENS} -k another_family",
    ),
    Fault(
        "ranks that sample other tokens go on",
        "minillm/parallel/executor.py",
        "if found != checksum(results):",
        "if found is None:",
        f"{FAILURES} -k diverges",
    ),
    Fault(
        "a rank that hangs is taken for the one that waits",
        RANKS,
        "behind = min(self.members",
        "behind = max(self.members",
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
        "if not operations.engines_own:",
        "if False:",
        f"{TOKENS} -k refused",
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
        "minillm/runner/sharded_sampling.py",
        "masked_fill(behind, torch.inf).amin(-1)",
        "masked_fill(behind, -torch.inf).amax(-1)",
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
)
