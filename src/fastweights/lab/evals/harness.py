"""lm-evaluation-harness 0.4.13: our models in it, and local files as its tasks, without a
network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from fastweights.lab.evals.answers import answers
from fastweights.lab.evals.items import Choice, Ending, Item, Prompt
from fastweights.lab.evals.likelihood import Likelihood, Query, boundary, likelihood
from fastweights.lab.tasks.questions import Question
from fastweights.models import FastWeightsCache, FastWeightsForCausalLM
from fastweights.models.cache_names import cache_argument
from fastweights.models.evaluation import evaluation_mode
from fastweights.training.language.perplexity import token_losses

GENERATED = 256
"""Tokens of an answer where a task does not say: the harness's own number."""
_MATCHING = "from fastweights.lab.evals.harness import accuracy\n"


class HarnessModel(TemplateLM):
    """A model in the form that lm-evaluation-harness evaluates.

    Every context is read once for all of its continuations, which continue from its state; texts of
    any length are read whole, with the state carried along, instead of in windows.

    Attributes:
        batch: Contexts, texts or prompts at once.
    """

    def __init__(
        self, model: FastWeightsForCausalLM, tokenizer: PreTrainedTokenizerBase, batch: int = 16
    ) -> None:
        super().__init__()
        self.model, self.tokenizer, self.batch = model, tokenizer, batch

    @property
    def eot_token_id(self) -> int:
        return boundary(self.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        return self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        queries = [Query(context, continuation) for _, context, continuation in requests]
        order = sorted(
            range(len(queries)), key=lambda i: (len(queries[i].context), queries[i].context)
        )
        groups = [list(group) for _, group in groupby(order, key=lambda i: queries[i].context)]
        found: dict[int, Likelihood] = {}
        with evaluation_mode(self.model):
            for first in range(0, len(groups), self.batch):
                chosen = groups[first : first + self.batch]
                together = [[queries[i] for i in group] for group in chosen]
                found |= zip(
                    (i for group in chosen for i in group),
                    self._score_groups(together),
                    strict=True,
                )
        return [(-found[i].nll, found[i].greedy) for i in range(len(queries))]

    def _score_groups(self, groups: Sequence[Sequence[Query]]) -> Iterator[Likelihood]:
        """Of the queries of all groups, in order; those of a group have their context in common.

        The last token of a context is fed with the continuation, whose first token it predicts.
        """
        cache = self._read([group[0].context[:-1] for group in groups])
        if len(cache):
            cache.batch_select_indices(
                torch.tensor([row for row, group in enumerate(groups) for _ in group])
            )
        queries = [query for group in groups for query in group]
        rows = [torch.tensor(query.context[-1:] + query.continuation) for query in queries]
        ids = pad_sequence([row[:-1] for row in rows], batch_first=True).to(self.model.device)
        logits = self.model(
            input_ids=ids, use_cache=False, return_dict=True, **cache_argument(cache)
        ).logits
        return (
            likelihood(scores[: len(row) - 1], row[1:])
            for row, scores in zip(rows, logits, strict=True)
        )

    def _read(self, prefixes: Sequence[list[int]]) -> FastWeightsCache:
        """The states after the prefixes, which are padded on the left."""
        cache, longest = FastWeightsCache(), max(map(len, prefixes))
        if longest:
            ids = _pad_left(prefixes, longest, 0).to(self.model.device)
            keep = _pad_left([[1] * len(prefix) for prefix in prefixes], longest, 0).to(
                self.model.device
            )
            self.model(ids, keep, cache, use_cache=True, logits_to_keep=1)
        return cache

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Sum log p of every token of each text, after the token that documents begin after."""
        return [self._log_likelihood(request.args[0]) for request in requests]

    def _log_likelihood(self, text: str) -> float:
        ids = torch.tensor([[self.prefix_token_id, *self.tok_encode(text)]])
        return -float(token_losses(self.model, ids, chunk=512).double().sum())

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate greedy answers.

        Raises:
            ValueError: If the task samples its answers.
        """
        return [
            text
            for _, same in groupby(requests, key=_ending)
            for text in self._answer_requests(list(same))
        ]

    def _answer_requests(self, requests: Sequence[Instance]) -> list[str]:
        until, tokens = _ending(requests[0])
        prompts = [request.args[0] for request in requests]
        return answers(
            self.model,
            self.tokenizer,
            prompts,
            until=until,
            tokens=tokens,
            context=None,
            batch=self.batch,
        )


def _ending(request: Instance) -> tuple[tuple[str, ...], int]:
    """(what ends an answer, its tokens at most)"""
    _, arguments = cast(tuple[str, dict[str, Any]], request.args)
    if arguments.get("do_sample") or arguments.get("temperature", 0) > 0:
        raise ValueError(
            f"the task samples its answers ({arguments}); this adapter generates greedily only"
        )
    until = arguments.get("until") or ()
    return (until,) if isinstance(until, str) else tuple(until), int(
        arguments.get("max_gen_toks", GENERATED)
    )


def _pad_left(rows: Sequence[list[int]], length: int, value: int) -> Tensor:
    return torch.tensor([[value] * (length - len(row)) + list(row) for row in rows])


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
    model: FastWeightsForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
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
            fields = {
                "doc_to_text": "gold",
                "doc_to_choice": "options",
                "doc_to_target": "{{ending}}",
            }
            return {"output_type": "multiple_choice", **fields, "metric_list": _means("acc")}
        case Choice():
            fields = {"doc_to_text": context, "doc_to_choice": "options", "doc_to_target": "gold"}
            return {
                "output_type": "multiple_choice",
                **fields,
                "metric_list": _means("acc", "acc_norm"),
            }
        case Ending():
            fields = {"doc_to_text": context, "doc_to_target": "{{ending}}", "target_delimiter": ""}
            perplexity = {
                "metric": "perplexity",
                "aggregation": "perplexity",
                "higher_is_better": False,
            }
            return {
                "output_type": "loglikelihood",
                **fields,
                "metric_list": [perplexity, *_means("acc")],
            }
        case Prompt():
            fields = {
                "doc_to_text": context,
                "doc_to_target": "{{answers[0]}}",
                "process_results": "!matching",
            }
            how = item.answering
            generation = {"until": [how.stop], "max_gen_toks": how.tokens, "do_sample": False}
            return {
                "output_type": "generate_until",
                **fields,
                "generation_kwargs": generation,
                "metric_list": _means("acc"),
            }


def _means(*metrics: str) -> list[dict[str, Any]]:
    return [
        {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in metrics
    ]
