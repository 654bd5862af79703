"""Questions of every format are read, and bad ones named."""

import json

import pytest

from selfspec.eval.tasks import load_questions


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no questions"),
        ('{"turns": ["x"]}\n{"turns"', r"q\.jsonl:2: bad JSON"),
        ('{"category": "a"}', r"q\.jsonl:1: needs `turns`.*its fields: category"),
        ('{"turns": []}', r"q\.jsonl:1: empty"),
        ('{"messages": "x"}', r"q\.jsonl:1: `messages`"),
        ("[1]", r"q\.jsonl:1: expected an object"),
    ],
)
def test_bad_questions_are_named(tmp_path, text, message):
    path = tmp_path / "q.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_questions(str(path))


def test_every_format_is_read(tmp_path):
    path = tmp_path / "q.jsonl"
    records = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"question": "c", "answer": "#### 4"},
        {"task_id": "HumanEval/0", "prompt": "def f():"},
        {"prompt": ["d", "e"], "prompt_id": 7, "category": "stem"},
        {"messages": [{"role": "user", "content": "g"}, {"role": "assistant", "content": "h"}]},
        {"text": "i"},
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    found = load_questions(str(path), max_turns=2)
    assert [q.turns for q in found] == [("a", "b"), ("c",), ("def f():",), ("d", "e"), ("g",), ("i",)]
    assert [q.id for q in found] == ["81", "2", "HumanEval/0", "7", "5", "6"]
    assert [q.category for q in found] == ["writing", "q", "q", "stem", "q", "q"]
    coded = load_questions(f"humaneval:{path}", limit=1)
    assert coded[1].turns == ("Complete this Python function:\n\nc",)
    with pytest.raises(ValueError, match=r"unknown task 'nope'; choose one of quick, spec-bench"):
        load_questions("nope")
    with pytest.raises(FileNotFoundError, match=r"missing\.jsonl"):
        load_questions("missing.jsonl")
    with pytest.raises(ValueError, match=r"spec-bench needs its file"):
        load_questions("spec-bench")


def test_the_shipped_questions_are_sixty_of_six_kinds():
    questions = load_questions("quick", max_turns=2)
    assert len(questions) == 60
    kinds = [q.category for q in questions]
    assert {kinds.count(kind) for kind in kinds} == {10}
    assert len({q.turns[0] for q in questions}) == 60
    assert len(load_questions("quick", limit=2)) == 12
