"""Evaluation files in the forms in which they are published, two or three items each."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from fastweights.lab.evals.items import Choice, Ending, Item, Prompt
from fastweights.lab.tasks.questions import SCRAMBLING, Question

PARAGRAPH = {
    "context": "It has 24.",
    "qas": [{"question": "How many?", "answers": [{"text": "24"}] * 2}],
}
LINES: dict[str, list[dict[str, object]]] = {
    "hellaswag_val.jsonl": [
        {
            "ind": 0,
            "activity_label": "Roofing",
            "ctx": "A man is on a roof. he",
            "endings": list("abcd"),
            "label": 3,
        },
        {
            "ind": 1,
            "activity_label": "Swim",
            "ctx": "She dives",
            "endings": ["in.", "up", "far", "x"],
            "label": 0,
        },
    ],
    "piqa_valid.jsonl": [
        {"goal": "dry it", "sol1": "in the sun", "sol2": "in water"},
        {"goal": "cut", "sol1": "spoon", "sol2": "a knife "},
    ],
    "arc_easy_test.jsonl": [
        {
            "id": "1",
            "question": {
                "stem": "Hot?",
                "choices": [{"text": "ice", "label": "1"}, {"text": "fire", "label": "2"}],
            },
            "answerKey": "2",
        }
    ],
    "openbookqa_test.jsonl": [
        {"query": "Predators eat", "choices": ["lions", "bunnies"], "gold": 1}
    ],
    "boolq_dev.jsonl": [{"question": "is it so", "passage": "It is.", "answer": True}],
    "winogrande_dev.jsonl": [
        {
            "context_options": ["She beat Bo so she", "She beat Bo so Bo"],
            "continuation": "won.",
            "gold": 0,
        }
    ],
    "lambada_openai_test.jsonl": [{"text": "He came in.\n\nShe saw him"}, {"text": "It was cold"}],
    "gpt3_mid_word_1_anagrams.jsonl": [
        {"context": f"\n{word[::-1]} =", "completion": f" {word}"}
        for word in ("sticks", "mirror", "casino")
    ],
    "gpt3_cycle_letters_in_word.jsonl": [
        {"context": f"\n{word[1:]}{word[0]} =", "completion": f" {word}"}
        for word in ("sticks", "mirror", "casino", "coffee")
    ],
    "winograd_wsc.jsonl": [
        {
            "context_options": ["It fits the box as the box", "It fits the box as the trophy"],
            "continuation": "is big.",
            "gold": 0,
        }
    ],
    "swde.jsonl": [{"text": "Born in", "value": "Ulm"}, {"text": "Died in", "value": "Rome"}],
    "nq_open_dev.jsonl": [{"question": "who wrote it", "answer": ["Bobby Scott", "Bob"]}],
}
_COPA = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<copa-corpus version="1.0">\n<item id="1"'
    ' asks-for="cause" most-plausible-alternative="2">\n<p>It broke.</p>\n<a1>It'
    " flew.</a1>\n<a2>It fell.</a2>\n</item>\n</copa-corpus>\n"
)
TEXTS = {
    "piqa_valid-labels.lst": "0\n1\n",
    "copa_test.xml": _COPA,
    "copa_dev.xml": _COPA,
    "cloze_test_val__winter2018-cloze_test_ALL_val - 1 - 1.csv": (
        "InputStoryid,InputSentence1,InputSentence2,InputSentence3,InputSentence4,"
        "RandomFifthSentenceQuiz1,RandomFifthSentenceQuiz2,AnswerRightEnding\n"
        'a,"Bo ran, fast.",He fell.,It hurt.,He wept.,Bo smiled.,Bo got help.,2\n'
    ),
    "squad_xquad_en.json": json.dumps({"data": [{"paragraphs": [PARAGRAPH]}]}),
}
ITEMS: dict[str, list[Item]] = {
    "hellaswag": [
        Choice(("Roofing: A man is on a roof. he",) * 4, ("a", "b", "c", "d"), 3),
        Choice(("Swim: She dives",) * 4, ("in.", "up", "far", "x"), 0),
    ],
    "piqa": [
        Choice(("Question: dry it\nAnswer:",) * 2, ("in the sun", "in water"), 0),
        Choice(("Question: cut\nAnswer:",) * 2, ("spoon", "a knife "), 1),
    ],
    "arc_easy": [Choice(("Question: Hot?\nAnswer:",) * 2, ("ice", "fire"), 1)],
    "openbookqa": [Choice(("Predators eat",) * 2, ("lions", "bunnies"), 1)],
    "boolq": [Choice(("It is.\nQuestion: is it so?\nAnswer:",) * 2, ("no", "yes"), 1)],
    "copa": [Choice(("It broke because",) * 2, ("it flew.", "it fell."), 1)],
    "winograd": [
        Choice(("It fits the box as the box", "It fits the box as the trophy"), ("is big.",) * 2, 0)
    ],
    "winogrande": [Choice(("She beat Bo so she", "She beat Bo so Bo"), ("won.",) * 2, 0)],
    "lambada": [Ending("He came in.\n\nShe saw", " him"), Ending("It was", " cold")],
    "anagrams1": [
        Prompt(Question("\nskcits =", ("sticks",)), SCRAMBLING, exact=True),
        Prompt(Question("\nrorrim =", ("mirror",)), SCRAMBLING, exact=True),
        Prompt(Question("\nonisac =", ("casino",)), SCRAMBLING, exact=True),
    ],
    "squad": [Prompt(Question("It has 24.\nQuestion: How many?\nAnswer:", ("24",)))],
    "nq_open": [Prompt(Question("Question: who wrote it?\nAnswer:", ("Bobby Scott", "Bob")))],
}
"""What they say, by the names of `fastweights.lab.evals.items.SOURCES`."""


def write(folder: Path) -> Path:
    """All of them into `folder`; those of one JSON object per line compressed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in LINES.items():
        content = "".join(json.dumps(record) + "\n" for record in records).encode()
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder
