"""Printing untrusted text never controls the terminal."""

import io

import pyarrow as pa
import pytest

from weft.dataflow.runs.tables import render_table
from weft.dataflow.untrusted_text import one_line, show, show_json

STEERING = [
    "\x1b[2J",
    "\x1b]8;;http://x\x1b\\y\x1b]8;;\x1b\\",
    "\r",
    "\x7f",
    "\x9b31m",
    "\u202e",
    "\u2066",
    "\x00",
    "\x08",
]


@pytest.mark.parametrize("text", STEERING)
def test_no_print_steers_the_terminal(text: str):
    table = pa.table({f"name{text}": [f"a{text}b"], "list": [[text]], "struct": [{"field": text}]})
    stream = io.StringIO()
    show(f"a{text}b", stream)
    show_json({"key": f"a{text}b"}, stream)
    for printed in (stream.getvalue(), one_line(f"a{text}b"), render_table(table)):
        assert text not in printed and not set(printed) & set(text) - set("[]28;http://xy\\31mJ"), ascii(
            printed
        )


def test_a_stream_that_lacks_characters_gets_escapes_and_secrets_are_hidden():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show("猫 at postgres://ann:s3cret@db", stream)
    stream.seek(0)
    assert stream.read() == "\\u732b at postgres://ann:[hidden]@db\n"
