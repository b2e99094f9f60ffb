"""Measure how good a model is, through the engine: perplexity and multiple-choice accuracy.  Lesson 05.

What measures a model's answers belongs here. Speed does not (`bench`), and neither does quantizing (`calibration`).

accuracy(llm)       share of questions whose right letter is the most likely, after MMLU's few-shot prompt
perplexity(llm)     of a text, with a sliding window
quality(llm)        both, on the embedded data sets, as `minillm eval` reports them
compare()           what each quantization method loses, as `minillm eval --compare` reports it
streaming()         perplexity beyond the context, with attention sinks and without
load_questions()    the embedded question sets, or `cais/mmlu`
load_text()         the embedded held-out text
load_trace()        the embedded traffic trace
"""

from .accuracy import accuracy, letter_logprobs
from .compare import compare, paired_loss
from .perplexity import perplexity, windows
from .prompts import LETTERS, few_shot_prompt, header, question_block
from .quality import quality
from .sources import load_questions, load_text, load_trace
from .streaming import streaming
from .tasks import workloads

__all__ = [
    "LETTERS",
    "accuracy",
    "compare",
    "few_shot_prompt",
    "header",
    "letter_logprobs",
    "load_questions",
    "load_text",
    "load_trace",
    "paired_loss",
    "perplexity",
    "quality",
    "question_block",
    "streaming",
    "windows",
    "workloads",
]
