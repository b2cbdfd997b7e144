"""lm-evaluation-harness 0.4.13 scores models, ours and others', on the papers' suites."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from typing import Any, TypeVar

from lm_eval import evaluate
from lm_eval.api.samplers import ContextSampler
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from fastweights.lab.evals.harness_tasks import LoadedTask, without_remarks
from fastweights.lab.evals.likelihood import Query, boundary, likelihoods, query
from fastweights.lab.evals.suite_journal import SuiteJournal, SuitePart
from fastweights.lab.evals.suite_scores import ColumnScore, SuiteScores
from fastweights.lab.evals.suites import PER_QUESTION, PER_TOKEN, Suite
from fastweights.training.loop.report import Follow, unfollowed

LONGEST = 1 << 20
"""Tokens of a text that is read whole."""
BATCHES = 4
"""Batches of answers after which progress is told."""
_Reader: Any = HFLM  # whose type a decorator hides
Piece = TypeVar("Piece")


def _untold(share: float) -> None:
    """Tell nobody how much is done."""
    del share


class HarnessModel(_Reader):
    """A causal language model, ours or transformers', as lm-evaluation-harness's own `hf` reads it.

    Texts are read whole, however long they are, and tokens as `query` has them: nothing is put
    before a text, and an empty context is the token that separates documents.

    Args:
        model: The language model.
        tokenizer: Its tokenizer.
        batch: Contexts, texts or prompts at once.
        length: Tokens of a prompt with its answer, of which the prompt's last are read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        batch: int = 16,
        length: int = LONGEST,
    ) -> None:
        super().__init__(
            model,
            backend="causal",
            tokenizer=tokenizer,
            max_length=length,
            batch_size=batch,
            add_bos_token=False,
            prefix_token_id=boundary(tokenizer),
        )
        self.advance: Callable[[float], None] = _untold

    @property
    def eot_token_id(self) -> int:
        return boundary(self.tokenizer)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """The logits of continuations alone, where lm-eval has those of all tokens."""
        queries = [Query(before, after) for _, before, after in requests]
        read = [Query(x[-self.max_length - 1 + len(y) :], y) for x, y in queries]
        found = likelihoods(self.model, read, batch=int(self.batch_size), follow=self._follow)
        return [(-one.nll, one.greedy) for one in found]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].args[0]))
        size = BATCHES * int(self.batch_size)
        found: dict[int, str] = {}
        for first in self._follow(range(0, len(order), size), "answering"):
            chosen = order[first : first + size]
            answers = super().generate_until([requests[i] for i in chosen], disable_tqdm=True)
            found |= zip(chosen, answers, strict=True)
        return [found[i] for i in range(len(requests))]

    def _follow(self, pieces: Collection[Piece], what: str) -> Iterator[Piece]:
        """Tell of pieces by their share in all."""
        del what
        for piece in pieces:
            yield piece
            self.advance(1 / len(pieces))


class SharedPrefix(ContextSampler):
    """One random choice of solved examples, the same for all items (MesaNet, appendix J.2.3).

    An item that is among them itself is asked after another in its place.
    """

    def set_rnd(self, rnd: int | None) -> SharedPrefix:
        super().set_rnd(rnd)
        self.drawn: list[Any] = []
        return self

    def sample(self, n: int, eval_doc: Any = None, df: Any = None, **kwargs: Any) -> list[Any]:
        if len(self.drawn) != n + 1:
            self.drawn = self.rnd.sample(list(self.df), n + 1)
        return [one for one in self.drawn if one != eval_doc][:n]


def score_suite(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    suite: Suite,
    loaded: Sequence[LoadedTask],
    *,
    limit: int | None = None,
    batch: int = 16,
    seed: int = 0,
    follow: Follow = unfollowed,
    journal: SuiteJournal | None = None,
) -> SuiteScores:
    """Score a model on a suite by lm-evaluation-harness.

    Args:
        model: The language model.
        tokenizer: Its tokenizer.
        suite: The suite.
        loaded: Its tasks, as `load_tasks` returns them.
        limit: Items per task, its first ones; None for all.
        batch: Contexts, texts or prompts at once.
        seed: Seed of the first choice of solved examples; those after it have the next ones.
        follow: Told of every item.
        journal: Where finished parts are written down, and not scored again; None for nowhere.
    """
    with without_remarks():
        reader = HarnessModel(model, tokenizer, batch, suite.length or LONGEST)
    runs = [
        (task, list(_parts(suite, task, shots, seed, limit)))
        for task in loaded
        for shots in task.columns[0].shots
    ]
    told = _Told(iter(follow(range(sum(t.items(limit) * len(ps) for t, ps in runs)), "scoring")))
    scores = list[ColumnScore]()
    for task, parts in runs:
        found = list[list[ColumnScore]]()
        for part in parts:
            reader.advance = told.advance(task.items(limit))
            found.append(_score_part(reader, task, part, journal))
        scores += map(_joined, zip(*found, strict=True))
    told.end()
    order = [column.name for column in suite.columns]
    return SuiteScores(suite, tuple(sorted(scores, key=lambda one: order.index(one.column))))


def _parts(
    suite: Suite, task: LoadedTask, shots: int, seed: int, limit: int | None
) -> Iterator[SuitePart]:
    """One for each choice of solved examples."""
    shared, documents = suite.prefixes is not None, task.documents
    for one in range(seed, seed + (suite.prefixes or 1 if shots else 1)):
        yield SuitePart(task.columns, documents, shots, one, shared, limit, suite.length or LONGEST)


def _score_part(
    reader: HarnessModel, task: LoadedTask, part: SuitePart, journal: SuiteJournal | None
) -> list[ColumnScore]:
    """The scores of a part, from the journal if it is finished."""
    if journal and (known := journal.find(part)) is not None:
        reader.advance(1)
        return known
    _prepare(task, part.shots, part.seed, shared=part.shared)
    found = _evaluate(reader, task, part.limit)
    scores = list(_columns(task, part.shots, found, reader.tokenizer))
    if journal:
        journal.add(part, scores)
    return scores


def _joined(scores: Sequence[ColumnScore]) -> ColumnScore:
    """One column's scores with several choices of solved examples."""
    values, rows = (tuple(getattr(one, name)[0] for one in scores) for name in ("values", "rows"))
    return replace(scores[0], values=values, rows=rows)


class _Told:
    """Tells somebody of every item, when shares of some items are done."""

    def __init__(self, ticks: Iterator[int]) -> None:
        self._ticks, self._owed = ticks, 0.0
        next(ticks, None)

    def advance(self, items: int) -> Callable[[float], None]:
        def told(share: float) -> None:
            self._owed += share * items
            while self._owed >= 1:
                next(self._ticks, None)
                self._owed -= 1

        return told

    def end(self) -> None:
        for _ in self._ticks:
            pass


def _prepare(loaded: LoadedTask, shots: int, seed: int, *, shared: bool) -> None:
    for task in loaded.tasks["tasks"].values():
        task.set_config("num_fewshot", shots)
        if shared and not isinstance(task.sampler, SharedPrefix):
            task.sampler = SharedPrefix(task.sampler.df)
        task.set_fewshot_seed(seed)


def _evaluate(reader: HarnessModel, loaded: LoadedTask, limit: int | None) -> Mapping[str, Any]:
    with redirect_stderr(StringIO()):  # where lm-eval counts the prompts that it writes
        asked: Any = evaluate
        return asked(reader, dict(loaded.tasks), limit=limit, bootstrap_iters=0)


def _columns(
    loaded: LoadedTask, shots: int, found: Mapping[str, Any], tokenizer: Any
) -> Iterator[ColumnScore]:
    """The columns' scores from lm-eval's record of one choice of solved examples."""
    for column in loaded.columns:
        name = column.task if loaded.tasks["groups"] else next(iter(loaded.tasks["tasks"]))
        results, samples = found["results"][name], _samples(found, name)
        for metric in (column.metric,) if column.metric else _metrics(results):
            row = _rows(loaded, metric, samples, tokenizer)
            by_row = metric in (PER_TOKEN, PER_QUESTION)
            value = sum(row) / len(row) if by_row else _value(results, metric)
            prompt = _prompt(samples)
            yield ColumnScore(column.name, column.task, metric, shots, (value,), (row,), prompt)


def _samples(found: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The task's items in their order; none of a group's."""
    samples = found["samples"].get(name, [])
    filters = {sample["filter"] for sample in samples}
    return sorted(
        (sample for sample in samples if sample["filter"] == min(filters)),
        key=lambda sample: sample["doc_id"],
    )


def _metrics(results: Mapping[str, Any]) -> list[str]:
    """All that lm-eval reports of a task, by ``metric,filter``."""
    names = [key.partition(",")[0] for key in results if "," in key and "_stderr" not in key]
    return list(dict.fromkeys(names))


def _value(results: Mapping[str, Any], metric: str) -> float:
    return next(float(results[key]) for key in results if key.partition(",")[0] == metric)


def _rows(
    loaded: LoadedTask, metric: str, samples: Sequence[Mapping[str, Any]], tokenizer: Any
) -> tuple[float, ...]:
    """Each item's own score, where it is a number."""
    if metric == PER_TOKEN:
        (task,) = loaded.tasks["tasks"].values()
        return tuple(_is_likeliest_by_token(task, sample, tokenizer) for sample in samples)
    if metric == PER_QUESTION:
        return _by_question(samples)
    scores = [sample[metric] for sample in samples]
    return tuple(map(float, scores)) if all(isinstance(one, int | float) for one in scores) else ()


def _is_likeliest_by_token(task: Any, sample: Mapping[str, Any], tokenizer: Any) -> float:
    """Whether the right choice has the least NLL per token (MesaNet, appendix L)."""
    document = sample["doc"]
    gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    right = gold if isinstance(gold, int) else task.doc_to_choice(document).index(gold)
    tokens = [len(query(tokenizer, *asked).continuation) for asked in sample["arguments"]]
    answers = zip(sample["filtered_resps"], tokens, strict=True)
    losses = [-float(answer[0]) / count for answer, count in answers]
    return float(losses.index(min(losses)) == right)


def _by_question(samples: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """Whether all answers to each question of MultiRC are judged rightly."""
    questions: dict[tuple[int, int], float] = {}
    for sample in samples:
        index = sample["doc"]["idx"]
        question = index["paragraph"], index["question"]
        questions[question] = min(questions.get(question, 1.0), float(sample["acc"]))
    return tuple(questions.values())


def _prompt(samples: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    if not samples:
        return "", ""
    context, after = samples[0]["arguments"][0]
    return context, after if isinstance(after, str) else samples[0]["filtered_resps"][0]
