"""lm-evaluation-harness 0.4.13: our models in it, and local files as its tasks, without a
network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from fastweights.lab.evals.items import Choice, Ending, Item, Prompt
from fastweights.lab.evals.likelihood import boundary
from fastweights.lab.tasks.questions import Question

LONGEST = 1 << 20
"""Tokens of a text that is read whole."""
_Reader: Any = HFLM  # whose type a decorator hides
_MATCHING = "from fastweights.lab.evals.harness import accuracy\n"


class HarnessModel(_Reader):
    """A causal language model, ours or transformers', as lm-evaluation-harness's own `hf` reads it.

    Texts are read whole, however long they are, and tokens as `query` has them: nothing is put
    before a text, and an empty context is the token that separates documents.

    Args:
        model: The language model.
        tokenizer: Its tokenizer.
        batch: Contexts, texts or prompts at once.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, batch: int = 16
    ) -> None:
        super().__init__(
            model,
            backend="causal",
            tokenizer=tokenizer,
            max_length=LONGEST,
            batch_size=batch,
            add_bos_token=False,
            prefix_token_id=boundary(tokenizer),
        )

    @property
    def eot_token_id(self) -> int:
        return boundary(self.tokenizer)


def export(tasks: Mapping[str, Sequence[Item]], folder: Path) -> None:
    """Write a harness task for each name: NAME.jsonl with its documents, and NAME.yaml.

    Any harness runs them, with ``--include_path FOLDER`` or ``TaskManager(include_path=FOLDER)``.

    Args:
        tasks: The items of each task.
        folder: The folder to write to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "matching.py").write_text(_MATCHING)
    for name, items in tasks.items():
        data = (folder / f"{name}.jsonl").absolute()
        data.write_text(
            "".join(json.dumps(_document(item)) + "\n" for item in items), encoding="utf-8"
        )
        (folder / f"{name}.yaml").write_text(_yaml(name, items[0], data), encoding="utf-8")


def run_harness(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    names: Iterable[str],
    *,
    limit: int | None = None,
    batch: int = 16,
) -> dict[str, Any]:
    """Run the harness on tasks that `export` wrote, and return its own record (``results``,
    ``samples``, …).

    Args:
        model: The language model.
        tokenizer: Its tokenizer.
        folder: The folder that `export` wrote to.
        names: Names of the tasks.
        limit: Items per task, its first ones; None for all.
        batch: Contexts, texts or prompts at once.
    """
    evaluate: Any = simple_evaluate
    return evaluate(
        model=HarnessModel(model, tokenizer, batch),
        tasks=list(names),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        limit=limit,
        bootstrap_iters=0,
    )


def accuracy(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Score the answer to a prompt, as the exported tasks do."""
    prompt = Prompt(
        Question(document["context"], tuple(document["answers"])), exact=document["exact"]
    )
    return {"acc": float(prompt.right(results[0]))}


def _document(item: Item) -> dict[str, Any]:
    match item:
        case Choice(partial=True):
            return {"options": item.contexts, "ending": item.continuations[0], "gold": item.gold}
        case Choice():
            return {"context": item.contexts[0], "options": item.continuations, "gold": item.gold}
        case Ending():
            return {"context": item.context, "ending": item.continuation}
        case Prompt():
            return {
                "context": item.question.text,
                "answers": item.question.values,
                "exact": item.exact,
            }


def _yaml(name: str, item: Item, data: Path) -> str:
    """JSON is YAML; the harness's tag for a function is not JSON."""
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(data)},
            "cache_dir": str(data.parent / ".cache"),
        },
        "test_split": "test",
        **_form(item),
    }
    text = json.dumps(config, indent=1)
    return text.replace('"!matching"', "!function matching.accuracy") + "\n"


def _form(item: Item) -> dict[str, Any]:
    context = "{{context}}"
    match item:
        case Choice(partial=True):
            fields = {"doc_to_choice": "options", "doc_to_target": "{{ending}}"}
            return _scored("multiple_choice", "acc", doc_to_text="gold", **fields)
        case Choice():
            fields = {"doc_to_choice": "options", "doc_to_target": "gold"}
            return _scored("multiple_choice", "acc", "acc_norm", doc_to_text=context, **fields)
        case Ending():
            fields = {"doc_to_target": "{{ending}}", "target_delimiter": ""}
            found = _scored("loglikelihood", "acc", doc_to_text=context, **fields)
            loss = {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}
            return {**found, "metric_list": [loss, *found["metric_list"]]}
        case Prompt():
            fields = {"doc_to_target": "{{answers[0]}}", "process_results": "!matching"}
            how = {"until": [item.answering.stop], "max_gen_toks": item.answering.tokens}
            generation = {"generation_kwargs": {**how, "do_sample": False}}
            return _scored("generate_until", "acc", doc_to_text=context, **fields, **generation)


def _scored(output: str, *metrics: str, **fields: Any) -> dict[str, Any]:
    means = [
        {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in metrics
    ]
    return {"output_type": output, **fields, "metric_list": means}
