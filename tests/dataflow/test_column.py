"""Columns and their declarations."""

import pyarrow as pa

from weft.dataflow.column import DESCRIBED, IDENTITY, KNOWN, RESPONSE_IDS, REWARD, Column, ragged


def test_a_column_formats_as_its_name():
    assert str(REWARD) == "reward" and f"{RESPONSE_IDS}" == "response_ids"


def test_every_declared_column_is_known_by_its_name_with_a_unit_or_a_meaning():
    assert all(isinstance(c, Column) and KNOWN[c.name] is c and c.doc for c in KNOWN.values())
    assert (
        {c.name for c in IDENTITY}
        == {"sample_id", "group_id", "parent_id", "draw_path", "made_before"}
        <= set(KNOWN)
    )


def test_ragged_columns_have_int32_offsets():
    assert ragged(pa.int32()) == pa.list_(pa.int32())
    assert all(not pa.types.is_large_list(c.type) for c in KNOWN.values())


def test_the_per_token_columns_are_known_columns():
    said = {str(c) for columns in DESCRIBED.values() for c in columns}
    of_tokens = {
        name
        for name, c in KNOWN.items()
        if c.doc.startswith("[") and not name.endswith("_ids") and name != "images"
    }
    assert said == of_tokens
