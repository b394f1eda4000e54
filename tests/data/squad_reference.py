"""Makes `squad_cases.json`: what a well-kept library answers and scores. Not a test.

The library is transformers 4.57.3, the last line that had SQuAD's post-processing and metrics, in an environment of its own:

pip install transformers==4.57.3 && python tests/data/squad_reference.py > tests/data/squad_cases.json
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TEXT = "the a river Rhine Basel flows to an old harbour where 1831 ships, mostly steam-ships, wait; it's said (by some) more"
WORDS = TEXT.split()


def case(number: int, draw: random.Random) -> dict[str, Any]:
    """A question with one to three windows of its text, and scores for every token; every third has no answer."""
    words = [draw.choice(WORDS) for _ in range(draw.randint(6, 60))]
    begins = [sum(len(word) + 1 for word in words[:place]) for place in range(len(words))]
    context = " ".join(words)
    answers = []
    for _ in range(0 if number % 3 == 0 else draw.randint(1, 3)):
        first = draw.randrange(len(words))
        last = min(len(words) - 1, first + draw.randrange(4))
        answers.append({"text": context[begins[first] : begins[last] + len(words[last])], "answer_start": begins[first]})
    size, step = 25, 15
    windows = []
    for begin in range(0, max(1, len(words) - size + step), step):
        held = list(range(begin, min(begin + size, len(words))))
        scores = [[round(draw.gauss(0, 2), 3) for _ in range(len(held) + 4)] for _ in range(2)]
        if number % 4 == 0:  # these may well say that nothing answers
            scores = [[line[0] + 6, *line[1:]] for line in scores]
        windows.append({"words": held, "scores": scores})
    return {"context": context, "answers": answers, "begins": begins, "windows": windows, "max_words": 30}


ASKED = 3
"""Tokens before the text: one for no answer, one of the question, a mark; and one mark after it."""


def answered(several: list[dict[str, Any]]) -> dict[str, str]:
    """The library's answers."""
    from transformers.data.metrics.squad_metrics import compute_predictions_logits

    examples, features, results = [], [], []
    for number, entry in enumerate(several):
        words = entry["context"].split(" ")
        examples.append(SimpleNamespace(qas_id=str(number), doc_tokens=words))
        for window in entry["windows"]:
            held = window["words"]
            anywhere = dict.fromkeys(range(ASKED, ASKED + len(held)), True)  # an answer may begin in any of its windows
            features.append(
                SimpleNamespace(
                    example_index=number,
                    unique_id=len(features),
                    tokens=["[CLS]", "what", "[SEP]", *(words[word].lower() for word in held), "[SEP]"],
                    token_to_orig_map=dict(enumerate(held, ASKED)),
                    token_is_max_context=anywhere,
                )
            )
            results.append(
                SimpleNamespace(unique_id=len(results), start_logits=window["scores"][0], end_logits=window["scores"][1])
            )
    tokenizer = SimpleNamespace(convert_tokens_to_string=" ".join)
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / name) for name in ("answers.json", "best.json", "null.json")]
        return compute_predictions_logits(examples, features, results, 20, 30, False, *files, False, True, 0.0, tokenizer)


def scored(several: list[dict[str, Any]], said: dict[str, str]) -> dict[str, float]:
    """The library's metrics."""
    from transformers.data.metrics.squad_metrics import squad_evaluate

    examples = [SimpleNamespace(qas_id=str(number), answers=entry["answers"]) for number, entry in enumerate(several)]
    return dict(squad_evaluate(examples, said))


if __name__ == "__main__":
    draw = random.Random(0)
    several = [case(number, draw) for number in range(30)]
    said = answered(several)
    texts = {key: entry["context"].split(" ") for key, entry in zip(said, several, strict=True)}
    near = {key: " ".join(texts[key][:4]) if int(key) % 4 else said[key] for key in said}
    known = {key: several[int(key)]["answers"][0]["text"] + "." if int(key) % 3 else "" for key in said}
    mixed = {key: (known if int(key) % 2 else near)[key] for key in said}
    answers = {"answers": said, "metrics": scored(several, said)}
    other = {"given": mixed, "given_metrics": scored(several, mixed)}
    json.dump({"cases": several, **answers, **other}, sys.stdout)
