"""Redaction hides everything that looks like a secret, and nothing else."""

import json

import pyarrow as pa
import pytest

from weft.dataflow.prompts.files import short, start_of
from weft.dataflow.prompts.prompts import _shown  # pyright: ignore[reportPrivateUsage]
from weft.dataflow.runs.tables import render_table
from weft.dataflow.untrusted_text import redacted, without_secrets

KEYS = (
    *(
        "sk-proj-0123456789",
        "hf_0123456789ab",
        "ghp_0123456789ab",
        "github_pat_0123456789",
        "glpat-0123456789",
    ),
    *(
        "xoxb-0123456789",
        "AKIA0123456789AB",
        "ASIA0123456789AB",
        "AIza01234567890123456789",
        "ya29.0123456789",
    ),
    *("sk_live_0123456789", "rk_test_0123456789", "r8_0123456789012345", "npm_0123456789012345"),
    *("gsk_0123456789012345", "nvapi-0123456789012345", "tgp_0123456789012345", "lsv2_0123456789012345"),
    *("pypi-01234567890123456789", "SG.0123456789.0123456789", "dapi0123456789abcdef0123"),
)


@pytest.mark.parametrize("key", KEYS)
def test_keys_of_known_services_are_hidden(key: str):
    assert redacted(f"401 for {key} now", {}) == "401 for [hidden] now"


def test_letters_that_fold_to_those_of_a_secret_name_hide_nothing_less():
    assert "hunter2!" not in redacted("pa\u017f\u017fword=hunter2!", {})


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("postgres://ann:s3cret@db:5432/runs", "s3cret"),
        ("redis://:s3cret@cache", "s3cret"),
        ("https://ann:p@ss:w0rd@host/path", "w0rd"),
        ("DATABASE_URL=mysql+pymysql://root:hunter2@10.0.0.1/x is down", "hunter2"),
        ("clone https://ghp_0123456789abcdefghij@github.com/a/b failed", "ghp_0123456789abcdefghij"),
        ("headers: {'Authorization': 'Bearer abc.def-123456'}", "abc.def-123456"),
        ("authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
        ("OpenAI key sk-proj-0123456789abcdef", "sk-proj-0123456789abcdef"),
        ("hf_AbCdEfGh12345678 was refused", "hf_AbCdEfGh12345678"),
        ("AWS AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
        ("wandb_api_key=0123456789abcdef", "0123456789abcdef"),
        ("{'password': 'hunter2!'}", "hunter2!"),
        ('{"client_secret": "abc-xyz"}', "abc-xyz"),
        ("https://host/v1?access_token=abcdef&x=1", "abcdef"),
        ("https://host/v1?sig=abcdef", "abcdef"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----", "MIIEow"),
        ("jwt eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.sflKxwRJ", "eyJzdWIiOiIxMjM0"),
    ],
)
def test_text_that_looks_like_a_secret_is_hidden(text: str, secret: str):
    assert secret not in redacted(text, {}) and "[hidden]" in redacted(text, {})


@pytest.mark.parametrize(
    "text",
    [
        "http://localhost:8000/v1 answered",
        "http://127.0.0.1:8265, then user@host",
        "ann@example.org wrote to git@github.com:a/b.git",
        "max_tokens=8, eos_token_id=2, eos_token='<|im_end|>', num_tokens: 12",
        "password authentication failed; the bearer of this token is unknown",
        "missing password: give one",
        "sort key=reward; column hf_transformers; scikit sk-learn",
        "the answer is token: 5",
    ],
)
def test_text_that_is_not_secret_stays(text: str):
    assert redacted(text, {}) == text


def test_settings_keep_their_form_and_lose_their_secrets():
    settings = {
        "url": "http://ann:pw123@host:80/v1",
        "n": 3,
        "list": ["Bearer abcdef123456"],
        "token": "x",
        'q"': None,
    }
    hidden = without_secrets(settings)
    assert json.loads(json.dumps(hidden)) == {
        "url": "http://ann:[hidden]@host:80/v1",
        "n": 3,
        "list": ["Bearer [hidden]"],
        "token": "[hidden]",
        'q"': None,
    }
    assert without_secrets({"token": "the"}, by_name=False) == {"token": "the"}


def test_a_text_that_was_redacted_stays_as_it_is():
    environment = {"HF_TOKEN": "hf_of_nobody_0123456789"}
    for text in (
        "https://judge.example/?key=hf_of_nobody_0123456789",
        "api_key=hf_of_nobody_0123456789",
        "Authorization: Bearer hf_of_nobody_0123456789",
        "http://ann:hf_of_nobody_0123456789@host",
    ):
        once = redacted(text, environment)
        assert once == redacted(once, environment) and "[value of HF_TOKEN]" in once


@pytest.mark.parametrize("before", range(0, 80, 5))
def test_a_cut_does_not_leave_the_beginning_of_a_secret(before: int):
    text = "x" * before + " postgres://ann:s3cretOfTheDatabase@db:5432/runs " + "y" * 300
    table = pa.table({"prompt": [text], "of each": [[text]]})
    for shown in (
        render_table(table),
        short(text),
        start_of(text),
        _shown(text, 100),
        _shown(text[::-1], 100),
    ):
        assert "s3cret" not in shown
    assert _shown("a" * 5000 + text + "b" * 5000, 100).startswith("'aaa"), (
        "the middle of a long text is not looked at"
    )
