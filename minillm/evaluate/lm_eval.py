"""minillm's engine as a model of lm-evaluation-harness: `lm_eval --model minillm`.  Lesson 05.

    lm_eval --model minillm --model_args pretrained=DIRECTORY,dtype=float32 --tasks mmlu

Releases of the harness after 0.4.13 find the class by its entry point, in the group `lm_eval.models`. Release 0.4.13
knows only its own models; there, this module is the same command line with ours added:

    python -m minillm.evaluate.lm_eval --model minillm --model_args pretrained=DIRECTORY --tasks mmlu

Interface: EleutherAI, lm-evaluation-harness, docs/model_guide.md.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from minillm.engine.llm import LLM
from minillm.errors import ConfigError
from minillm.request import SamplingParams

from .accuracy import next_tokens
from .perplexity import prompt_logprob
from .prompts import tokenizer_of

# A request that the harness scores: its strings (None for a window of a longer text), context and continuation.
Scored = tuple[tuple[str, str] | None, list[int], list[int]]
SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty", "seed")  # of a task's generation arguments
DEFAULT_DEVICE = "cuda:0"  # what the harness's command line says if it is given no device
OUTPUT_TOKENS = 256  # of tasks that set no limit, as for the harness's other models


@register_model("minillm")
class MinillmLM(TemplateLM):
    """Scores and generates with `LLM`. Texts are encoded and truncated as the harness does for transformers' models.

    pretrained  a model's directory; default: the embedded tiny-gemma. Other arguments are the engine's options
    prefix_token_id  what empty contexts and rolling windows begin with, as for transformers' models; default: the
                tokenizer's bos_token, even if the tokenizer does not add it, or else eos_token
    device      the engine's; the harness's default is taken as "auto": the first GPU, or the CPU
    batch_size, max_batch_size  ignored: the engine chooses its own batches
    trust_remote_code  ignored: code that comes with a model never runs

    The engine needs room for one more token, so `max_length`, the longest context of a scored token, is 2 less than
    that of the model. Only longer requests differ from transformers', by what they leave out on the left.
    Raises ConfigError.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: str | None = None,
        prefix_token_id: int | None = None,
        trust_remote_code: object = None,
        **options: Any,
    ):
        super().__init__()
        self.llm = LLM(pretrained, device="auto" if device in (None, DEFAULT_DEVICE) else device, **options)
        self.tokenizer = tokenizer_of(self.llm)
        self.max_length = self.llm.engine.max_model_len - 2
        self.batch_size = batch_size
        self.name = str(pretrained or "tiny-gemma")
        self.custom_prefix_token_id = prefix_token_id
        if prefix_token_id is not None:
            self.tokenizer.token(prefix_token_id)  # raises for an id that does not exist

    @property
    def tokenizer_name(self) -> str:
        """Part of the name of the harness's request cache."""
        return self.name.replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        if (token := self.tokenizer.eos_token_id) is None:
            raise ConfigError("the tokenizer names no eos_token: add it to tokenizer_config.json")
        return token

    @property
    def prefix_token_id(self) -> int:
        """Return the token that empty contexts and texts begin with."""
        if self.custom_prefix_token_id is not None:
            return self.custom_prefix_token_id
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness stores with its results."""
        return {"prefix_token_id": self.prefix_token_id}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """By default, <bos> is added unless the text has it."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.token(self.prefix_token_id))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether each of its tokens is the most likely one.

        Requests that end in one token share a forward pass if all before it is equal: the options of a question.
        """
        scores: dict[int, tuple[float, bool]] = {}
        single: dict[tuple[int, ...], dict[int, list[int]]] = {}  # prompt -> next token -> requests
        longer: dict[int, list[int]] = {}  # request -> its tokens
        for i, (_strings, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ConfigError(f"a continuation has {len(continuation)} tokens; the most are {self.max_length}")
            whole = (context + continuation)[-(self.max_length + 1) :]
            if len(continuation) == 1:
                single.setdefault(tuple(whole[:-1]), {}).setdefault(continuation[0], []).append(i)
            else:
                longer[i] = whole
        tokens = [list(each) for each in single.values()]
        expected = next_tokens(self.llm, list(single), tokens, not disable_tqdm) if single else []
        for each, asked in zip(expected, single.values(), strict=True):
            for (token, indices), logprob in zip(asked.items(), each.logprobs, strict=True):
                scores |= dict.fromkeys(indices, (logprob, token == each.likeliest))
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        scored = self.llm.generate(list(longer.values()), params, progress=not disable_tqdm) if longer else []
        for i, done in zip(longer, scored, strict=True):
            continuation = requests[i][2]
            positions = range(-len(continuation), 0)
            logprobs = [prompt_logprob(done, at, continuation[at]) for at in positions]
            best = [max((entry or {}).values()) for entry in (done.prompt_logprobs or [])[-len(continuation) :]]
            scores[i] = sum(logprobs), logprobs == best
        results = [scores[i] for i in range(len(requests))]
        for (strings, *_tokens), result in zip(requests, results, strict=True):
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, result)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, in windows of `max_length` tokens that score each token once."""
        texts = [request.args[0] for request in requests]
        windows: list[Scored] = []
        owners = []
        for i, text in enumerate(texts):
            spans = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            for context, continuation in map(make_disjoint_window, spans):
                windows.append((None, list(context), list(continuation)))
                owners.append(i)
        totals = [0.0] * len(texts)
        for i, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[i] += logprob
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text after each context, up to the first of its stop strings, an end token or its limit of
        tokens.
        """
        prompts, params = [], []
        for context, options in (request.args for request in requests):
            wanted = dict(normalize_gen_kwargs(options, OUTPUT_TOKENS))
            most, stop = wanted.pop("max_gen_toks"), [each for each in wanted.pop("until", []) if each]
            sampled, temperature = wanted.pop("do_sample", False), wanted.pop("temperature", 1.0)
            if unknown := sorted(wanted.keys() - set(SAMPLING)):
                raise ConfigError(f"no generation argument {', '.join(unknown)}; there are: {', '.join(SAMPLING)}")
            longest = self.llm.engine.max_model_len - most
            if longest < 1:
                raise ConfigError(f"max_gen_toks={most} leaves no room for a prompt: give at most {longest + most - 1}")
            prompts.append(self.tok_encode(context)[-longest:])
            wanted["temperature"] = temperature if sampled else 0.0
            params.append(SamplingParams(max_tokens=most, stop=stop, **wanted))
        done = self.llm.generate(prompts, params, progress=not disable_tqdm) if prompts else []
        for request, each in zip(requests, done, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, each.text)
        return [each.text for each in done]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the conversation as a prompt; without `add_generation_prompt`, the last message is to be continued."""
        text = self.tokenizer.apply_chat_template(chat_history, add_generation_prompt)
        last = chat_history[-1]["content"].strip()
        return text if add_generation_prompt else text[: text.rindex(last) + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The harness only stores it with its results; what fills it in is `apply_chat_template`."""
        return "of the model's directory" if chat_template else None


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
