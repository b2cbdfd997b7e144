"""Published evaluation files as items: choices, endings and prompts in lm-evaluation-harness's
wording."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from csv import DictReader
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar
from xml.etree import ElementTree

from fastweights.errors import reason_of
from fastweights.lab.tasks.questions import (
    RECALL,
    SCRAMBLING,
    Answering,
    Question,
    recall,
    scrambling,
    squad,
)
from fastweights.training.data.files import read_whole

Record = Mapping[str, Any]
Made = TypeVar("Made")
_BEGUN_SENTENCE = re.compile(r"(.*[.!?]) ([a-z].*)", re.DOTALL)
_NAMED_OTHERWISE = {"winograd": "wsc273", "lambada": "lambada_openai"}
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OSError)


@dataclass(frozen=True)
class Choice:
    """A question with several texts of which one is right.

    Either one context has several continuations, or several contexts have one continuation.

    Attributes:
        contexts: One per option.
        continuations: One per option; a space goes between the two.
        gold: Number of the right option.

    Raises:
        ValueError: If there are fewer than two options, or the right one is none of them.
    """

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    gold: int

    def __post_init__(self) -> None:
        options = len(self.continuations)
        if options < 2 or len(self.contexts) != options:
            raise ValueError(f"a choice is among two options at least; there are {options}")
        if type(self.gold) is not int or not 0 <= self.gold < options:
            raise ValueError(
                f"{self.gold!r} is not the number of an option; there are 0 … {options - 1}"
            )

    @classmethod
    def of(cls, context: str, continuations: Iterable[str], gold: int) -> Choice:
        """Build a choice between `continuations` of one context."""
        continuations = tuple(continuations)
        return cls((context,) * len(continuations), continuations, gold)

    @property
    def partial(self) -> bool:
        """Whether the contexts differ (Trinh & Le's partial scoring)."""
        return len(set(self.contexts)) > 1


@dataclass(frozen=True)
class Ending:
    """A text whose last words are to be predicted.

    Attributes:
        context: The text before them.
        continuation: The last words, with the space before them.
    """

    context: str
    continuation: str


@dataclass(frozen=True)
class Prompt:
    """A question that a language model answers by continuing its text.

    Attributes:
        question: The text and the right answers.
        answering: How the answer is generated.
        exact: Whether an answer must equal a right one, instead of containing it.
    """

    question: Question
    answering: Answering = RECALL
    exact: bool = False

    def right(self, answer: str) -> bool:
        return self.question.exact(answer) if self.exact else self.question.has_value_in(answer)


Item = Choice | Ending | Prompt
MakeDocument = Callable[[Record], Record]
MakeItem = Callable[[Record], Item]


@dataclass(frozen=True)
class TaskFiles:
    """The files of an evaluation task, and the functions that read them.

    Attributes:
        files: Names of the files in a folder, where they may end in .gz too.
        read: Function from the files' paths to the items.
        read_documents: Function from the files' paths to documents with the fields of the data set
            that lm-evaluation-harness has of this task; None where it has none.
        takes_shots: Whether `read` takes a number of solved examples.
    """

    files: tuple[str, ...]
    read: Callable[..., list[Item]]
    read_documents: Callable[..., list[Record]] | None = None
    takes_shots: bool = False

    @classmethod
    def of(
        cls, files: tuple[str, ...], documents: Callable[..., list[Record]], item: MakeItem
    ) -> TaskFiles:
        """Build it for a task whose every document makes an item."""
        return cls(files, lambda *paths: [item(one) for one in documents(*paths)], documents)

    @classmethod
    def lines(cls, file: str, document: MakeDocument, item: MakeItem) -> TaskFiles:
        """Build it for a file with a document in every line."""
        return cls(
            (file,),
            lambda path: _each(path, lambda record: item(document(record))),
            lambda path: _each(path, document),
        )

    def are_in(self, folder: Path) -> bool:
        """Whether all files are there."""
        return all(_path(folder, file) for file in self.files)

    def documents(self, folder: Path) -> list[Record]:
        """Read all documents.

        Args:
            folder: The folder of the files.

        Raises:
            ValueError: If a file is missing or in another form; the message names it.
        """
        if self.read_documents is None:
            raise ValueError(f"lm-evaluation-harness has no task that reads {self.files[0]}")
        return self._read(self.read_documents, folder)

    def items(self, folder: Path, shots: int = 0) -> list[Item]:
        """Read all items.

        Args:
            folder: The folder of the files.
            shots: Number of solved examples before each item, where the task takes any.

        Raises:
            ValueError: If a file is missing or in another form; the message names it.
        """
        return self._read(self.read, folder, *((shots,) if self.takes_shots else ()))

    def _read(self, read: Callable[..., list[Made]], folder: Path, *more: int) -> list[Made]:
        paths = [_found(folder, file) for file in self.files]
        try:
            return read(*paths, *more)
        except _MALFORMED as error:
            names = ", ".join(str(path) for path in paths)
            raise ValueError(
                f"{names} is not in the form of this task ({_reason(error)})"
            ) from error


def recall_prompts(path: Path) -> list[Item]:
    """Read in-context recall in its minimal form: lines ``{"text": …, "value": …}``.

    Raises:
        ValueError: If the file is in another form; the message names it.
    """
    return recall_files(path.name).items(path.parent)


def recall_files(file: str) -> TaskFiles:
    """In-context recall in its minimal form, as `recall_prompts` reads it."""
    return TaskFiles(
        (file,),
        lambda path: [Prompt(question) for question in recall(path)],
        lambda path: [{"text": one.text, "value": one.values[0]} for one in recall(path)],
    )


def _same(record: Record) -> Record:
    return record


def _hellaswag(record: Record) -> Record:
    """In a context that is in one piece, the sentence that begins with a small letter is ctx_b."""
    if "ctx_a" in record:
        return record
    begun = _BEGUN_SENTENCE.fullmatch(record["ctx"])
    before, after = begun.groups() if begun else (record["ctx"], "")
    return {**record, "ctx_a": before, "ctx_b": after}


def _hellaswag_item(document: Record) -> Choice:
    context = f"{document['activity_label']}: {document['ctx']}"
    return Choice.of(context, document["endings"], int(document["label"]))


def _piqa(path: Path, labels: Path) -> list[Record]:
    golds = iter(read_whole(labels).split())
    found = list[Record](_each(path, lambda record: {**record, "label": int(next(golds, "none"))}))
    if more := len(list(golds)):
        raise ValueError(f"there are {more} labels more than questions")
    return found


def _piqa_item(document: Record) -> Choice:
    solutions = (document["sol1"], document["sol2"])
    return Choice.of(f"Question: {document['goal']}\nAnswer:", solutions, document["label"])


def _arc(record: Record) -> Record:
    question = record["question"]
    choices = {key: [one[key] for one in question["choices"]] for key in ("text", "label")}
    return {"question": question["stem"], "choices": choices, "answerKey": record["answerKey"]}


def _arc_item(document: Record) -> Choice:
    context = f"Question: {document['question']}\nAnswer:"
    return Choice.of(context, document["choices"]["text"], _answer(document))


def _openbookqa(record: Record) -> Record:
    labels = [chr(ord("A") + number) for number in range(len(record["choices"]))]
    return {
        "question_stem": record["query"],
        "choices": {"text": record["choices"], "label": labels},
        "answerKey": labels[int(record["gold"])],
    }


def _openbookqa_item(document: Record) -> Choice:
    return Choice.of(document["question_stem"], document["choices"]["text"], _answer(document))


def _answer(document: Record) -> int:
    return document["choices"]["label"].index(document["answerKey"])


def _boolq(record: Record) -> Record:
    return {**record, "label": int(record["answer"])}


def _boolq_item(document: Record) -> Choice:
    context = f"{document['passage']}\nQuestion: {document['question']}?\nAnswer:"
    return Choice.of(context, ("no", "yes"), document["label"])


def copa(path: Path) -> list[Record]:
    """Read COPA's XML as documents of SuperGLUE."""
    return [
        {
            **{
                name: item.findtext(tag, "").strip()
                for name, tag in (("premise", "p"), ("choice1", "a1"), ("choice2", "a2"))
            },
            "question": item.attrib["asks-for"],
            "label": int(item.attrib["most-plausible-alternative"]) - 1,
        }
        for item in ElementTree.fromstring(read_whole(path)).iter("item")
    ]


def copa_item(document: Record) -> Choice:
    """Ask for what follows "because" or "therefore"."""
    connector = {"cause": "because", "effect": "therefore"}[document["question"]]
    options = (document["choice1"], document["choice2"])
    continuations = [option[0].lower() + option[1:] for option in options]
    return Choice.of(f"{document['premise'][:-1]} {connector}", continuations, document["label"])


def _schema(record: Record) -> tuple[str, str, list[str]]:
    """What both contexts begin with, how the text goes on, and the two referents between them."""
    words = [context.split(" ") for context in record["context_options"]]
    shared = 0
    while len({tuple(each[: shared + 1]) for each in words}) == 1:
        shared += 1
    shared = min(shared, *(len(each) - 1 for each in words))
    before = "".join(f"{word} " for word in words[0][:shared])
    return before, f" {record['continuation']}", [" ".join(each[shared:]) for each in words]


def _winogrande(record: Record) -> Record:
    before, after, (first, second) = _schema(record)
    answer = str(record["gold"] + 1)
    return {
        "sentence": f"{before}_{after}",
        "option1": first,
        "option2": second,
        "answer": answer,
    }


def _winograd(record: Record) -> Record:
    before, after, options = _schema(record)
    place = {"pronoun": "_", "pronoun_loc": len(before)}
    return {"text": f"{before}_{after}", **place, "options": options, "label": record["gold"]}


def _schema_item(record: Record) -> Choice:
    """WinoGrande and Winograd: what follows the pronoun, after either referent."""
    contexts = tuple(record["context_options"])
    return Choice(contexts, (record["continuation"],) * len(contexts), int(record["gold"]))


def _last_word(document: Record) -> Ending:
    if not document["text"].strip():
        raise ValueError("its text is empty, and has no last word")
    context, _, word = document["text"].rpartition(" ")
    return Ending(context, f" {word}")


def _nq(document: Record) -> Prompt:
    context = f"Question: {document['question']}?\nAnswer:"
    return Prompt(Question(context, tuple(document["answer"])))


def _scrambling_prompts(path: Path, shots: int) -> list[Item]:
    return [Prompt(question, SCRAMBLING, exact=True) for question in scrambling(path, shots)]


def _squad(path: Path) -> list[Item]:
    return [Prompt(question) for question in squad(path)]


def _storycloze(path: Path) -> list[Record]:
    """Read the file that its authors send, whose columns the data set renames."""
    return [
        {
            **{f"input_sentence_{n}": row[f"InputSentence{n}"] for n in range(1, 5)},
            **{f"sentence_quiz{n}": row[f"RandomFifthSentenceQuiz{n}"] for n in (1, 2)},
            "answer_right_ending": int(row["AnswerRightEnding"]),
        }
        for row in DictReader(StringIO(read_whole(path)))
    ]


def _storycloze_item(document: Record) -> Choice:
    story = " ".join(document[f"input_sentence_{n}"] for n in range(1, 5))
    endings = (document["sentence_quiz1"], document["sentence_quiz2"])
    return Choice.of(story, endings, document["answer_right_ending"] - 1)


def _schemas(file: str, document: MakeDocument) -> TaskFiles:
    return TaskFiles(
        (file,), lambda path: _each(path, _schema_item), lambda path: _each(path, document)
    )


def _scrambled(name: str) -> TaskFiles:
    return TaskFiles(
        (f"gpt3_{name}.jsonl",),
        _scrambling_prompts,
        lambda path: _each(path, _same),
        takes_shots=True,
    )


SOURCES: dict[str, TaskFiles] = {
    "hellaswag": TaskFiles.lines("hellaswag_val.jsonl", _hellaswag, _hellaswag_item),
    "piqa": TaskFiles.of(("piqa_valid.jsonl", "piqa_valid-labels.lst"), _piqa, _piqa_item),
    "arc_easy": TaskFiles.lines("arc_easy_test.jsonl", _arc, _arc_item),
    "arc_challenge": TaskFiles.lines("arc_challenge_test.jsonl", _arc, _arc_item),
    "openbookqa": TaskFiles.lines("openbookqa_test.jsonl", _openbookqa, _openbookqa_item),
    "boolq": TaskFiles.lines("boolq_dev.jsonl", _boolq, _boolq_item),
    "copa": TaskFiles.of(("copa_test.xml",), copa, copa_item),
    "winogrande": _schemas("winogrande_dev.jsonl", _winogrande),
    "winograd": _schemas("winograd_wsc.jsonl", _winograd),
    "lambada": TaskFiles.lines("lambada_openai_test.jsonl", _same, _last_word),
    "anagrams1": _scrambled("mid_word_1_anagrams"),
    "anagrams2": _scrambled("mid_word_2_anagrams"),
    "cycle_letters": _scrambled("cycle_letters_in_word"),
    "random_insertion": _scrambled("random_insertion_in_word"),
    "reversed_words": _scrambled("reversed_words"),
    "squad": TaskFiles(("squad_xquad_en.json",), _squad),
    "nq_open": TaskFiles.lines("nq_open_dev.jsonl", _same, _nq),
}
"""The tasks by name, and the files of each as they are published."""

HARNESS_SOURCES: dict[str, TaskFiles] = {
    **{
        _NAMED_OTHERWISE.get(name, name): files
        for name, files in SOURCES.items()
        if files.read_documents is not None
    },
    "copa": TaskFiles.of(("copa_dev.xml",), lambda path: copa(path)[-100:], copa_item),
    "storycloze_2018": TaskFiles.of(
        ("cloze_test_val__winter2018-cloze_test_ALL_val - 1 - 1.csv",),
        _storycloze,
        _storycloze_item,
    ),
    "swde": recall_files("swde.jsonl"),
    "fda": recall_files("fda.jsonl"),
    "squad_completion": recall_files("squad_completion.jsonl"),
}
"""The same by lm-evaluation-harness's names, and what it alone reads. Of COPA it scores SuperGLUE's
validation set, the last hundred items of the original development set."""


def _path(folder: Path, file: str) -> Path | None:
    there = (path for path in (folder / file, folder / f"{file}.gz") if path.is_file())
    return next(there, None)


def _found(folder: Path, file: str) -> Path:
    if path := _path(folder, file):
        return path
    raise ValueError(
        f"{folder / file} does not exist, with or without .gz; give the folder of the evaluation"
        " files"
    )


def _each(path: Path, make: Callable[[Record], Made]) -> list[Made]:
    """What every line makes; an error names the line."""
    found = list[Made]()
    for number, line in enumerate(read_whole(path).split("\n"), 1):
        if line.strip():
            try:
                found.append(make(json.loads(line)))
            except _MALFORMED as error:
                raise ValueError(f"line {number}: {_reason(error)}") from error
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]!r}"
    return reason_of(error)
