"""Bad input: messages name the file, the row, the rule, the value and the nearest correct name."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_tokenizers import BLUE, GREEN, USER, complaint, jsonl, parquet

from weft.dataflow.errors import UserError
from weft.dataflow.prompts.prompts import Prompts


def test_a_missing_file_is_answered_with_the_nearest(tmp_path: Path, qwen: Path) -> None:
    jsonl(tmp_path / "gsm8k_test.jsonl", [{"prompt": "1"}])
    assert complaint(tmp_path / "gsm8k_tset.jsonl", qwen).endswith(
        "does not exist; did you mean 'gsm8k_test.jsonl'?"
    )
    assert "has gsm8k_test.jsonl" in complaint(tmp_path / "zz.parquet", qwen)
    assert complaint(Path("gsm8k"), qwen).endswith("; the id of a data set is OWNER/NAME")
    assert "there is no folder" in complaint(tmp_path / "datta" / "a.jsonl", qwen)
    assert "is a folder; list the files in it" in complaint([tmp_path], qwen)
    assert "the list of paths is empty" in complaint([], qwen)


def test_unknown_empty_and_broken_files_are_named(tmp_path: Path, qwen: Path) -> None:
    def file(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    assert (
        "unknown kind of file '.txt'; these can be read: .parquet, .jsonl, .json, .csv, .tsv, .arrow"
        in complaint(file("a.txt", b"x"), qwen)
    )
    assert "did you mean '.parquet'" in complaint(file("a.parq", b"x"), qwen)
    assert complaint(file("a.jsonl", b""), qwen) == "a.jsonl: the file is empty"
    assert complaint(file("b.jsonl", b"\n\n"), qwen) == "b.jsonl: the file has no rows"
    assert complaint(file("b.json", b"[]"), qwen) == "b.json: there are no rows"
    assert complaint(file("c.jsonl", b'{"prompt": "a"}\n\n{"prompt": \n'), qwen).startswith(
        'c.jsonl, line 3: not JSON (Expecting value: line 1 column 11 (char 10)): {"prompt":'
    )
    assert "d.jsonl, line 2: a row is an object {...} on one line, not [1]" in complaint(
        file("d.jsonl", b'{"prompt": "a"}\n[1]\n'), qwen
    )
    assert "e.jsonl, line 2: not UTF-8" in complaint(
        file("e.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n'), qwen
    )
    assert "row 2: a row is an object" in complaint(file("e.json", b'[{"prompt": "a"}, 3]'), qwen)
    assert "f.parquet: not a Parquet file" in complaint(file("f.parquet", b"PAR1 is not enough"), qwen)
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "g.parquet")
    assert complaint(tmp_path / "g.parquet", qwen) == "g.parquet: the file has no rows"


def test_mixed_types_of_prompts_are_named_with_both_lines(tmp_path: Path, qwen: Path) -> None:
    file = jsonl(tmp_path / "m.jsonl", [{"prompt": None}, {"prompt": [USER]}, {"prompt": "1"}])
    assert "line 3: 'prompt' is text (\"1\"), but a list in line 2; one column, one type" in complaint(
        file, qwen
    )
    jsonl(
        file,
        [{"prompt": [USER]}, {"prompt": [{"role": "user", "content": [{"type": "text", "text": "?"}]}]}],
    )
    assert "line 2: 'prompt[].content' is a list" in complaint(file, qwen)
    with pytest.raises(UserError, match=r"rows, row 2: 'prompt' is a number \(3\), but text in row 1"):
        Prompts.from_rows([{"prompt": "x"}, {"prompt": 3}], qwen)
    jsonl(file, [{"prompt": "1"}])
    other = jsonl(tmp_path / "n.jsonl", [{"prompt": [USER]}])
    assert "n.jsonl, line 1: 'prompt' is a list" in complaint([file, other], qwen)


def test_a_wrong_layout_is_reported_with_the_nearest_match(tmp_path: Path, qwen: Path) -> None:
    file = jsonl(
        tmp_path / "w.jsonl",
        [{"promt": "2 + 2", "n": 1, "conversation": [{"from": "human", "value": "hi"}]}],
    )
    assert complaint(file, qwen) == (
        "w.jsonl: no known format has these columns: "
        "found 'promt' (text), 'n' (int64), 'conversation' (list of {from, value}); "
        "the nearest format is TRL prompt-only (prompt); it needs 'prompt', did you mean 'promt'?"
        "; rename the column, or name the prompt column (prompt='...'); docs/data.md shows all formats"
    )
    jsonl(file, [{"chosen_response": "a", "rejected_response": "b", "prompts": "c"}])
    said = complaint(file, qwen)
    assert "the nearest format is TRL or OpenRLHF preference (prompt, chosen, rejected)" in said
    assert "it needs 'chosen', did you mean 'chosen_response'?; it needs 'rejected'" in said
    assert "there is no column 'promts' (prompt='promts'); did you mean 'prompts'?" in complaint(
        file, qwen, prompt="promts"
    )
    assert "did you mean 'chosen_response'" in complaint(
        file, qwen, prompt="prompts", answer="chosen_respons"
    )
    jsonl(file, [{"prompt": "a", "reward_model": {"ground_truth": "1"}}])
    assert (
        "has no field 'groundtruth' (answer='reward_model.groundtruth'); did you mean 'ground_truth'?"
        in complaint(file, qwen, answer="reward_model.groundtruth")
    )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": 3}, "column 'prompt' is int64; it must be text, or messages"),
        ({"prompt": ["a", "b"]}, "column 'prompt' is list of text; it must be text, or messages"),
        (
            {"prompt": [{"speaker": "human", "text": "hi"}]},
            "messages have 'role' and 'content' (or ShareGPT's 'from'",
        ),
        ({"prompt": None}, "column 'prompt' is empty (null) in every row"),
        ({"prompt": []}, "column 'prompt' is list of null; it must be text, or messages"),
        ({"messages": "hi"}, "set prompt='messages' to use the text as a prompt"),
        (
            {"prompt": "a", "prompt_ids": [1]},
            "column 'prompt_ids' is one that Weft writes; rename it in the file",
        ),
        ({"prompt": [{"role": "robot", "content": "a"}]}, "refused the messages: unknown role robot"),
        (
            {"prompt": [{"role": None, "content": "a"}, USER]},
            "line 1: a message in 'prompt' has no role",
        ),
        ({"prompt": [USER], "tools": "{"}, "column 'tools' is text that is not JSON"),
        (
            {"instruction": "add", "input": [USER], "output": "4"},
            "column 'input' is list of {role, content}, in the format",
        ),
        (
            {"text": "Hi", "role": "prompter", "message_id": "a"},
            "make each row one message (OpenAssistant's trees)",
        ),
        ({"messages": [BLUE]}, "line 1: 'messages' holds only a response"),
        (
            {
                "prompt": [
                    {
                        "role": "user",
                        "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}],
                    }
                ]
            },
            "line 1: a message of role 'user' has a content block of type 'image', but no image belongs to it",
        ),
        (
            {"prompt": [USER], "completion": [{"role": "assistant", "content": ["Blue"]}]},
            "line 1: the content of a message of role 'assistant' is a list of content blocks (str); Weft takes blocks",
        ),
        (
            {"prompt": [{"role": "user", "content": 4}]},
            "the content of a message of role 'user' is 4; it must be text",
        ),
        (
            {"prompt": "What is it?", "images": ["cat.png"]},
            "line 1: column 'images', image 1: the column is list of text without the bytes of an image: an "
            "image is its file's content (PNG, JPEG, ...), or an object with that as 'bytes'; paths and addresses are not followed",
        ),
        (
            {"prompt": "a", "image": {"bytes": None, "path": "cat.png"}},
            "line 1: column 'image', image 1: the column is object with bytes, path without the bytes of an image",
        ),
        (
            {"prompt": "a", "video": ["a.mp4"]},
            "line 1: column 'video' holds video or audio, which Weft does not support",
        ),
        (
            {"chosen": [BLUE], "rejected": [GREEN]},
            "line 1: 'chosen' and 'rejected' begin with different messages",
        ),
        (
            {"chosen": "Blue it is", "rejected": "Green it is"},
            "line 1: 'chosen' and 'rejected' do not begin with",
        ),
    ],
)
def test_columns_of_the_wrong_kind_are_named(
    row: dict[str, Any], said: str, tmp_path: Path, qwen: Path
) -> None:
    assert said in complaint(jsonl(tmp_path / "k.jsonl", [row]), qwen)


def test_a_column_for_images_may_be_empty(tmp_path: Path, qwen: Path) -> None:
    rows = [{"prompt": "a", "images": [], "video": None}, {"prompt": "b", "images": None, "video": ""}]
    assert len(Prompts.read(jsonl(tmp_path / "k.jsonl", rows), qwen)) == 2


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        ({"prompt": "a"}, {"prompt": ""}, "'prompt' is \"\"; every row needs text there"),
        ({"prompt": "a"}, {"prompt": " \n"}, "'prompt' is \" \\n\"; every row needs text there"),
        ({"prompt": "a"}, {"prompt": None}, "'prompt' is null; every row needs text there"),
        (
            {"prompt": [USER]},
            {"prompt": []},
            "'prompt' is []; every row needs at least one message there",
        ),
        (
            {"prompt": [USER]},
            {"prompt": None},
            "'prompt' is null; every row needs at least one message there",
        ),
        (
            {"messages": [USER, BLUE]},
            {"messages": [USER]},
            "'messages' ends without it (a prompt), but the rows before end",
        ),
        (
            {"prompt": "a", "completion": "b"},
            {"prompt": "a", "completion": None},
            "'completion' is null",
        ),
    ],
)
def test_a_bad_row_is_named(
    write: Any, good: Any, bad: Any, said: str, tmp_path: Path, qwen: Path
) -> None:
    other = write(tmp_path / f"a.{write.__name__}", [good])
    file = write(tmp_path / f"b.{write.__name__}", [good, good, bad, good])
    place = "b.jsonl, line 3: " if write is jsonl else "b.parquet, row 3: "
    assert (place + said) in complaint([other, file], qwen)


@pytest.mark.parametrize(
    ("good", "bad"), [("a", " "), ([USER], []), ([USER], [{"role": "robot", "content": "a"}])]
)
def test_a_bad_row_far_down_is_named(good: Any, bad: Any, tmp_path: Path, qwen: Path) -> None:
    file = jsonl(tmp_path / "far.jsonl", [{"prompt": good}] * 8500 + [{"prompt": bad}])
    assert complaint(file, qwen).startswith("far.jsonl, line 8501: ")


def test_the_line_is_right_after_blank_lines(tmp_path: Path, qwen: Path) -> None:
    file = tmp_path / "blank.jsonl"
    file.write_text('\n{"prompt": "a"}\n\n\n{"prompt": ""}\n')
    assert complaint(file, qwen).startswith("blank.jsonl, line 5: ")


def test_files_with_different_columns_are_refused(tmp_path: Path, qwen: Path) -> None:
    first = jsonl(tmp_path / "a.jsonl", [{"prompt": "1", "answer": "1"}])
    second = jsonl(tmp_path / "b.jsonl", [{"prompt": "1", "anser": "1"}])
    assert (
        complaint([first, second], qwen)
        == "b.jsonl: has no column 'answer', which a.jsonl has; did you mean 'anser'?"
    )


def test_damaged_csv_is_named_with_its_row_and_line(tmp_path: Path, qwen: Path) -> None:
    file = tmp_path / "c.csv"

    def said(text: bytes) -> str:
        file.write_bytes(text)
        return complaint(file, qwen)

    assert said(b'prompt,answer\n"2 +\n2",4\n3, or 4,5\n') == (
        "c.csv, row 2 (it ends on line 4): 3 fields, but the header has 2 (prompt, answer); "
        'quote a field that holds a comma: ["3", " or 4", "5"]'
    )
    assert said(b"prompt,answer\n2,4\n\xff,5\n").startswith("c.csv, line 3: not UTF-8")
    assert said(b"prompt,prompt\n2,4\n") == "c.csv: the header has 'prompt' twice (prompt, prompt)"
    assert (
        said(b"prompt;answer\n2;4\n")
        == "c.csv: the header is 'prompt;answer'; fields are separated by ',', not by ';'"
    )
    assert said(b"promt,answer\n2,4\n").startswith(
        "c.csv: no known format has these columns: found 'promt' (text)"
    )
    assert said(b"prompt,answer\n") == "c.csv: the file has no rows"
    assert (
        said(b"prompt,answer\n2,4\n ,5\n")
        == "c.csv, row 2: 'prompt' is \" \"; every row needs text there"
    )


@pytest.mark.parametrize("name", ["c.csv", "c.tsv", "c.csv.gz"])
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('prompt,answer\n1,2\n"3 + 4', 3),
        ('prompt,answer\n1,2\n3,"7\n', 3),
        ('prompt,answer\n1,2\n3,"7""\n4,5\n', 3),
        ('prompt,answer\n"1\n1",2\n"3,7\n4,5\n', 4),
        ('prompt,"answer\n1,2\n', 1),
        ('prompt,answer\r\n1,2\r\n"', 3),
    ],
)
def test_csv_that_ends_inside_quotes_is_refused(
    text: str, line: int, name: str, tmp_path: Path, qwen: Path
) -> None:
    data = text.replace(",", "\t" if "tsv" in name else ",").encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert complaint(tmp_path / name, qwen).startswith(
        f"{name}, line {line}: the file ends inside the quotes that open here"
    )


@pytest.mark.parametrize(
    "text",
    [
        'prompt,answer\n"a ""b"" c","d, ""e"""\n5" tall,6"\n""\n"x\ny",""\n',
        'prompt,answer\n"",a"b\n"1",2',
    ],
)
def test_csv_with_quotes_of_every_kind_is_no_cut_file(text: str, tmp_path: Path, base: Path) -> None:
    (tmp_path / "c.csv").write_text(text)
    said = complaint(tmp_path / "c.csv", base)
    assert "inside the quotes" not in said


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        (
            "a.jsonl",
            '{"prompt": "1"}\n{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}\n",
            "a.jsonl, line 2",
        ),
        (
            "b.jsonl",
            '{"prompt": "1", "x": ' + '{"x":' * 100_000 + "1" + "}" * 100_001 + "\n",
            "b.jsonl, line 1",
        ),
        ("c.json", '[{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}]", "c.json"),
    ],
    ids=["lists in a line", "objects in a line", "an array"],
)
@pytest.mark.parametrize("limit", [None, 5])
def test_deep_nesting_is_refused_before_a_parser_ends_the_process(
    tmp_path: Path, qwen: Path, name: str, content: str, place: str, limit: int | None
) -> None:
    (tmp_path / name).write_text(content)
    said = complaint(tmp_path / name, qwen, limit=limit)
    assert said == f"{place}: objects and lists are nested more than 100 deep"


def test_brackets_in_text_are_no_nesting(tmp_path: Path, qwen: Path) -> None:
    text = "[" * 1000 + '\\" {'
    for name in ("a.jsonl", "a.json"):
        file = jsonl(tmp_path / name, [{"prompt": text}])
        assert Prompts.read(file, qwen, chat=False).table["prompt"].to_pylist() == [text]


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "a", "answer": 1%s}' % (b"0" * 5000),
        b'{"prompt": "a", "answer": [1%s]}' % (b"0" * 9000),
    ],
)
def test_an_integer_that_python_does_not_read_is_named(
    tmp_path: Path, qwen: Path, content: bytes
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a", "answer": 1}\n' + content)
    assert complaint(tmp_path / "a.jsonl", qwen).startswith(
        "a.jsonl, line 2: not JSON (Exceeds the limit"
    )


LINES = {
    "null": b"null",
    "number": b"3",
    "float": b"1e5",
    "text": b'"a"',
    "list": b'[{"prompt": "a"}]',
    "boolean": b"true",
    "NUL": b"\x00",
    "NUL in text": b'{"prompt": "a\x00b"}',
    "cut": b'{"prompt": "a',
    "two": b'{"prompt": "a"} {"prompt": "b"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "a mark within": b"\xef\xbb\xbf\xef\xbb\xbf" + b'{"prompt": "a"}',
    "word": b"undefined",
    "half a character": b'{"prompt": "\\ud83d"}',
    "half a character inside": b'{"prompt": "a", "x": {"y": ["\\udc00"]}}',
    "half a character as a name": b'{"\\ud83d": "a"}',
}


@pytest.mark.parametrize("good", [0, 1, 20_000])
@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, qwen: Path, line: bytes, good: int) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\n' * good + line + b"\n")
    assert re.match(
        rf"a\.jsonl, line {'(16385|20001)' if good == 20_000 else good + 1}: ",
        complaint(tmp_path / "a.jsonl", qwen),
    )


@pytest.mark.parametrize("line", [b"null", b"3", b'"a"', b"[]", b"{}"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_file_of_nothing_but_such_lines_is_refused(
    tmp_path: Path, qwen: Path, line: bytes, name: str
) -> None:
    content = line + b"\n"
    (tmp_path / name).write_bytes(
        b"[" + b",".join([line] * 100) + b"]" if name == "a.json" else content * 100_000
    )
    said = complaint(tmp_path / name, qwen)
    assert said.startswith(
        (
            f"{name}, line 1: a row is an object",
            f"{name}, row 1: a row is an object",
            f"{name}: the rows have",
        )
    )


def test_rows_without_keys_become_rows_of_nulls(tmp_path: Path, qwen: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('\ufeff{}\n{"prompt": "a"}\n')
    assert complaint(file, qwen).startswith("a.jsonl, line 1: 'prompt' is null")
    file.write_text('{"prompt": "a", "x": {}}\n{"prompt": "a"}\n')
    assert Prompts.read(file, qwen).table["x"].to_pylist() == [{}, None]


def test_a_value_that_no_file_could_hold_is_named(qwen: Path) -> None:
    for value, said in (
        (object(), "rows, row 2: 'x' is a object"),
        ({1: "a"}, "column 'x' cannot be read"),
        ("\ud83d", r"rows, row 2: 'x' holds the lone surrogate '\\ud83d'"),
        ({"a\udc00": 1}, r"rows, row 2: 'x' holds the lone surrogate '\\udc00'"),
    ):
        with pytest.raises(UserError, match=said):
            Prompts.from_rows([{"prompt": "a"}, {"prompt": "a", "x": value}], qwen)


def test_half_a_character_in_the_system_prompt_is_named(qwen: Path) -> None:
    with pytest.raises(UserError, match=r"system: .*lone surrogate '\\ud83d'"):
        Prompts.from_rows([{"prompt": "a"}], qwen, system="Be brief \ud83d")


@pytest.mark.parametrize(
    "source", [3, None, {"prompt": ["a"]}, [{"prompt": "a"}], [3], {"train": []}, object()]
)
def test_a_wrong_path_type_is_refused_with_the_accepted_types(qwen: Path, source: Any) -> None:
    with pytest.raises(
        UserError, match=r"prompts are read from a path.*Prompts.from_rows takes a list of dictionaries"
    ):
        Prompts.read(source, qwen)


@pytest.mark.parametrize("rows", [3, None, "a.jsonl", {"prompt": ["a"]}, object()])
def test_rows_of_a_wrong_type_are_refused_with_the_accepted_types(qwen: Path, rows: Any) -> None:
    with pytest.raises(
        UserError,
        match=r"rows are a list of dictionaries, a datasets.Dataset, a pandas DataFrame, or an Arrow",
    ):
        Prompts.from_rows(rows, qwen)


def test_text_after_an_array_is_refused(tmp_path: Path, qwen: Path) -> None:
    (tmp_path / "a.json").write_text('[{"prompt": "a"}]\n[{"prompt": "b"}]\n')
    assert (
        complaint(tmp_path / "a.json", qwen)
        == "a.json: not JSON (Text after the array: line 2 column 1 (char 18))"
    )
    (tmp_path / "a.json").write_text('[{"prompt": "a"}]\n \n')
    assert len(Prompts.read(tmp_path / "a.json", qwen)) == 1


@pytest.mark.parametrize("rows", [2.5, "2", None])
def test_a_number_of_rows_to_hold_out_is_an_integer(qwen: Path, rows: Any) -> None:
    prompts = Prompts.from_rows([{"prompt": str(k)} for k in range(20)], qwen, name="sums")
    with pytest.raises(
        UserError, match=r"sums: hold_out\(rows=.*\): a number of rows is an integer, such as 2"
    ):
        prompts.hold_out(rows)
