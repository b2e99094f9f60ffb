"""A report from its beginning to its files: the page, and the record with all measurements next to it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from minillm.bench import records
from minillm.engine.llm import LLM
from minillm.errors import ConfigError
from minillm.evaluate.compare import check_options, unquantized
from minillm.model.loader import EMBEDDED
from minillm.pretrained import model_name, origin

from . import measure, page
from .settings import check_packages, settle


def run(
    model: str | Path | None = None,
    *,
    out: str | Path = "report.html",
    quick: bool = False,
    versions: Sequence[str] = (),
    task: str | None = None,
    limit: int | None = None,
    scale: int | None = None,
    requests: int | None = None,
    served: Sequence[str] = (),
    price: float | None = None,
    say: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> dict[str, Any]:
    """Measure a model, write the page to `out` and the record next to it (.json), and return the record.  Lesson 99.

    model     a directory in Hugging Face's layout, not quantized; None: the embedded tiny-gemma
    quick     few questions and short runs
    versions  what to compare, as `minillm eval --compare`; default: all methods that fit the model
    task      isles, mmlu, mmlu_SUBJECT or a directory in MMLU's layout; default: mmlu if `datasets` has it here, else
              isles
    limit     most questions
    scale     divide the workloads' lengths by this
    requests  of a workload
    served    versions to serve; default: the unquantized one
    price     dollars for an hour of the machine or its GPU
    say       called with a line before each part
    options   of the engine

    A part that fails is in the record's `failures` and on the page; the others go on. Raises MissingPackage;
    ConfigError before anything is measured: for the model, an option, or files that cannot be written.
    """
    check_packages()
    check_options(options)
    file = Path(out)
    if file.suffix not in (".html", ".htm"):
        raise ConfigError(f"--out {out} must end in .html: the record is written next to it, as .json")
    source, target = unquantized(model), file.with_suffix(".json")
    records.check_writable(file)
    begun = records.begin(target)
    with LLM(source, **options) as llm:
        facts = measure.facts(llm, source)
        gpu = facts["device"] != "cpu"
        settings = settle(
            source,
            facts["context"],
            gpu=gpu,
            quick=quick,
            speed=measure.prompt_speed(llm) if quick and not gpu else None,
            versions=versions,
            task=task,
            limit=limit,
            scale=scale,
            requests=requests,
            served=served,
            price=price,
        )
        chosen, left_out = measure.versions_of(llm, source, settings, options, usual=not versions)
    for name, why in left_out.items():
        say(f"{name} is left out: {why}")
    measured = measure.measure(source, chosen, settings, options, say)
    content = records.record(measured.rows, begun)
    content |= {
        "model": model_name(source.resolve()),
        "remark": rounded_before.remark if (rounded_before := origin(source)) else "",
        "embedded": source == EMBEDDED,
        "compared": [version.name for version in chosen],
        "left_out": left_out,
        "facts": facts,
        "settings": asdict(settings),
        "threads": torch.get_num_threads(),
        "other_programs_cores": measured.other_cores,
        "failures": measured.failures,
        "record": target.name,
    }
    records.write(content, target)
    file.write_text(page.render(content), encoding="utf-8")
    return content
