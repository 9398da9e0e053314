"""The faults that the public datasets are known for, a few of each, written into the demo's files.

all   the first rows once more at the end, word for word
B1    an apostrophe inside single-quoted arguments; a chat that ends at USER
B2    an empty id; scores that are no numbers
B5    one question with four answers
B6    ``prompt`` trimmed; a conversation that ends on a user turn; an empty last answer
B7    a leading gpt turn, empty turns, a question split in two, an id used twice, no turns at all
B8    terminal colour codes; a trajectory that ends with an observation
"""

import copy
from typing import Any

Row = dict[str, Any]

NUM_DUPLICATES = 2


def add(dataset: str, clean: list[Row]) -> list[Row]:
    """``clean`` with faults in some rows and duplicates at the end; the argument is left alone."""
    rows = copy.deepcopy(clean)
    for fault in FAULTS.get(dataset, ()):
        fault(rows)
    return rows + copy.deepcopy(rows[:NUM_DUPLICATES])


def _apostrophe(rows: list[Row]) -> None:
    for row in rows[10:12]:
        row["chat"] = row["chat"].replace('{"stops":"via', '{"stops":"St. Ives\'', 1)


def _ends_at_user(rows: list[Row]) -> None:
    for row in rows[20:22]:
        row["chat"] = row["chat"].split("\n\n\n")[0] + "\n\n\n"


def _odd_scores(rows: list[Row]) -> None:
    rows[10]["average_test_score"] = ""
    rows[11]["average_test_score"] = "n/a"
    rows[12]["id"] = rows[13]["id"] = ""


def _many_answers(rows: list[Row]) -> None:
    question = rows[20]["conversations"][0]
    for row in rows[21:24]:
        row["conversations"][0] = dict(question)


def _trimmed_prompt(rows: list[Row]) -> None:
    for row in rows[10:13]:
        row["prompt"] = row["prompt"][:40]


def _ends_on_user_turn(rows: list[Row]) -> None:
    for row in rows[20:22]:
        row["messages"].pop()
    rows[22]["messages"][-1]["content"] = ""


def _leading_gpt(rows: list[Row]) -> None:
    for row in rows[10:13]:
        row["conversations"].insert(0, {"from": "gpt", "value": "(continued)"})


def _empty_turns(rows: list[Row]) -> None:
    for row in rows[20:23]:
        row["conversations"].insert(1, {"from": "bard", "value": ""})
    rows[23]["conversations"] = []


def _split_question(rows: list[Row]) -> None:
    for row in rows[30:33]:
        notes, question = row["conversations"][0]["value"].split("\n\n")
        parts = [{"from": "human", "value": part} for part in (notes, question)]
        row["conversations"][:1] = parts


def _shared_id(rows: list[Row]) -> None:
    rows[41]["id"] = rows[40]["id"]


def _colours(rows: list[Row]) -> None:
    for row in rows[10:12]:
        row["trajectory"][-1]["text"] += "\n\x1b[32mok\x1b[0m"


def _ends_with_observation(rows: list[Row]) -> None:
    for row in rows[20:22]:
        row["trajectory"].pop()


FAULTS = {
    "B1_glaive": (_apostrophe, _ends_at_user),
    "B2_opencodeinstruct": (_odd_scores,),
    "B5_openthoughts": (_many_answers,),
    "B6_ultrachat": (_trimmed_prompt, _ends_on_user_turn),
    "B7_sharegpt": (_leading_gpt, _empty_turns, _split_question, _shared_id),
    "B8_sweagent": (_colours, _ends_with_observation),
}
