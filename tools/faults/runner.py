"""Faults in running a step: sampling, penalties, log-probabilities, row state, memory, plans, graphs."""

from . import Fault

SAMPLER, STATE, SCORES = "minillm/runner/sampler.py", "minillm/runner/state.py", "minillm/runner/logprobs.py"

FAULTS = (
    Fault(
        "requests may be longer than the cache that the memory holds",
        "minillm/runner/runner.py",
        "self.max_model_len = longest_held(self.num_blocks, windows, block_size, chunk)",
        "self.max_model_len = max_model_len",
        "tests/runner/test_memory.py -k lowered",
    ),
    Fault(
        "a profile is chosen whose weights leave no room for a request",
        "minillm/engine/profiles.py",
        "return Choice(profiles, exact if exact.requests else profiles[-1]",
        "return Choice(profiles, exact",
        "tests/engine/test_profiles.py -k too_small",
    ),
    Fault(
        "every position of a request draws the same random number",
        SAMPLER,
        "mix(mixed + positions.astype(np.uint64))",
        "mix(mixed)",
        "tests/runner/test_sampler.py -k uniforms",
    ),
    Fault(
        "presence and frequency penalties count prompt tokens",
        SAMPLER,
        "output = ((place >= prompt[:, None]) & (place",
        "output = ((place >= 0) & (place",
        "tests/runner/test_sampler.py -k 'distribution and presence_penalty'",
    ),
    Fault(
        "the repetition penalty raises negative logits",
        SAMPLER,
        "torch.where(seen > 0, seen / repetition, seen * repetition)",
        "seen / repetition",
        "tests/runner/test_sampler.py -k 'distribution and repetition_penalty'",
    ),
    Fault(
        "min_tokens bans the stop token for one token too many",
        SAMPLER,
        "lengths - prompt < columns.min_tokens[rows]",
        "lengths - prompt <= columns.min_tokens[rows]",
        "tests/runner/test_sampler.py -k 'distribution and min_tokens'",
    ),
    Fault(
        "min_p is applied before the temperature",
        SAMPLER,
        "shaped < torch.log(min_p[0])",
        "shaped * self._tensor(columns.temperature[rows]).to(dtype)[:, None] < torch.log(min_p[0])",
        "tests/runner/test_sampler.py -k 'distribution and min_p'",
    ),
    Fault(
        "a parameter of 0 leaves the previous request's value in the row",
        STATE,
        "column[row] = getattr(params, name)",
        "column[row] = getattr(params, name) or column[row]",
        "tests/runner/test_sampler.py -k request_before",
    ),
    Fault(
        "a greedy row keeps the previous request's temperature",
        STATE,
        "self.temperature[row] = params.temperature",
        "self.temperature[row] = params.temperature or self.temperature[row]",
        "tests/runner/test_sampler.py -k request_before",
    ),
    Fault(
        "a row with a new block continues with the previous step's block table",
        "minillm/runner/runner.py",
        "step.table_changes is None\n        and not step.admitted",
        "not step.admitted",
        "tests/engine/test_engine.py -k batching_and_run_ahead",
    ),
    Fault(
        "prompt scores include the first output token",
        SCORES,
        "int(state.prompt_length[row]) - 1)",
        "int(state.prompt_length[row]))",
        "tests/engine/test_engine.py -k logprobs_equal",
    ),
    Fault(
        "log-probabilities are computed in half precision",
        SCORES,
        "logprobs = widened(logits).log_softmax(dim=-1)",
        "logprobs = logits.log_softmax(dim=-1)",
        "tests/runner/test_sampler.py -k logprobs",
    ),
    Fault(
        "the cache takes the memory reserved for graphs",
        "minillm/runner/memory.py",
        "- self.workspace - self.graphs",
        "- self.workspace",
        "tests/runner/test_memory.py -k 'cache_gets'",
    ),
    Fault(
        "a plan made with other versions is accepted",
        "minillm/runner/plan.py",
        '{"GPU": _words(gpu_here(device)), **versions_here()}',
        '{"GPU": _words(gpu_here(device))}',
        "tests/runner/test_plan.py -k versions",
    ),
    Fault(
        "a graph with one row too few is chosen",
        "minillm/runner/mixed_graphs.py",
        "and shape.prompts >= prompts",
        "and shape.prompts >= prompts - 1",
        "tests/runner/test_mixed_graphs.py -k smallest_shape",
    ),
    Fault(
        "a decode graph uses positions that another graph has changed",
        "minillm/runner/mixed_graphs.py",
        "        self.decodes.forget_positions()\n",
        "",
        "tests/runner/test_mixed_graphs.py -k positions_anew",
    ),
    Fault(
        "a captured step overwrites the token of the step before, which the host has not read yet",
        STATE,
        "torch.zeros((rows + 1, MOST_AHEAD + 1), dtype=torch.int32)",
        "torch.zeros((rows + 1, 1), dtype=torch.int32)",
        "tests/runner/test_decode_graphs.py -k until_they_are_read",
    ),
)
