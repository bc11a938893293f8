"""Distillation across tokenizers: alignment by hand, a float64 reference, and closed forms."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_tokenizers import save_tokenizer

from weft.algorithms.cross_tokenizer import (
    SharedSpans,
    retokenized,
    shared_candidates,
    span_advantages,
)
from weft.algorithms.distillation import Distillation, ForwardKl, teacher_advantages
from weft.algorithms.loss import PackedRows, response_rows
from weft.algorithms.policy_loss import PolicyLoss
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.dataflow.prompts.token_bytes import TokenBytes
from weft.dataflow.prompts.tokenizer import Tokenizer

Folders = dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("tokenizers")
    specials = ("<turn>",)
    made = {
        # ids: <unk> 0, end 1, then characters and merged pairs
        "letters": save_tokenizer(root / "letters", "abcA", ("bc",)),
        "pairs": save_tokenizer(root / "pairs", "cba", ("ab", "ca"), end="<end>"),
        "with_turn": save_tokenizer(root / "with_turn", "abc", end="<end>", specials=specials),
        "also_turn": save_tokenizer(root / "also_turn", "ab", ("ab",), end="E", specials=specials),
        "lower": save_tokenizer(root / "lower", "abc", end="<end>", lowercase=True),
        "all_pairs": save_tokenizer(root / "all_pairs", "ab", ("aa", "ab", "ba", "bb")),
    }
    return made


def spans(folders: Folders, student: str, teacher: str, **settings: Any) -> SharedSpans:
    return SharedSpans(student=folders[student], teacher=folders[teacher], **settings)


def ids_of(folder: Path, *tokens: str) -> list[int]:
    backend = Tokenizer.load(folder).backend
    found = [backend.token_to_id(token) for token in tokens]
    assert None not in found
    return [number for number in found if number is not None]


def aligned(tokenizers: SharedSpans, *ids: int, mask: list[int] | None = None) -> tuple[Any, Any, Any]:
    """Return the teacher's tokens, and the spans of both, of one response."""
    masks = {} if mask is None else {"response_mask": [mask]}
    rows, _ = retokenized(Batch.of(response_ids=[list(ids)], **masks), tokenizers=tokenizers)
    names = Tokenizer.load(tokenizers.teacher).backend
    columns = (
        rows[c].to_pylist()[0] for c in ("teacher_response_ids", "student_spans", "teacher_spans")
    )
    teacher, ours, theirs = columns
    return [names.id_to_token(number) for number in teacher], ours, theirs


def test_spans_end_where_tokens_of_both_end(folders: Folders):
    tokenizers = spans(folders, "letters", "pairs")
    ids = ids_of(folders["letters"], "a", "b", "c", "bc", "a", "a", "</s>")  # abcbcaa
    teacher, ours, theirs = aligned(tokenizers, *ids)
    assert teacher == ["ab", "c", "b", "ca", "a", "<end>"]
    assert ours == [0, 0, 1, 2, 2, 3, 4]  # ab | c | bca | a | end
    assert theirs == [0, 1, 2, 2, 3, 4]


@pytest.mark.parametrize(
    ("tokens", "ours", "teacher"),
    [
        ((), [], []),
        (("</s>",), [0], ["<end>"]),
        (("a", "<unk>", "a"), [0, 1, 2], ["a", "<unk>", "a"]),  # a special token of the same name
        (("a", "A", "b"), [0, -1, -1], ["a"]),  # the teacher has no A
        (("a", "</s>", "b"), [0, 1, 2], ["a", "<end>", "b"]),
        (("b", "c"), [0, 1], ["b", "c"]),
    ],
)
def test_a_response_is_compared_up_to_the_first_token_that_the_teacher_lacks(
    tokens: tuple[str, ...], ours: list[int], teacher: list[str], folders: Folders
):
    found = aligned(spans(folders, "letters", "pairs"), *ids_of(folders["letters"], *tokens))
    assert found == (teacher, ours, [*range(len(teacher))])


def test_a_normaliser_that_changes_the_text_ends_the_comparison(folders: Folders):
    ids = ids_of(folders["letters"], "a", "A", "b")
    assert aligned(spans(folders, "letters", "lower"), *ids)[0] == ["a"]


def test_special_tokens_mean_the_same_by_role_by_name_or_by_choice(folders: Folders):
    own = ids_of(folders["also_turn"], "a", "<turn>", "b", "E")
    assert aligned(spans(folders, "also_turn", "with_turn"), *own)[0] == ["a", "<turn>", "b", "<end>"]
    assert aligned(spans(folders, "also_turn", "letters"), *own)[0] == ["a"]
    chosen = spans(folders, "also_turn", "letters", ends=(("<turn>", "</s>"),))
    assert aligned(chosen, *own)[0] == ["a", "</s>", "b", "</s>"]
    with pytest.raises(UserError, match=r"names 'b', but .*letters' has no such special token; it has"):
        spans(folders, "also_turn", "letters", ends=(("<turn>", "b"),)).check()


def test_a_span_with_a_masked_token_is_left_out(folders: Folders):
    ids = ids_of(folders["letters"], "a", "b", "c", "a")  # ab | ca
    tokenizers = spans(folders, "letters", "pairs")
    assert aligned(tokenizers, *ids)[1] == [0, 0, 1, 1]
    assert aligned(tokenizers, *ids, mask=[1, 1, 0, 1])[1] == [0, 0, -1, -1]


def test_bytes_that_are_no_text_end_the_comparison(tmp_path: Path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    for name, order in (("student", characters), ("teacher", characters[::-1])):
        backend = Backend(models.BPE({c: number for number, c in enumerate(order)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        (tmp_path / name).mkdir()
        backend.save(str(tmp_path / name / "tokenizer.json"))
    tokenizers = SharedSpans(student=tmp_path / "student", teacher=tmp_path / "teacher")
    by_bytes = TokenBytes(Tokenizer.load(tmp_path / "student")).ids
    for text, compared in ((b"x\xc3\xa9y", 4), (b"x\xc3y", 1), (b"xy\xf0\x9f\x98", 2), (b"\xa9", 0)):
        _, ours, _ = aligned(tokenizers, *(by_bytes[bytes([byte])] for byte in text))
        assert sum(span >= 0 for span in ours) == compared, text


@given(data=st.data())
def test_spans_have_equal_bytes_and_are_as_short_as_possible(data: st.DataObject, folders: Folders):
    student, teacher = data.draw(st.permutations(["letters", "pairs", "also_turn", "all_pairs"]))[:2]
    reader, writer = (TokenBytes(Tokenizer.load(folders[name])) for name in (student, teacher))
    ordinary = [number for number, piece in enumerate(reader.of_id) if piece is not None]
    ids = data.draw(st.lists(st.sampled_from(ordinary), max_size=12))
    rows, metrics = retokenized(
        Batch.of(response_ids=[ids]), tokenizers=spans(folders, student, teacher)
    )
    their_ids, ours, theirs = (
        rows[c].to_pylist()[0] for c in ("teacher_response_ids", "student_spans", "teacher_spans")
    )
    compared = [number for number in ours if number >= 0]
    assert compared == sorted(compared) and ours[: len(compared)] == compared
    for span in {*compared}:
        left = [reader.of_id[i] or b"" for i, own in zip(ids, ours, strict=True) if own == span]
        right = [writer.of_id[i] or b"" for i, own in zip(their_ids, theirs, strict=True) if own == span]
        ends = [{*itertools.accumulate(map(len, each))} for each in (left, right)]
        assert b"".join(left) == b"".join(right)
        assert ends[0] & ends[1] == {max(ends[0])}
    if ids:
        assert metrics["compared_fraction"].value == len(compared) / len(ids)


def random_rows(
    folders: Folders, student: str, teacher: str, seed: int = 0
) -> tuple[Batch, SharedSpans]:
    """Return rows with random responses and log-probabilities of both models."""
    made, tokenizers = np.random.default_rng(seed), spans(folders, student, teacher)
    size = len(TokenBytes(Tokenizer.load(folders[student])).of_id)
    lengths = made.integers(0, 9, 60)
    responses = [made.integers(1, size, n).tolist() for n in lengths]
    logprobs = [(-2 * made.random(n)).astype(np.float32) for n in lengths]
    rows = Batch.of(response_ids=responses, response_logprobs=logprobs)
    rows, _ = retokenized(rows, tokenizers=tokenizers)
    theirs = [(-2 * made.random(n)).astype(np.float32) for n in rows.lengths("teacher_response_ids")]
    return rows.with_columns(teacher_response_logprobs=theirs), tokenizers


@pytest.mark.parametrize("single", [True, False])
def test_advantages_are_those_of_spans_in_float64(single: bool, folders: Folders):
    rows, _ = random_rows(folders, "letters", "pairs")
    found = span_advantages(rows, weight=0.7, single=single)["advantages"].to_pylist()
    longer = 0
    for row, advantages in zip(rows.record.to_pylist(), found, strict=True):
        expected = []
        for span in row["student_spans"]:
            left = [
                p
                for p, own in zip(row["response_logprobs"], row["student_spans"], strict=True)
                if own == span
            ]
            right = [
                q
                for q, own in zip(row["teacher_response_logprobs"], row["teacher_spans"], strict=True)
                if own == span
            ]
            counts = span >= 0 and (single or (len(left), len(right)) != (1, 1))
            longer += span >= 0 and len(left) > 1
            expected.append(0.7 * (math.fsum(right) - math.fsum(left)) if counts else 0.0)
        assert advantages == pytest.approx(expected, abs=1e-5)
    assert longer > 5


def test_advantages_by_hand(folders: Folders):
    ids = ids_of(folders["letters"], "a", "b", "c")  # ab | c
    rows, metrics = retokenized(
        Batch.of(response_ids=[ids]), tokenizers=spans(folders, "letters", "pairs")
    )
    columns = {"response_logprobs": [[-1.0, -0.5, -2.0]], "teacher_response_logprobs": [[-1.25, -1.0]]}
    rows = rows.with_columns(**columns, reward_advantages=[[0.5, 0.5, 0.5]])
    assert span_advantages(rows)["advantages"].to_pylist() == [[0.25, 0.25, 1.0]]
    both = span_advantages(rows, weight=2.0, base="reward_advantages", single=False)
    assert both["advantages"].to_pylist() == [[1.0, 1.0, 0.5]]
    assert metrics["compared_fraction"].value == 1
    assert metrics["one_to_one_fraction"].value == pytest.approx(1 / 3)


def test_equal_tokenizers_give_the_numbers_of_plain_distillation(folders: Folders):
    """The responses are as the tokenizer writes their text: others would have other tokens."""
    made, tokenizers = np.random.default_rng(1), spans(folders, "pairs", "pairs")
    backend = TokenBytes(Tokenizer.load(folders["pairs"]))
    texts = ["".join(made.choice(["a", "b", "c"], n)) for n in made.integers(0, 12, 20)]
    responses = [[*ids, 1] for ids in backend.encode(texts)]
    lengths, size = [len(ids) for ids in responses], len(backend.of_id)
    own, theirs = ([(-3 * made.random(n)).astype(np.float32) for n in lengths] for _ in range(2))
    rows = Batch.of(response_ids=responses, response_logprobs=own, reference_logprobs=theirs)
    rows, metrics = retokenized(rows, tokenizers=tokenizers)
    assert rows["teacher_response_ids"].to_pylist() == responses
    assert metrics["compared_fraction"].value == metrics["one_to_one_fraction"].value == 1
    rows = rows.with_columns(teacher_response_logprobs=theirs)
    plain, across = teacher_advantages(rows, weight=0.3), span_advantages(rows, weight=0.3)
    assert plain["advantages"].equals(across["advantages"])
    assert not any(itertools.chain(*span_advantages(rows, single=False)["advantages"].to_pylist()))
    logits = torch.from_numpy(made.normal(size=(sum(lengths), size)).astype(np.float32))
    logprobs, ids = logits.log_softmax(-1).topk(4)
    ends = np.cumsum([0, *lengths]) * 4
    of_teacher = {"ids": ids.int().numpy().ravel(), "logprobs": logprobs.numpy().ravel()}
    scored = rows.with_columns(**{f"unmapped_{c}": (value, ends) for c, value in of_teacher.items()})
    mapped = shared_candidates(scored, tokenizers=tokenizers, top=4)
    for name in of_teacher:
        assert mapped[f"teacher_{name}"].equals(scored[f"unmapped_{name}"])


def test_candidates_are_tokens_with_the_same_bytes(folders: Folders):
    student, teacher = folders["letters"], folders["pairs"]
    ids = ids_of(student, "a", "b", "c", "</s>")  # ab | c | end
    tokenizers = spans(folders, "letters", "pairs")
    rows, _ = retokenized(Batch.of(response_ids=[ids]), tokenizers=tokenizers)
    likely = [("ab", "a"), ("ca", "b"), ("<end>", "c")]
    rows = rows.with_columns(
        unmapped_ids=[[number for pair in likely for number in ids_of(teacher, *pair)]],
        unmapped_logprobs=[[-0.5, -1.0, -0.25, -2.0, -0.75, -1.5]],
    )
    mapped = shared_candidates(rows, tokenizers=tokenizers, top=3)
    b, c, end = ids_of(student, "b", "c", "</s>")
    none = -math.inf
    assert mapped["teacher_ids"].to_pylist() == [[0] * 6 + [0, b, 0] + [end, c, 0]]
    assert mapped["teacher_logprobs"].to_pylist() == [
        [none] * 6 + [none, -2.0, none] + [-0.75, -1.5, none]
    ]


@pytest.mark.parametrize("policy", [None, PolicyLoss()])
def test_absent_candidates_belong_to_the_tail(policy: PolicyLoss | None):
    """One position with a candidate of two, and one without any, whose divergence is 0."""
    none = -math.inf
    candidates = torch.tensor([[0.25, 0.5], [0.1, 0.2]], dtype=torch.float64).log().requires_grad_()
    more = {"advantages": [0.0, 0.0], "response_logprobs": [-1.0, -1.0]} if policy else {}
    rows = PackedRows.of(
        [2],
        teacher_ids=[[3, 0], [0, 0]],
        teacher_logprobs=torch.tensor([[math.log(0.5), none], [none, none]], dtype=torch.float64),
        candidate_logprobs=candidates,
        **more,
    )
    loss = Distillation(divergence=ForwardKl(), policy=policy)
    loss_sum, metrics = loss(torch.tensor([-1.0, -1.0]), rows)
    loss_sum.backward()
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert loss_sum.item() == pytest.approx(expected)
    assert metrics["divergence"].value == pytest.approx(expected)
    assert metrics["teacher_tail"].value == pytest.approx(0.5)
    # d/dx of -0.5 x - 0.5 log(1 - e^x) at x = log 0.25
    assert candidates.grad is not None
    torch.testing.assert_close(
        candidates.grad, torch.tensor([[-0.5 + 0.5 / 3, 0.0], [0.0, 0.0]], dtype=torch.float64)
    )


TWO_LETTERS = [(0, 0), (0, 1), (1, 0), (1, 1)]


def of_two_letters(logits: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of both tokens of each response [4, 2] for logits [3, 2]: of the
    first letter, and of the second after either first."""
    table = logits.log_softmax(-1)
    pairs = [torch.stack([table[0, first], table[1 + first, second]]) for first, second in TWO_LETTERS]
    return torch.stack(pairs)


def test_spans_of_one_teacher_token_reach_the_closed_form(folders: Folders):
    """The student writes two letters, which are one token of the teacher, with probability q. The
    expected gradient of the advantages equals the exact KL's, and its optimum is p = q."""
    tokenizers, q = spans(folders, "pairs", "all_pairs"), torch.tensor([0.1, 0.4, 0.3, 0.2]).double()
    letters = ids_of(folders["pairs"], "a", "b")
    responses = [[letters[a], letters[b]] for a, b in TWO_LETTERS]
    start, _ = retokenized(Batch.of(response_ids=responses), tokenizers=tokenizers)
    assert start.lengths("teacher_response_ids").tolist() == [1] * 4
    logits = torch.tensor([[0.3, -0.2], [0.1, 0.4], [-0.5, 0.2]], dtype=torch.float64)
    divergence = torch.tensor(math.inf)
    for _ in range(150):
        logits = logits.detach().requires_grad_()
        logprobs = of_two_letters(logits)
        rows = start.with_columns(
            response_logprobs=logprobs.detach().float().tolist(),
            teacher_response_logprobs=q.log().float()[:, None].tolist(),
        )
        advantages = response_rows(span_advantages(rows), "response_ids", "advantages")["advantages"]
        p = logprobs.sum(1).exp()
        surrogate = -(p.detach() * (advantages.view(4, 2).double() * logprobs).sum(1)).sum()
        [slope] = torch.autograd.grad(surrogate, logits, retain_graph=True)
        divergence = (p * (p.log() - q.log())).sum()
        [exact] = torch.autograd.grad(divergence, logits)
        torch.testing.assert_close(slope, exact, atol=1e-6, rtol=1e-5)
        logits = logits - 2 * slope
    assert divergence.item() < 1e-6


def test_tokenizers_that_do_not_exist_are_named(folders: Folders, tmp_path: Path):
    with pytest.raises(UserError, match="nowhere"):
        SharedSpans(student=tmp_path / "nowhere", teacher=folders["pairs"]).check()


def test_no_rows_are_fine(folders: Folders):
    rows = Batch.of(response_ids=[[1]], response_logprobs=[[-1.0]], teacher_response_logprobs=[[-1.0]])
    tokenizers = spans(folders, "letters", "pairs")
    rows, metrics = retokenized(rows.slice(0, 0), tokenizers=tokenizers)
    assert len(span_advantages(rows)) == 0 and metrics["compared_fraction"].weight == 0  # pyright: ignore[reportAttributeAccessIssue]
    empty = rows.with_columns(
        unmapped_ids=rows["teacher_spans"], unmapped_logprobs=rows["response_logprobs"]
    )
    assert len(shared_candidates(empty, tokenizers=tokenizers, top=3)) == 0
