"""Drafts by a smaller model with the same tokenizer, which has a cache of its own.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding". A draft is sampled as its request
samples, with the number of its seed and position, so where both models think alike they agree.

The draft model runs behind the scheduler's back: it is asked for drafts, sees how far a request's tokens have come, and
catches up. Its keys and values of tokens that turned out otherwise are overwritten, as in the engine's own cache. A
request that it has not seen yet, whether it is new, had a cached prefix or was preempted, runs through it whole. When
its blocks run out, those of the request go that was asked for the longest time ago.
"""

import json
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from minillm.config import DeviceConfig
from minillm.errors import ConfigError
from minillm.kv_cache.block_pool import BlockPool
from minillm.kv_cache.block_tables import BlockTables
from minillm.kv_cache.layer_groups import blocks_held
from minillm.model.config import ModelConfig
from minillm.model.loader import read_config, resolve
from minillm.request import SamplingParams
from minillm.scheduler.step import NewRow, Step
from minillm.speculation import PROPOSERS, Asked
from minillm.tokenizer import Tokenizer

from .executor import LocalExecutor
from .launched import StepInFlight

HEAD_FILE = "draft_head.json"  # in the draft's directory: a JSON list of the tokens that its head has
CACHE_BYTES = 1 << 30  # for keys and values, at most
IN_FLIGHT = 16  # steps launched before the first one is read


class DraftModel:
    """A proposer that runs a model: one step for all rows and one more for each further draft.

    source: the draft model, as `resolve` returns it. target: the engine's model. config: the engine's options.
    head: tokens to which the draft's head is cut, as `head_tokens` reads them. Raises ConfigError.
    """

    slow = True  # drafts take time: see `Proposer`

    def __init__(
        self,
        source: Path | str,
        target: ModelConfig,
        config: DeviceConfig,
        max_model_len: int,
        head: Sequence[int] | None = None,
    ):
        described = read_config(source)
        if described.vocab_size != target.vocab_size:
            raise ConfigError(
                f"speculate={str(source)!r} has a vocabulary of {described.vocab_size:,} tokens and the model one of "
                f"{target.vocab_size:,}: a draft model needs the tokenizer of the model that it drafts for"
            )
        self.longest = min(max_model_len, described.max_model_len)
        rows, size = config.max_num_seqs, config.block_size
        alone = replace(
            config,
            speculate="off",
            speculate_head=None,
            quantization=None,
            quantized_head=None,
            kv_cache_dtype="auto",
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            pipeline_parallel_size=1,
            exact=False,  # drafts may be anything
            max_model_len=self.longest,
            num_blocks=_blocks(described, config, self.longest),
            adapters=(),
            max_loras=None,
            plan=None,
            trace=None,
        )
        self.executor = LocalExecutor(source, alone, head=head)
        facts = self.executor.facts
        self.most_tokens = config.max_num_batched_tokens
        self.pool = BlockPool(facts.num_blocks)
        self.tables = BlockTables(rows, self.longest, size, facts.windows, self.most_tokens)
        self.tokens = np.zeros((rows, self.longest + 1), np.int32)  # as the device has them
        self.known = np.zeros(rows, np.int32)  # how many of them
        self.asked = np.zeros(rows, np.int32)  # how many of those are the request's own, the others being drafts
        self.computed = np.zeros(rows, np.int32)  # tokens whose keys and values are in the cache
        self.rows: OrderedDict[str, int] = OrderedDict()  # of each request, the one asked for last at the end
        self._free = list(range(rows))
        self._new: dict[str, NewRow] = {}
        self._steps = 0

    def propose(self, asked: Sequence[Asked]) -> list[list[int]]:
        """As the protocol says. Requests longer than the draft's context get none."""
        try:
            return self._propose(asked)
        except BaseException:
            for request_id in list(self.rows):  # what a failed step has written is not known
                self.forget(request_id)
            raise

    def forget(self, request_id: str) -> None:
        self._new.pop(request_id, None)
        row = self.rows.pop(request_id, None)
        if row is not None:
            self.pool.release(self.tables.vacate(row))
            self._free.append(row)

    def close(self) -> None:
        self.executor.close()

    def _propose(self, asked: Sequence[Asked]) -> list[list[int]]:
        proposals: list[list[int]] = [[] for _ in asked]
        indices = [i for i, each in enumerate(asked) if len(each.tokens) < self.longest]
        if not indices:
            return proposals
        self._take_rows([asked[i] for i in indices])
        rows = np.array([self.rows[asked[i].request_id] for i in indices], np.int32)
        counts = np.array([len(asked[i].tokens) for i in indices], np.int32)
        most = np.minimum([asked[i].most for i in indices], self.longest - counts)
        self._update([asked[i].tokens for i in indices], rows, counts)
        kept = self._give_blocks([asked[i].request_id for i in indices], rows, counts + most - 1)
        # Those with the least to catch up go first; what the token budget leaves out goes on the next time.
        order = kept[np.argsort((counts - self.computed[rows])[kept], kind="stable")]
        rows, counts, most = rows[order], counts[order], most[order]
        pending = counts - self.computed[rows]
        queries = np.clip(self.most_tokens - np.cumsum(pending) + pending, 0, pending)
        running = queries > 0
        order, rows, counts, most, queries = (each[running] for each in (order, rows, counts, most, queries))
        if not len(rows):
            return proposals
        drafts = self._run(rows, queries, counts, most)
        for i, tokens, count in zip(order.tolist(), drafts.tolist(), most.tolist(), strict=True):
            tokens = tokens[:count]
            proposals[indices[i]] = tokens[: tokens.index(-1)] if -1 in tokens else tokens
        return proposals

    # ---- a request's row: tokens, keys and values

    def _take_rows(self, asked: Sequence[Asked]) -> None:
        """Give a row to each request, if necessary that of one that is not among them."""
        for each in asked:
            if each.request_id in self.rows:
                self.rows.move_to_end(each.request_id)
        for each in asked:
            if each.request_id in self.rows:
                continue
            if not self._free:
                self.forget(next(iter(self.rows)))
            row, count = self._free.pop(), len(each.tokens)
            self.rows[each.request_id] = row
            self.tokens[row, :count] = each.tokens
            self.known[row] = self.asked[row] = count
            self.computed[row] = 0
            params = _sampled_as(each.params)
            new = NewRow(row, each.tokens.copy(), each.prompt_length, params, each.seed, each.stop_ids)
            self._new[each.request_id] = new

    def _update(self, tokens: Sequence[np.ndarray], rows: np.ndarray, counts: np.ndarray) -> None:
        """Bring the rows' tokens up to date, and take back what was computed from others."""
        first = np.minimum(self.asked[rows], counts - 1)
        spans = counts - first
        starts = np.cumsum(spans) - spans
        newest = np.concatenate([each[begin:] for each, begin in zip(tokens, first.tolist(), strict=True)])
        at = np.repeat(rows, spans)
        positions = np.arange(len(newest)) - np.repeat(starts - first, spans)
        wrong = (positions >= self.known[at]) | (self.tokens[at, positions] != newest)
        right = np.minimum.reduceat(np.where(wrong, positions, np.repeat(counts, spans)), starts)
        self.computed[rows] = np.minimum(np.minimum(self.computed[rows], right), counts - 1)
        if wrong.any():
            self.tokens[at[wrong], positions[wrong]] = newest[wrong]
            self.executor.runner.put(at[wrong], positions[wrong], newest[wrong])
        self.known[rows] = self.asked[rows] = counts

    def _give_blocks(self, requests: Sequence[str], rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Give blocks to the rows [n] for their first `ends` [n] tokens. Returns the indices of those that got them.

        The others give up their row.
        """
        kept = np.arange(len(rows))
        while len(kept):
            short = kept[ends[kept] > self.tables.covered[rows[kept]]]
            if not len(short) or self.tables.grow(rows[short], ends[short], self.pool) is not None:
                break
            oldest = next(iter(self.rows))
            if oldest in requests:
                oldest = requests[kept[-1]]
                kept = kept[:-1]
            self.forget(oldest)
        return kept

    # ---- steps

    def _run(self, rows: np.ndarray, queries: np.ndarray, counts: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Run the rows [n] up to their `counts` [n] tokens, and on from there: their drafts [n, largest of most].

        -1 where a row has none.
        """
        drafts = np.full((len(rows), int(most.max())), -1, np.int64)
        caught_up = self.computed[rows] + queries == counts
        steps: deque[tuple[int, np.ndarray, StepInFlight]] = deque()

        def read() -> None:
            index, going, step = steps.popleft()
            drafts[going, index] = step.wait().tokens[:, 0]

        order = np.argsort(queries != 1, kind="stable")
        first = self._launch(rows[order], queries[order], caught_up[order])
        steps.append((0, order[caught_up[order]], first))
        for index in range(1, drafts.shape[1]):
            going = np.flatnonzero(caught_up & (most > index))
            if not len(going):
                break
            ones = np.ones(len(going), np.int32)
            steps.append((index, going, self._launch(rows[going], ones, ones > 0)))
            if len(steps) > IN_FLIGHT:
                read()
        while steps:
            read()
        drafted = np.maximum(drafts, 0)
        at = counts[:, None] + np.arange(drafts.shape[1])
        written = caught_up[:, None] & (at < (counts + most)[:, None])
        self.tokens[np.broadcast_to(rows[:, None], at.shape)[written], at[written]] = drafted[written]
        self.known[rows] = counts + np.where(caught_up, most, 0)
        return drafts

    def _launch(self, rows: np.ndarray, queries: np.ndarray, samples: np.ndarray) -> StepInFlight:
        decodes = int((queries == 1).sum())
        step = Step(self._steps, rows, self.computed[rows], queries, samples, decodes)
        step.new_rows, step.table_changes = list(self._new.values()), self.tables.take_changes()
        self._new.clear()
        self._steps += 1
        self.computed[rows] += queries
        return self.executor.launch(step)


def loaded(config: DeviceConfig, target: ModelConfig, tokenizer: Tokenizer | None) -> DraftModel | None:
    """Return the draft model that the option `speculate` names; None if it names none. Raises ConfigError."""
    if config.speculate in ("off", *PROPOSERS):
        if config.speculate_head is not None:
            raise ConfigError(f"speculate_head is for a draft model, and speculate={config.speculate!r} has none")
        return None
    source = resolve(config.speculate)
    check_same_tokenizer(source, tokenizer)
    head = head_tokens(source, config.speculate_head, target.vocab_size)
    return DraftModel(source, target, config, config.max_model_len or target.max_model_len, head)


def _sampled_as(params: SamplingParams) -> SamplingParams:
    """Return the parameters of a request's drafts: those of its tokens, without a grammar."""
    return SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        min_tokens=params.min_tokens,
    )


def _blocks(described: ModelConfig, config: DeviceConfig, longest: int) -> int:
    """Blocks for all rows at full length, or as many as CACHE_BYTES hold, and at least those of one row."""
    windows = described.groups(longest).windows
    request = blocks_held(longest, (None,) * len(windows), config.block_size)
    token = 2 * 4 * described.groups(longest).size * described.num_kv_heads * described.head_dim
    return max(request, min(config.max_num_seqs * request, CACHE_BYTES // (token * config.block_size)))


def check_same_tokenizer(draft: Path | str, own: Tokenizer | None) -> None:
    """Raise ConfigError if the draft's directory has a tokenizer whose tokens are others than the model's."""
    if own is None or isinstance(draft, str) or not (draft / "tokenizer.json").exists():
        return
    other = Tokenizer.from_pretrained(draft)
    for id in range(max(own.vocab_size, other.vocab_size)):
        names = [each.token(id) if id < each.vocab_size else None for each in (own, other)]
        if names[0] != names[1]:
            raise ConfigError(
                f"speculate={str(draft)!r} has another tokenizer than the model: token {id} is {names[1]!r} there and "
                f"{names[0]!r} here; a draft model needs the tokenizer of the model that it drafts for"
            )


def head_tokens(draft: Path | str, file: str | None, vocab_size: int) -> list[int] | None:
    """Return the tokens that the draft's head has, in ascending order; None: all.

    file: a JSON list of token ids; default: the one in the draft's directory, if there is one. Raises ConfigError.
    """
    path = Path(file) if file is not None else None if isinstance(draft, str) else draft / HEAD_FILE
    if path is None or (file is None and not path.exists()):
        return None
    try:
        tokens = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"speculate_head={str(path)!r} cannot be read as JSON: {error}") from None
    ids = isinstance(tokens, list) and all(type(each) is int and 0 <= each < vocab_size for each in tokens)
    if not ids or not tokens or len(set(tokens)) < len(tokens):
        raise ConfigError(
            f"speculate_head={str(path)!r} must be a JSON list of different token ids from 0 to {vocab_size - 1}"
        )
    return sorted(tokens)


def frequent_tokens(ids: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """The `count` most frequent tokens of a text [n], the lower id first where two are equally frequent: ascending.

    Zhao et al. 2025, "FR-Spec", section 3.2: a draft's head needs no row for a token that it hardly ever drafts.
    """
    counts = np.bincount(np.asarray(ids, np.int64), minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:count]).tolist()
