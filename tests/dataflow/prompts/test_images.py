"""Images in prompts: their columns, their places in messages, and refused input."""

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from weft.dataflow.errors import UserError
from weft.dataflow.prompts.conversations import with_places
from weft.dataflow.prompts.prompts import Prompts
from weft.dataflow.prompts.tokenizer import Tokenizer

TEMPLATE = """\
{%- for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}{% for block in m.content %}
{%- if block.type == 'image' %}[img] {% else %}{{ block.text }}{% endif %}{% endfor %}{% endif %} {% endfor %}
{%- if add_generation_prompt %}assistant{% endif %}"""
ASKED = [{"role": "user", "content": "what is it"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    words = ["?", "user", "assistant", "system", "what", "is", "it", "blue", "and"]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken("[img]", special=True)])
    return Tokenizer(backend, chat_template=TEMPLATE)


def picture(color: str = "blue", form: str = "PNG", size: tuple[int, int] = (4, 3)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, form)
    return file.getvalue()


BLUE, RED = picture("blue"), picture("red", "JPEG")


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("images", pa.array([[BLUE, RED], [], [RED]], pa.list_(pa.binary()))),
        (
            "images",
            pa.array([[{"bytes": BLUE, "path": "b.png"}, {"bytes": RED}], None, [{"bytes": RED}]]),
        ),
    ],
)
def test_a_column_of_lists_is_taken_as_datasets_writes_it(
    column: str, values: pa.Array, tokenizer: Tokenizer, tmp_path: Path
):
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": [ASKED] * 3, column: values, "level": [1, 2, 3]}), file)
    prompts = Prompts.read(file, tokenizer)
    assert prompts.columns == ("prompt_ids", "prompt", "images", "level", "prompt_messages")
    assert prompts.table["images"].to_pylist() == [[BLUE, RED], [], [RED]]
    assert prompts.table["prompt"].to_pylist() == [
        "user [img] [img] what is it assistant",
        "user what is it assistant",
        "user [img] what is it assistant",
    ]
    assert [row.count(9) for row in prompts.table["prompt_ids"].to_pylist()] == [2, 0, 1]
    assert f"images    3 in 2 of 3 rows, up to 2 in one, from {column!r}" in str(prompts.understood)


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.struct({"bytes": pa.binary(), "path": pa.string()})]
)
def test_a_column_of_one_image_a_row_is_taken(kind: pa.DataType, tokenizer: Tokenizer):
    values = [BLUE, None] if not pa.types.is_struct(kind) else [{"bytes": BLUE, "path": None}, None]

    class Rows:
        def with_format(self, type: str) -> pa.Table:
            return pa.table({"prompt": ["what is it"] * 2, "image": pa.array(values, kind)})

    prompts = Prompts.from_rows(Rows(), tokenizer)
    assert prompts.columns == ("prompt_ids", "prompt", "images")
    assert prompts.table["images"].to_pylist() == [[BLUE], []]
    assert prompts.table["prompt"].to_pylist() == [
        "user [img] what is it assistant",
        "user what is it assistant",
    ]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            [{"type": "text", "text": "what is"}, {"type": "image"}, {"type": "text", "text": "it"}],
            "user what is[img] it",
        ),
        ("what <image>is it", "user what [img] is it"),
        ("what is it", "user [img] what is it"),
        (
            [{"type": "text", "text": "what is "}, {"type": "text", "text": "<image>it"}],
            "user what is [img] it",
        ),
    ],
)
def test_an_image_is_placed_at_its_block_or_mark_or_at_the_beginning(
    content: Any, text: str, tokenizer: Tokenizer
):
    answer = "blue" if isinstance(content, str) else [{"type": "text", "text": "blue"}]
    asked = {"role": "user", "content": content}
    for row in (
        {"prompt": [asked], "images": [BLUE]},
        {"messages": [asked, {"role": "assistant", "content": answer}], "images": [BLUE]},
    ):
        prompts = Prompts.from_rows([row], tokenizer)
        assert prompts.table["prompt"][0].as_py().startswith(text)
        assert prompts.table["prompt_ids"][0].as_py().count(9) == 1


def test_blocks_of_other_kinds_stay_next_to_marks():
    content = [{"type": "video", "text": None}, {"type": "text", "text": "what <image>"}]
    parted = [content[0], {"type": "text", "text": "what "}, {"type": "image"}]
    assert with_places([{"role": "user", "content": content}], 1) == [
        {"role": "user", "content": parted}
    ]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"images": [b"GIF89"]}, "column 'images', image 1: it is not an image that Pillow can read"),
        ({"images": [BLUE, b""]}, "column 'images', image 2: it is not an image that Pillow can read"),
        (
            {"images": [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n"]},
            "image 1: it is PostScript, which is a",
        ),
        (
            {"images": [BLUE[:40]]},
            "image 1: it is not an image that Pillow can read (its header is cut off)",
        ),
        (
            {"images": [BLUE, None]},
            "column 'images', image 2: the column is list of binary without the bytes",
        ),
        ({"images": [BLUE], "image": BLUE}, "columns 'images' and 'image' both hold images"),
        (
            {"prompt": "what <image> is <image>", "images": [BLUE]},
            "row 1: the row has 1 image, and its messages have places for 2",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "images": [BLUE, RED]},
            "row 1: the row has 2 images, and its messages have places for 1 (a content block of type 'image' each)",
        ),
        (
            {"prompt": [{"role": "system", "content": "a"}], "images": [BLUE]},
            "no message of the user to put them into",
        ),
        (
            {"completion": [{"role": "assistant", "content": [{"type": "image"}]}], "images": [BLUE]},
            "a message of role 'assistant' has a content block of type 'image', but no image belongs to it",
        ),
    ],
)
def test_a_mismatch_is_named(row: dict[str, Any], said: str, tokenizer: Tokenizer):
    with pytest.raises(UserError) as caught:
        Prompts.from_rows([{"prompt": ASKED, **row}], tokenizer)
    assert said in str(caught.value)


def test_an_image_of_too_many_pixels_is_refused_by_its_header(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 11)
    with pytest.raises(UserError, match="image 1: it has more than the 11 pixels"):
        Prompts.from_rows([{"prompt": ASKED, "images": [BLUE]}], tokenizer)


def test_a_row_without_images_among_others_may_not_have_a_mark(tokenizer: Tokenizer):
    rows = [
        {"prompt": ASKED, "images": [BLUE]},
        {"prompt": [{"role": "user", "content": "<image>"}], "images": []},
    ]
    with pytest.raises(
        UserError, match="row 2: the row has 0 images, and its messages have places for 1"
    ):
        Prompts.from_rows(rows, tokenizer)
    assert Prompts.from_rows(rows[1:], tokenizer).table["prompt"][0].as_py() == "user <image> assistant"


def test_rows_that_differ_in_their_images_alone_are_different_prompts(tokenizer: Tokenizer):
    rows = [{"prompt": ASKED, "images": [picture(size=(4, 3 + i // 2))]} for i in range(8)]
    train, held_out = Prompts.from_rows(rows, tokenizer).hold_out(1)
    assert (len(train), len(held_out)) == (6, 1)
