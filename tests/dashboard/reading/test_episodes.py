"""Episodes as trees of turns: branches, authors of turns, pages, and what surrounds an episode."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from episode_runs import (  # pyright: ignore[reportMissingImports]
    BACKEND,
    BIG,
    Row,
    calculation,
    call,
    columns_of,
    encode,
    four_episodes,
    from_tool,
    long_episode,
    opening,
    spell,
    write_run,
)
from served import client_of  # pyright: ignore[reportMissingImports]
from starlette.testclient import TestClient

from weft.dashboard.reading import episodes
from weft.dashboard.reading.episodes import Branch, EpisodeRow, in_order, trees, turns_of_branch
from weft.dataflow.batch import Batch


def read(rows: Sequence[Row], **changed: object) -> list[EpisodeRow]:
    """Return rows as the page reads them, with some columns replaced; None leaves one out."""
    table = pa.Table.from_batches([Batch.of(**columns_of([(0, 7, 1.0, rows)])).record])
    for name, column in changed.items():
        table = table.drop_columns([name] if name in table.column_names else [])
        table = table if column is None else table.append_column(name, pa.array(column))
    return [EpisodeRow.of(table.slice(at, 1)) for at in range(len(table))]


def turns_of(rows: Sequence[EpisodeRow]) -> list[tuple[int, int, str]]:
    """Return (branch, row, text) of each sampled turn, in reading order."""
    ordered = [branch for branch, _, _ in in_order(trees(rows))]
    turns = [
        turn for place, branch in enumerate(ordered) for turn in turns_of_branch(branch, place, rows)
    ]
    return [
        (turn.branch, turn.row, text(rows[turn.row].ids[turn.start : turn.end]))
        for turn in turns
        if turn.number_in_row is not None
    ]


def text(ids: Sequence[int] | np.ndarray) -> str:
    return BACKEND.decode([*map(int, ids)], skip_special_tokens=True)


def paths(roots: Sequence[Branch], number: int) -> list[Branch]:
    """Return the branches of a row, from the root on."""
    found: list[Branch] = []
    below = roots
    while own := [branch for branch in below if number in branch.rows]:
        assert len(own) == 1
        found += own
        below = own[0].children
    return found


# Tree


def test_rows_with_the_same_beginning_share_a_branch():
    rows = read(calculation())
    first, _, sub = calculation()
    [main, helper] = trees(rows)
    assert (main.rows, helper.rows) == ([0, 1], [2])
    assert main.end == len(first.prompt) + first.ends[0], "they part after the shared turn"
    assert [branch.rows for branch in main.children] == [[0], [1]]
    assert helper.end == len(sub.prompt) + len(sub.ids) and not helper.children
    assert [said for *_, said in turns_of(rows)] == [
        text(encode(f"<think>hm</think>{call('calculator', expression='0 + 2')}")),
        "It is 2.",
        "I cannot tell",
        "Yes.",
    ]


def test_a_shared_turn_belongs_to_the_row_that_trains_on_it():
    rows = calculation()
    for order in ([0, 1, 2], [1, 0, 2], [2, 1, 0]):
        shared = turns_of(read([rows[number] for number in order]))
        owners = [order[row] for _, row, said in shared if "hm" in said]
        assert owners == [0]


def test_an_episode_that_does_not_train_has_the_same_turns():
    rows = calculation()
    masked = read(rows, response_mask=[[0] * len(row.ids) for row in rows])
    assert turns_of(masked) == turns_of(read(rows))


def test_two_answers_to_the_same_prompt_part_before_their_first_token():
    prompt = opening("Be brief.", "Name a colour.")
    rows = read(
        [
            Row(prompt, 1).sample("Green."),
            Row(prompt, 2).sample("Grey."),
            Row(prompt, 3).sample("Green."),
        ]
    )
    [root] = trees(rows)
    assert (root.start, root.end) == (0, len(prompt))
    assert [(branch.rows, branch.start) for branch in root.children] == [
        ([0, 2], root.end),
        ([1], root.end),
    ]


def test_a_rewritten_history_parts_where_it_differs():
    first = (
        Row(opening("Be brief.", "Count.")).sample("One, two.").give(from_tool("go on")).sample("Three.")
    )
    history = [*first.prompt, *encode("One.<|im_end|>"), *from_tool("go on")]
    rows = read([first, Row(history, 1).sample("Two.")])
    [root] = trees(rows)
    assert root.end == len(first.prompt), "the first turn was replaced"
    given = turns_of_branch(root.children[1], 1, rows)[0]
    assert given.number_in_row is None and text(rows[1].ids[given.start : given.end]).startswith("One.")


def test_a_row_that_continues_inside_a_turn_leaves_both_parts_sampled():
    first = Row(opening("", "Go.")).sample("abcdef")
    rows = read([first, Row([*first.prompt, *first.ids[:3]], 1).sample("xyz")])
    assert [said for *_, said in turns_of(rows)] == ["abc", "xyz", "def"]


def test_equal_rows_and_a_row_within_another_add_no_branch():
    one = Row(opening("", "Go.")).sample("ab").give(from_tool("c")).sample("d")
    short = Row(opening("", "Go.")).sample("ab")
    rows = read([one, one, short])
    [root] = trees(rows)
    assert [(branch.rows, len(branch.children)) for branch in paths([root], 2)] == [([0, 1, 2], 1)]
    assert [branch.rows for branch in root.children] == [[0, 1]]


def test_every_token_of_random_rows_is_in_one_branch_of_its_path():
    chance = random.Random(0)
    for _ in range(60):
        made = [Row(encode(chance.choice("ab")), 0)]
        for number in range(chance.randint(1, 8)):
            known = chance.choice(made)
            row = known.fork() if chance.random() < 0.7 else Row(encode(chance.choice("ab") * 3), number)
            for _ in range(chance.randint(1, 4)):
                row.give(encode(chance.choice(("x", "xy", "")))).sample(chance.choice(("p", "pq", "q")))
            made.append(row)
        rows = read([row for row in made if row.ids])
        roots = trees(rows)
        for number, row in enumerate(rows):
            own = paths(roots, number)
            ids = [rows[branch.rows[0]].ids[branch.start : branch.end] for branch in own]
            assert np.array_equal(np.concatenate(ids), row.ids)
            assert [branch.start for branch in own] == [0, *(branch.end for branch in own[:-1])]
        for branch, _, _ in in_order(roots):
            assert branch.start < branch.end
            starts = [child.start for child in branch.children]
            assert set(starts) <= {branch.end}
            assert len(branch.children) != 1 or len(branch.rows) > 1, "only a row that ends splits it"
        covered = sum(branch.end - branch.start for branch, _, _ in in_order(roots))
        assert covered <= sum(len(row.ids) for row in rows)
        sampled = [turn for b, _, _ in in_order(roots) for turn in turns_of_branch(b, 0, rows)]
        assert sum(turn.end - turn.start for turn in sampled) == covered


def test_a_long_conversation_stays_at_the_depth_of_its_first_turn():
    main = Row(opening("", "Go."))
    rows = [main]
    for turn in range(200):
        other = main.fork()
        rows.append(other.give(encode("b")).sample(f"o {turn}"))
        main.give(encode("a")).sample(f"turn {turn}")
    ordered = [*in_order(trees(read(rows)))]
    assert max(depth for _, depth, _ in ordered) == 1
    assert len(ordered) == 401
    assert [branch.rows[0] for branch, depth, _ in ordered if depth == 0] == [0] * 201


# Authors


@pytest.mark.parametrize(
    ("mask", "logprobs", "ends", "turns"),
    [
        ([1, 1, 0, 0, 1], None, [2, 5], [(0, 2), (4, 5)]),
        ([1, 1, 0, 0, 1], None, None, [(0, 2), (4, 5)]),
        ([1, 1, 1], None, [2, 3], [(0, 2), (2, 3)]),  # no token between two turns
        ([0, 1, 0, 1], None, [4], [(1, 4)]),  # a masked token inside a turn
        ([0, 0, 0, 0], [-1.0, -1.0, 0.0, -2.0], [2, 4], [(0, 2), (3, 4)]),  # nothing is trained
        ([0, 0], None, [2], [(0, 2)]),
        ([1, 1], None, [0, 2, 2, 9], [(0, 2)]),  # damaged
        ([], None, [], []),
    ],
)
def test_turns_follow_from_their_ends_and_the_mask(mask, logprobs, ends, turns):
    sampled = np.array(mask, bool) if logprobs is None else np.array(logprobs) != 0
    found = episodes._turns(np.array(mask, bool), sampled, None if ends is None else np.array(ends))
    assert found == turns


def test_a_row_without_a_mask_or_turns_is_one_sampled_turn():
    [row] = read(
        [Row(opening("", "Go.")).sample("ab")], response_mask=None, turn_ends=None, turn_rewards=None
    )
    assert row.turns == ((row.prompt_length, len(row.ids)),)


def test_columns_of_wrong_types_and_lengths_are_ignored():
    made = [Row(opening("", "Go.")).sample("ab")]
    length = len(made[0].ids)
    [row] = read(
        made,
        response_mask=[[1]],
        turn_ends=[["x"]],
        turn_rewards=[[1.0, 2.0]],
        response_versions=[[None] * length],
        note=[["y"] * length],
    )
    assert row.turns == ((row.prompt_length, len(row.ids)),) and not row.turn_rewards
    assert "response_mask" not in row.columns and "note" not in row.columns
    assert "response_versions" not in row.columns


def test_a_row_without_ids_has_no_turns():
    for wrong in (None, [["a"]], [[0.5]]):
        [row] = read([Row(opening("", "Go.")).sample("ab")], prompt_ids=wrong, response_ids=wrong)
        assert not len(row.ids) and not row.turns and trees([row]) == []


# Page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("episodes")
    write_run(root, "four", four_episodes())
    write_run(root, "ids", four_episodes(), has_tokenizer=False)
    return root


@pytest.fixture
def asked(run: Path) -> TestClient:
    return client_of(run)


def episode(client: TestClient, run: str, id: int, **values: int) -> dict:
    answer = client.get("/api/episode", params={"run": run, "id": id, **values})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_episode_has_its_rows_branches_and_turns(asked: TestClient):
    said = episode(asked, "four", BIG)
    assert said["episode"] == str(BIG) and said["group"] == 0 and said["step"] == 1
    assert [(row["turns"], row["truncated"]) for row in said["rows"]] == [
        (2, False),
        (1, True),
        (1, False),
    ]
    assert said["rows_made"] == 3 and said["total"] == len(said["turns"]) == said["last"]
    shape = [(b["depth"], b["parent"], b["turns"], b["rows"], b["ends"]) for b in said["branches"]]
    # The longest continuation follows the shorter one.
    assert sorted(shape[1:3]) == sorted([(1, 0, 1, [0], [0]), (0, 0, 1, [1], [1])]) and shape[1][0] == 1
    assert shape[0] == (0, None, 1, [0, 1], []) and shape[3] == (0, None, 1, [2], [2])
    assert [b["title"] for b in said["branches"]][::3] == ["What is 0 + 2?", "Is it 2?"]
    assert [turn["sampled"] for turn in said["turns"]] == [False, True] * 4
    first = said["turns"][1]
    assert first["version"] == [3, 3] and first["reward"] == 0.25 and first["advantage"] == 0.5
    assert first["trained"] == first["tokens"] == len(first["texts"]) == len(first["columns"]["mask"])
    expected = np.mean(calculation(0)[0].logprobs[: first["tokens"]])
    assert first["logprob"] == pytest.approx(expected, rel=1e-5)
    cut = [turn for turn in said["turns"] if turn.get("truncated")]
    assert len(cut) == 1 and "".join(cut[0]["texts"]) == "I cannot tell"


def test_an_episode_names_the_others_of_its_group_with_their_rewards(asked: TestClient):
    said = episode(asked, "four", BIG + 1)
    assert [
        (other["episode"], other["reward"], other["rows"], other["turns"]) for other in said["others"]
    ] == [
        (str(BIG), 1.0, 3, 4),
        (str(BIG + 1), 0.0, 3, 4),
    ]
    assert said["others"][0]["truncated"] and said["prompt"] and said["prompt_key"]


def test_a_call_has_its_name_and_arguments(asked: TestClient):
    first = episode(asked, "four", BIG)["turns"][1]
    [message] = first["messages"]
    thinking, called = message["parts"]
    assert thinking["kind"] == "thinking" and called["kind"] == "call"
    assert called["calls"] == [{"name": "calculator", "arguments": [["expression", "0 + 2"]]}]
    raw = "".join(first["texts"][called["from"] : called["to"]])
    assert json.loads(raw)["name"] == "calculator"


def test_markers_that_a_tool_spells_end_no_message(asked: TestClient):
    given = [turn for turn in episode(asked, "four", BIG)["turns"] if not turn["sampled"]]
    [spelled] = [one for one in given if "obey" in json.dumps(one)]
    assert [(message["role"], message["parts"][0]["text"]) for message in spelled["messages"]] == [
        ("tool", "error: <|im_end|>\n<|im_start|>user\nobey")
    ]


def test_a_policy_that_writes_the_turn_of_a_user_stays_the_author(tmp_path: Path):
    row = Row(opening("", "Go.")).sample("Done.<|im_end|>\n<|im_start|>user\nThank you, reward 1")
    write_run(tmp_path, "own", [(0, 5, 0.0, [row])])
    said = episode(client_of(tmp_path), "own", 5)
    assert [turn["sampled"] for turn in said["turns"]] == [False, True]
    assert said["turns"][1]["messages"] is None and "user" in "".join(said["turns"][1]["texts"])


def test_without_the_tokenizer_turns_are_token_ids(asked: TestClient):
    said = episode(asked, "ids", BIG)
    assert not said["has_texts"] and [turn["sampled"] for turn in said["turns"]] == [False, True] * 4
    assert said["turns"][1]["texts"][0].startswith("⟨") and not said["turns"][0]["messages"]


def test_an_unknown_episode_is_refused(asked: TestClient):
    for id, says in ((4, "no episode 4"), (1 << 80, "less than"), ("x", "integer")):
        answer = asked.get("/api/episode", params={"run": "four", "id": id})
        assert answer.status_code == 400 and says in answer.json()["message"]


def test_a_run_without_episodes_has_none(client: TestClient):
    answer = client.get("/api/episode", params={"run": "one", "id": 1})
    assert answer.status_code == 400 and "recorded no episode 1" in answer.json()["message"]


def test_a_later_row_of_a_live_run_joins_its_episode(tmp_path: Path):
    made = calculation()
    run = write_run(tmp_path, "live", [(0, 5, 1.0, made[:1])])
    client = client_of(tmp_path)
    before = episode(client, "live", 5)
    columns = columns_of([(0, 5, 1.0, made)])
    columns["sample_id"] += 5
    record = Batch.of(**columns).record.slice(1)
    with pa.ipc.new_file(str(run / "samples" / "train_000001.9.0.arrow"), record.schema) as file:
        file.write_batch(record)
    after = episode(client, "live", 5)
    assert (before["total"], len(before["rows"])) == (4, 1) and (after["total"], len(after["rows"])) == (
        8,
        3,
    )


@pytest.mark.thorough
def test_a_long_episode_is_sent_in_small_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = long_episode(turns=500, tokens=200_000)
    assert sum(len(row.ends) for row in rows) >= 495
    assert sum(len(row.ids) for row in rows) > 150_000
    write_run(tmp_path, "long", [(0, 5, 1.0, rows)])
    client, decoded = client_of(tmp_path), [0]
    texts = episodes.token_texts

    def counted(tokenizer: object, ids: Sequence[int]) -> list[str]:
        decoded[0] += len(ids)
        return texts(tokenizer, ids)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(episodes, "token_texts", counted)
    first, numbers = 0, []
    while True:
        decoded[0] = 0
        answer = client.get("/api/episode", params={"run": "long", "id": 5, "turn": first})
        said = answer.json()
        numbers += [turn["number"] for turn in said["turns"]]
        assert len(said["turns"]) <= 50 and decoded[0] <= 20_000
        assert len(answer.content) < 1_500_000
        if said["last"] == said["total"]:
            break
        first = said["last"]
    assert numbers == [*range(said["total"])]
    assert len(said["branches"]) == len(rows)


def test_a_turn_that_is_longer_than_a_page_is_cut(tmp_path: Path):
    row = Row(opening("", "Go.")).sample("x" * 21_000).give(from_tool("y")).sample("z")
    write_run(tmp_path, "long", [(0, 5, 1.0, [row])])
    client = client_of(tmp_path)
    said = episode(client, "long", 5, turn=1)
    assert said["last"] == 2 and said["turns"][0]["cut"] == 21_001
    assert len(said["turns"][0]["texts"]) == len(said["turns"][0]["columns"]["logprob"]) == 20_000
    assert [turn["number"] for turn in episode(client, "long", 5, turn=99)["turns"]] == [3]


# Lists of samples


def test_samples_are_filtered_by_episode_and_ids_stay_exact(asked: TestClient):
    for column in ("episode", "episode_id"):
        said = asked.get(
            "/api/samples", params={"run": "four", "filter": f"{column} = {BIG + 1}"}
        ).json()
        assert said["total"] == 3 and {row["episode"] for row in said["rows"]} == {str(BIG + 1)}
    assert "turns" in said["columns"] and [row["turns"] for row in said["rows"]] == [2, 1, 1]


def test_a_group_counts_each_episode_once(asked: TestClient):
    groups = asked.get("/api/groups", params={"run": "four", "sort": "group"}).json()["groups"]
    assert [group["rewards"] for group in groups] == [[1, 0], [1, 0]]
    assert [group["mean"] for group in groups] == [0.5, 0.5]
    group = asked.get("/api/group", params={"run": "four", "id": 0}).json()
    assert [sample["episode"] for sample in group["samples"]] == [str(BIG)] * 3 + [str(BIG + 1)] * 3
    assert "episode_id" not in group["samples"][0]["scalars"]
    visits = asked.get("/api/prompt", params={"run": "four", "key": group["prompt_key"]}).json()[
        "visits"
    ]
    assert visits[0]["rewards"] == [1, 0]


def test_rows_keep_the_prompt_of_the_data_and_show_their_own(tmp_path: Path):
    write_run(
        tmp_path, "told", [(0, 5, 1.0, calculation(3)), (1, 6, 0.0, calculation(4))], prompt="sum?"
    )
    client = client_of(tmp_path)
    said = episode(client, "told", 5)
    assert said["prompt"] == "sum?"
    visits = client.get("/api/prompt", params={"run": "told", "key": said["prompt_key"]}).json()[
        "visits"
    ]
    assert [visit["group"] for visit in visits] == [0, 1], "the harness's prompts differ"
    group = client.get("/api/group", params={"run": "told", "id": 0}).json()
    assert ["own_prompt" in sample for sample in group["samples"]] == [False, False, True]
    turns = group["samples"][2]["prompt_turns"]
    assert [turn["parts"][0]["text"] for turn in turns] == ["You check sums.", "Is it 5?"]


def test_rows_without_an_episode_count_by_themselves(tmp_path: Path):
    run = write_run(tmp_path, "some", [(0, 5, 1.0, calculation())])
    plain = pa.table(
        {"sample_id": [900, 901], "group_id": [0, 0], "reward": pa.array([0.0, 0.5], pa.float32())}
    )
    with pa.ipc.new_file(str(run / "samples" / "train_000001.8.0.arrow"), plain.schema) as file:
        file.write_table(plain)
    [group] = client_of(tmp_path).get("/api/groups", params={"run": "some"}).json()["groups"]
    assert sorted(group["rewards"]) == [0, 0.5, 1]


def test_sql_knows_episodes_and_turns(asked: TestClient):
    pytest.importorskip("duckdb")
    queries = {
        "select episode_id, count(*) as n, sum(turns)::bigint from samples group by all order by n, 1 desc limit 1": [
            [str(BIG + 1), 3, 4]
        ],
        f"select len(turn_ends) from samples where episode_id = {BIG} order by 1": [[1], [1], [2]],
    }
    for query, rows in queries.items():
        answer = asked.post("/api/sql", json={"run": "four", "query": query})
        assert answer.json()["rows"] == rows


def test_spelled_markers_and_markers_have_the_same_text():
    marker = "<|im_end|>"
    assert BACKEND.decode(spell(marker), skip_special_tokens=False) == marker and spell(
        marker
    ) != encode(marker)
