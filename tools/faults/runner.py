"""Faults in running a step: sampling, penalties, log-probabilities, row state, memory, plans, graphs."""

from . import Fault

SAMPLER, COLUMNS = "minillm/runner/sampler.py", "minillm/runner/sampling_columns.py"

FAULTS = (
    Fault(
        "a rank that has no memory for a graph runs another shape than the others",
        "minillm/runner/mixed_graphs.py",
        "if self.model.parallel.size > 1:",
        "if False:",
        "tests/runner/test_mixed_graphs.py -k rank_without_memory",
    ),
    Fault(
        "a row with earlier keys counts as a new prompt",
        "minillm/runner/packing.py",
        "(int(continued[-1]) + 1 if len(continued) else 0)",
        "len(continued)",
        "tests/runner/test_packing.py",
    ),
    Fault(
        "small graphs are lost with the largest",
        "minillm/runner/mixed_graphs.py",
        "self.shapes.pop()",
        "raise",
        "tests/runner/test_mixed_graphs.py -k smaller_shapes_stay",
    ),
    Fault(
        "requests may be longer than the cache that the memory holds",
        "minillm/runner/runner.py",
        "self.max_model_len = longest_held(self.num_blocks, windows, block_size, chunk)",
        "self.max_model_len = max_model_len",
        "tests/runner/test_memory.py -k lowered",
    ),
    Fault(
        "presence and frequency penalties count prompt tokens",
        "minillm/runner/adjusted_logits.py",
        "output = (position >= prompt[:, None]) & (position",
        "output = (position >= 0) & (position",
        "tests/runner/test_sampler.py -k 'distribution and presence_penalty'",
    ),
    Fault(
        "min_p is a probability, not a share of the likeliest's",
        "minillm/ops/reference.py",
        "scores -= scores.amax(-1, keepdim=True)",
        "scores -= scores.logsumexp(-1, keepdim=True)",
        "tests/runner/test_sampler.py -k 'distribution and min_p'",
    ),
    Fault(
        "a parameter of 0 leaves the previous request's value in the row",
        COLUMNS,
        "column[row] = greedy.get(name, min(getattr(params, name), MOST_K))",
        "column[row] = greedy.get(name, min(getattr(params, name), MOST_K)) or column[row]",
        "tests/runner/test_sampler.py -k request_before",
    ),
    Fault(
        "a greedy row keeps the previous request's temperature",
        COLUMNS,
        "self.temperature[row] = params.temperature",
        "self.temperature[row] = params.temperature or self.temperature[row]",
        "tests/runner/test_sampler.py -k request_before",
    ),
    Fault(
        "a row keeps the last request's mask",
        COLUMNS,
        "self.masked[row] = params.grammar is not None",
        "self.masked[row] |= params.grammar is not None",
        "tests/engine/test_structured_output.py -k forgets",
    ),
    Fault(
        "masks go to the first rows of a step",
        SAMPLER,
        "forbid(logits, self._tensor(masked), masks)",
        "forbid(logits, self._tensor(np.arange(len(masked))), masks)",
        "tests/engine/test_structured_output.py -k neighbors",
    ),
    Fault(
        "the next step looks up the token of a row that has none",
        "minillm/runner/state.py",
        "tokens = tokens.clamp(min=0)",
        "tokens = tokens.clone()",
        "tests/engine/test_not_numbers.py -k choice_of_a_prompt",
    ),
)
