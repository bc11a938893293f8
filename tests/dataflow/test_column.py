"""Columns and their declarations."""

import pyarrow as pa

from weft.dataflow.column import DESCRIBED, IDENTITY, KNOWN, RESPONSE_IDS, REWARD, Column, ragged


def test_a_column_formats_as_its_name():
    assert str(REWARD) == "reward" and f"{RESPONSE_IDS}" == "response_ids"


def test_every_declared_column_is_known_by_its_name_with_a_unit_or_a_meaning():
    assert all(isinstance(c, Column) and KNOWN[c.name] is c and c.doc for c in KNOWN.values())
    assert (
        {c.name for c in IDENTITY}
        == {
            *("sample_id", "group_id", "parent_id", "draw_path"),
            *("made_before", "expected_tokens", "begun_number"),
        }
        <= set(KNOWN)
    )


def test_ragged_columns_have_int32_offsets():
    assert ragged(pa.int32()) == pa.list_(pa.int32())
    assert all(not pa.types.is_large_list(c.type) for c in KNOWN.values())


def test_the_columns_of_tokens_turns_and_episodes_are_not_inherited_by_other_tokens():
    said = {str(c) for columns in DESCRIBED.values() for c in columns}
    of_tokens_and_turns = {
        name
        for name, c in KNOWN.items()
        if c.doc.startswith("[") and not name.endswith("_ids") and name != "images"
    } | {"teacher_ids", "kept_ids", "teacher_prompt_ids", "teacher_response_ids"}
    of_episodes = {name for name in KNOWN if name.startswith("episode_")}
    assert said == of_tokens_and_turns | of_episodes | {"policy"}
    assert of_episodes == {"episode_id", "episode_rows", "episode_tokens"}
