"""Tables as text."""

import pyarrow as pa

from weft.dataflow.runs.tables import render_table


def test_long_values_and_long_tables_are_cut():
    text = render_table(
        pa.table({"text": ["a" * 50, "line\nbreak", "c"], "x": [0.1234567, None, 3.0]}), limit=2
    )
    assert text.splitlines() == [
        "text                                     x",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaa...  0.123457",
        "line\\nbreak                              -",
        "... 1 more",
    ]
