"""Batch against a naive model: a list of dictionaries."""

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.dataflow.batch import Batch
from weft.dataflow.buffer.segments import SegmentReader, SegmentWriter
from weft.dataflow.errors import UserError

Row = dict[str, Any]

ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "sample_id": st.integers(0, 1000),
            "group_id": st.integers(0, 3),
            "reward": st.floats(-4, 4, width=32),
            "response_ids": st.lists(st.integers(0, 99), max_size=4),
            "prompt": st.text(max_size=3),
        }
    ),
    min_size=1,
    max_size=8,
)


def small() -> Batch:
    """Four rows; the second is empty."""
    return Batch.of(
        sample_id=[10, 11, 12, 13],
        group_id=[7, 5, 7, 5],
        reward=[1.0, 0.0, 0.5, 2.0],
        response_ids=[[1, 2, 3], [], [4], [5, 6]],
        prompt=["a", "b", "c", "d"],
    )


# Construction


def test_declared_columns_get_their_declared_type():
    batch = Batch.of(reward=[1, 2], response_ids=[[1], []], advantages=[[], []], mine=[1, 2])
    types = [str(f.type) for f in batch.record.schema]
    assert types == ["float", "list<item: int32>", "list<item: float>", "int64"]


def test_a_column_is_given_as_list_array_numpy_tensor_or_pair():
    torch = pytest.importorskip("torch")
    pair = (np.array([1, 2, 3]), np.array([0, 2, 3]))
    tensors = (torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]))
    same = [[[1, 2], [3]], pa.array([[1, 2], [3]]), pair, tensors, pa.chunked_array([[[1, 2]], [[3]]])]
    assert [Batch.of(response_ids=data)["response_ids"].to_pylist() for data in same] == [
        [[1, 2], [3]]
    ] * 5
    for data in ([1.0, 2.0], np.array([1.0, 2.0]), torch.tensor([1.0, 2.0], requires_grad=True)):
        assert Batch.of(reward=data).numpy("reward").tolist() == [1.0, 2.0]


def test_from_rows_and_to_rows_are_inverse():
    rows = small().to_rows()
    assert Batch.from_rows(rows) == small()
    assert len(Batch.from_rows([])) == 0


def test_any_column_name_will_do():
    batch = Batch.of(cls=[1], self=[2]).with_columns(self=[3])
    assert batch.to_rows() == [{"cls": 1, "self": 3}]


# Errors


def test_an_unknown_column_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="batch has no column 'rewards'; did you mean 'reward'"):
        small()["rewards"]
    with pytest.raises(UserError, match="batch has no column 'xyz'; it has sample_id, group_id"):
        small().select(["xyz"])


def test_columns_of_the_wrong_length_are_refused():
    with pytest.raises(UserError, match="column 'x' has 2 values for a batch of 4 rows"):
        small().with_columns(x=[1, 2])


def test_split_sizes_must_add_up():
    with pytest.raises(UserError, match=r"split sizes \[1, 2\] add up to 3, not to the 4 rows"):
        small().split([1, 2])


def test_reading_a_column_as_the_wrong_kind_names_its_kind():
    pytest.importorskip("torch")
    with pytest.raises(UserError, match="column 'reward' is float, not a ragged column"):
        small().ragged("reward")
    with pytest.raises(
        UserError, match=r"column 'prompt' is string, not one number a row; read it with numpy\(\)"
    ):
        small().tensor("prompt")
    with pytest.raises(UserError, match=r"'response_ids' is list<item: int32>.*read it with ragged\(\)"):
        small().tensor("response_ids")


def test_booleans_can_be_read_though_arrow_packs_them():
    torch = pytest.importorskip("torch")
    batch = Batch.of(kept=[True, False, True]).slice(1, 2)
    assert batch.numpy("kept").tolist() == [False, True]
    assert torch.equal(batch.tensor("kept"), torch.tensor([False, True]))


def test_concat_needs_the_same_columns():
    with pytest.raises(UserError, match="at least one batch"):
        Batch.concat([])
    with pytest.raises(UserError, match="must have the same columns, not reward and mine"):
        Batch.concat([Batch.of(reward=[1.0]), Batch.of(mine=[1])])
    with pytest.raises(UserError, match="must have columns of the same types"):
        Batch.concat([Batch.of(mine=["a"]), Batch.of(mine=[1])])


def test_concat_finds_the_type_that_holds_both():
    batch = Batch.concat([Batch.of(mine=[[]], score=[1]), Batch.of(mine=[[1, 2]], score=[0.5])])
    assert batch.to_rows() == [{"mine": [], "score": 1.0}, {"mine": [1, 2], "score": 0.5}]


# Slices and ragged columns


def chunked(*chunks: list[Any], type: pa.DataType | None = None) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(chunk, type) for chunk in chunks])


MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def test_all_chunks_of_a_table_come_into_the_batch_also_beyond_32_bit_offsets():
    table = pa.table(
        {
            "text": chunked(["one", "two"], ["three"]),
            "bytes": chunked([b"1", b"2"], [None], type=pa.binary()),
            "messages": chunked(
                [[{"role": "user", "content": "a"}], []],
                [[{"role": "user", "content": "b"}]],
                type=MESSAGES,
            ),
            "response_ids": chunked([[1, 2], []], [[3]], type=pa.list_(pa.int32())),
            "reward": chunked([1.0, 2.0], [3.0]),
        }
    )
    for max_bytes in (10, 1 << 30):
        batch = Batch.of_table(table, max_bytes=max_bytes)
        assert batch.to_rows() == table.to_pylist()
        assert (
            pa.types.is_large_string(batch["text"].type)
            == pa.types.is_large_list(batch["messages"].type)
            == (max_bytes == 10)
        )
        assert batch.lengths("response_ids").tolist() == [2, 0, 1]
        assert [part.tolist() for part in batch.slice(2, 1).ragged("response_ids")] == [[3], [0, 1]]
    assert Batch.of(response_ids=Batch.of_table(table, max_bytes=10)["response_ids"])[
        "response_ids"
    ].type == pa.list_(pa.int32())


def test_a_table_without_rows_or_without_columns_makes_a_batch():
    assert len(Batch.of_table(pa.table({"text": pa.array([], pa.string())}))) == 0
    assert len(Batch.of_table(pa.table({"reward": [1.0]}).select([]))) == 1
    assert Batch.of_table(pa.table({})).columns == ()


def test_a_column_without_64_bit_offsets_stays_as_it_is():
    maps = chunked([[("a", 1)]], [[("b", 2)]], type=pa.map_(pa.string(), pa.int32()))
    assert len(Batch.of_table(pa.table({"extra": maps}), max_bytes=1)) == 2, (
        "maps have no 64-bit offsets, and these fit"
    )


@pytest.mark.slow
def test_text_of_over_two_gigabytes_loses_no_row(tmp_path: Path):
    million = "x" * (1 << 20)
    half = pa.array([million] * 1100)
    table = pa.table(
        {
            "number": chunked(list(range(1100)), list(range(1100, 2200))),
            "text": pa.chunked_array([half, half]),
        }
    )
    segment = SegmentWriter(tmp_path, "n0", "w").append(Batch.of_table(table))
    del half, table
    rows = SegmentReader(tmp_path, "n0").read(segment)
    assert len(rows) == 2200
    assert rows.take([2199]).to_rows() == [{"number": 2199, "text": million}]


def test_the_offsets_of_a_slice_start_at_zero():
    part = small().slice(2, 2)
    values, cu_seqlens = part.ragged_numpy("response_ids")
    assert values.tolist() == [4, 5, 6] and cu_seqlens.tolist() == [0, 1, 3]
    assert cu_seqlens.dtype == np.int32
    assert part.lengths("response_ids").tolist() == [1, 2]


def test_empty_rows_and_empty_batches_are_ordinary():
    torch = pytest.importorskip("torch")
    nothing = small().slice(0, 0)
    values, cu_seqlens = nothing.ragged("response_ids")
    assert values.tolist() == [] and values.dtype == torch.int32
    assert cu_seqlens.tolist() == [0]
    assert nothing.padded("response_ids").shape == (0, 0)
    assert nothing.tensor("reward").shape == (0,)
    assert nothing.lengths("response_ids").tolist() == [] and nothing.groups()[0].tolist() == []
    assert Batch.concat([nothing, small(), nothing]) == small()
    only_empty = small().take([1, 1])
    assert only_empty.ragged("response_ids")[1].tolist() == [0, 0, 0]
    assert only_empty.padded("response_ids").shape == (2, 0)
    assert Batch.of(response_ids=[]).ragged("response_ids")[1].tolist() == [0]


def test_padded_fills_right_or_left():
    pytest.importorskip("torch")
    assert small().padded("response_ids", fill=-1).tolist() == [
        [1, 2, 3],
        [-1, -1, -1],
        [4, -1, -1],
        [5, 6, -1],
    ]
    assert small().padded("response_ids", left=True).tolist() == [
        [1, 2, 3],
        [0, 0, 0],
        [0, 0, 4],
        [0, 5, 6],
    ]


def test_groups_need_not_be_contiguous():
    keys, index = small().groups()
    assert keys.tolist() == [5, 7] and index.tolist() == [1, 0, 1, 0]


def test_selecting_no_columns_keeps_the_rows():
    assert len(small().select([])) == 4
    assert small().select([]).with_columns(x=[1, 2, 3, 4]).columns == ("x",)


# Zero copies


def address(array: pa.Array) -> int:
    values = array.values if pa.types.is_list(array.type) else array
    return values.buffers()[-1].address


def test_reading_a_column_does_not_copy_it():
    pytest.importorskip("torch")
    batch = small()
    assert batch.tensor("reward").data_ptr() == address(batch["reward"])
    assert batch.numpy("reward").ctypes.data == address(batch["reward"])
    values, cu_seqlens = batch.ragged("response_ids")
    assert values.data_ptr() == address(batch["response_ids"])
    assert cu_seqlens.data_ptr() == batch["response_ids"].buffers()[1].address
    part = batch.slice(2, 2)
    assert part.ragged("response_ids")[0].data_ptr() == address(batch["response_ids"]) + 3 * 4
    assert part.tensor("reward").data_ptr() == address(batch["reward"]) + 2 * 4


def test_cutting_and_adding_columns_shares_the_rest():
    batch = small()
    where = address(batch["response_ids"])
    others = [
        batch.slice(1, 2),
        batch.select(["response_ids"]),
        batch.with_columns(x=[0] * 4),
        *batch.split([1, 3]),
    ]
    assert [address(b["response_ids"]) for b in others] == [where] * 5
    assert batch.with_columns(reward=batch["reward"])["reward"].buffers()[1].address == address(
        batch["reward"]
    )


def test_making_a_ragged_column_from_numpy_does_not_copy_it():
    values, offsets = np.arange(6, dtype=np.int32), np.array([0, 2, 6], dtype=np.int32)
    assert address(Batch.of(response_ids=(values, offsets))["response_ids"]) == values.ctypes.data


# Pickles, for the driver and Ray's object store


def test_the_pickle_of_a_slice_does_not_carry_its_parent():
    long = Batch.of(response_ids=(np.arange(1_000_000), np.arange(0, 1_000_001, 1000)))
    part = long.slice(500, 2)
    assert len(pickle.dumps(part)) < 2 * 1000 * 4 + 2000
    assert pickle.loads(pickle.dumps(part)) == part
    assert part.ragged_numpy("response_ids")[0].tolist() == list(range(500_000, 502_000))


def test_out_of_band_pickles_come_back_without_a_copy():
    batch = small()
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(data) < 300 and len(buffers) == 1
    memory = pa.py_buffer(buffers[0].raw())
    back = pickle.loads(data, buffers=[memory])
    assert back == batch
    assert memory.address <= address(back["response_ids"]) < memory.address + memory.size


@pytest.mark.parametrize(
    "batch", [small(), small().slice(1, 0), small().select([]), Batch.of(), Batch.of(b=[True, None])]
)
def test_every_batch_survives_pickle_and_copy(batch: Batch):
    for back in (pickle.loads(pickle.dumps(batch)), copy.copy(batch), copy.deepcopy(batch)):
        assert back == batch and len(back) == len(batch) and back.columns == batch.columns


# The model


@given(rows=ROWS, data=st.data())
def test_a_batch_is_a_list_of_dictionaries(rows: list[Row], data: st.DataObject):
    batch, model = Batch.from_rows(rows), rows
    for _ in range(data.draw(st.integers(1, 4))):
        batch, model = data.draw(st.sampled_from([take, cut, joined, selected, extended, pickled]))(
            batch, model, data
        )
        assert batch.to_rows() == model
        assert len(batch) == len(model)
    if "response_ids" in batch:
        values, offsets = batch.ragged_numpy("response_ids")
        assert offsets[0] == 0 and len(offsets) == len(model) + 1
        assert [values[a:b].tolist() for a, b in itertools.pairwise(offsets)] == [
            r["response_ids"] for r in model
        ]
        assert batch.lengths("response_ids").tolist() == [len(r["response_ids"]) for r in model]
    if "group_id" in batch:
        keys, index = batch.groups()
        assert keys.tolist() == sorted({r["group_id"] for r in model})
        assert [int(keys[i]) for i in index] == [r["group_id"] for r in model]


def take(batch: Batch, model: list[Row], data: st.DataObject) -> tuple[Batch, list[Row]]:
    rows = data.draw(st.lists(st.integers(0, len(model) - 1), max_size=6)) if model else []
    return batch.take(rows), [model[k] for k in rows]


def cut(batch: Batch, model: list[Row], data: st.DataObject) -> tuple[Batch, list[Row]]:
    start = data.draw(st.integers(0, len(model)))
    length = data.draw(st.integers(0, len(model) - start))
    assert batch.split([start, length, len(model) - start - length])[1] == batch.slice(start, length)
    return batch.slice(start, length), model[start : start + length]


def joined(batch: Batch, model: list[Row], data: st.DataObject) -> tuple[Batch, list[Row]]:
    other, others = cut(batch, model, data)
    return Batch.concat([batch, other, batch]), model + others + model


def selected(batch: Batch, model: list[Row], data: st.DataObject) -> tuple[Batch, list[Row]]:
    names = data.draw(st.permutations(batch.columns))[: data.draw(st.integers(1, len(batch.columns)))]
    return batch.select(names), [{n: row[n] for n in names} for row in model]


def extended(batch: Batch, model: list[Row], data: st.DataObject) -> tuple[Batch, list[Row]]:
    lists = [data.draw(st.lists(st.integers(0, 9), max_size=3)) for _ in model]
    added = batch.with_columns(prompt_ids=lists)
    return added, [{**row, "prompt_ids": ids} for row, ids in zip(model, lists, strict=True)]


def pickled(batch: Batch, model: list[Row], data: st.DataObject) -> tuple[Batch, list[Row]]:
    return pickle.loads(pickle.dumps(batch)), model
