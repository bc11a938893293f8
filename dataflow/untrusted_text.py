"""Print untrusted text safely: hide secrets, and escape control characters and characters that the
output stream cannot encode."""

from __future__ import annotations

import json
import os
import re
import sys
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TextIO
from urllib.parse import quote

# Redaction: hide secrets in all messages and files of a run. Secrets are:
# - values of environment variables and settings with the name of a secret
# - text that looks like a secret: passwords in URLs, bearer tokens, `password=...`, and keys of
#   known services


_SECRET_WORD = re.compile("token|secrets?|passwords?|passwd|passphrase|credentials?")
"""Words in the name of a secret. `key` and `auth` count too, as the last word."""
_PLACES = {"path", "file", "dir", "id", "ids", "env", "variable", "name", "url"}
"""Last words of names that say where a secret is, such as `token_path`."""
_SHORTEST = 8
"""Minimum number of characters of a secret. Shorter values occur in ordinary text."""
_HIDDEN = "[hidden]"
_LONGEST = 1000
"""Maximum number of characters of a secret that stays hidden where a text is cut."""


@lru_cache(4096)
def is_secret_name(name: str) -> bool:
    """Whether a variable or setting with this name holds a secret.

    >>> all(map(is_secret_name, ("HF_TOKEN", "WANDB_API_KEY", "dbPassword", "AWS_SECRET_ACCESS_KEY", "api_keys", "PROXY_AUTH")))
    True
    >>> any(map(is_secret_name, ("max_tokens", "TOKENIZERS_PARALLELISM", "tokenizer", "eos_token_id", "key_variable")))
    False
    """
    words = re.findall(r"[a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower())
    if not words or words[-1] in _PLACES:
        return False
    is_key = words[-1] in ("key", "auth", "apikey") or words[-2:] == ["api", "keys"]
    return is_key or any(map(_SECRET_WORD.fullmatch, words))


_KEY_FORMATS = (
    r"sk-(?=[\w-]*\d)[\w-]{10,}|hf_(?=[A-Za-z0-9]*\d)[A-Za-z0-9]{10,}|gh[pousr]_[A-Za-z0-9]{10,}|github_pat_\w{10,}|glpat-[\w-]{10,}"
    r"|xox[abeprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{20,}|ya29\.[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]+)?"
    r"|[rs]k_(?:live|test)_\w{10,}|(?:r8|npm|gsk|nvapi|tgp|lsv2)[_-](?=[\w-]*\d)[\w-]{16,}|pypi-[\w-]{20,}|SG\.[\w-]{10,}\.[\w-]{10,}|dapi[0-9a-f]{20,}"
)
# Hidden values do not match, so a second pass changes nothing.
_ASSIGNED = (
    r"(?P<name>[\w-]*(?:passwords?|passwd|pwd|passphrase|secrets?|secret[_-]?key|api[_-]?keys?|access[_-]?key(?:[_-]id)?|private[_-]?key"
    r"|account[_-]?key|signature|credentials?|(?:access|auth|api|refresh|bearer|hf|hub|github|gitlab|wandb|session|security|id)[_-]?tokens?))"
    r"(?P<sign>[\"']?\s*(?:=(?!=)\s*[\"']?|:\s*(?=[\"']|[^\s\"',]*\d)[\"']?))(?!\[hidden|\[value of )(?P<value>[^\s\"'&,;<>)}\]]{3,})"
)
VIEW = "weft-view-"
"""Prefix of a dashboard's access token, which stays visible as part of the address."""
_PATTERNS = tuple(
    (re.compile(pattern), shown)
    for pattern, shown in (
        (
            r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
            "[hidden]",
        ),
        (  # a password in a URL, but not a port
            r"(?i)(?P<scheme>\b[a-z][a-z0-9+.-]*://[^\s/:@\"'<>]*:)(?!\d{1,5}(?:[/?#,]|\s|$))(?!\[hidden\]@|\[value of )"
            r"(?:(?!://)[^\s\"'<>])+@(?=[\w\[%])",
            r"\g<scheme>[hidden]@",
        ),
        (rf"(?<![A-Za-z0-9])(?:{_KEY_FORMATS})", "[hidden]"),
        (r"(?i)(?P<kind>\bbearer[ :=]+)(?=\S*\d|\S{20,})[\w.~+/=-]{6,}", r"\g<kind>[hidden]"),
        (
            r"(?i)(?P<kind>\b(?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?)(?!(?:\w+\s+)?\[(?:hidden|value of))"
            r"(?:(?:basic|token|digest|bearer)\s+)?[^\s\"',}]{6,}",
            r"\g<kind>[hidden]",
        ),
        (
            r"(?i)(?P<kind>[?&](?:token|sig|signature|key|auth|code|x-amz-[a-z-]+)=)(?!\[hidden|\[value of )[^\s\"'&#<>]{4,}",
            r"\g<kind>[hidden]",
        ),
        (rf"(?i)(?<![\w-]){_ASSIGNED}", r"\g<name>\g<sign>[hidden]"),
    )
)
"""Patterns of secrets, each with its replacement."""
_SUSPICIOUS = (
    *("@", "?", "&", "begin", "bearer", "authorization", "pass", "pwd", "secret", "key"),
    *("signature", "credential", "token", "sk-", "hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
    *("github_pat_", "glpat-", "xox", "akia", "asia", "aiza", "ya29.", "eyj", "k_live_", "k_test_"),
    *("r8_", "r8-", "npm_", "npm-", "gsk_", "gsk-", "nvapi", "tgp_", "tgp-", "lsv2", "pypi-"),
    *("sg.", "dapi"),
)
"""Each match of `_PATTERNS` contains one of these, in lower case. Checked first, for speed."""


def redacted(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Hide the secrets in a text. `[value of NAME]` replaces the value of a secret variable of
    `environment` (default: this process's), and `[hidden]` other secrets.

    >>> redacted("401 for hf_0123456789", {"HF_TOKEN": "hf_0123456789"})
    '401 for [value of HF_TOKEN]'
    >>> redacted("postgres://ann:s3cret@db:5432/runs refused sk-proj-0123456789; Authorization: Bearer abc123def", {})
    'postgres://ann:[hidden]@db:5432/runs refused [hidden]; Authorization: Bearer [hidden]'
    """
    return _redacted(text, _secret_values(os.environ if environment is None else environment))


def _secret_values(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the values of secret variables as they may occur in texts, and what to show instead."""
    values = {
        value: name
        for name, value in environment.items()
        if len(value) >= _SHORTEST and is_secret_name(name)
    }
    # Longest first: one value may contain another. URLs have the percent-encoded form.
    return [
        (written, f"[value of {values[value]}]")
        for value in sorted(values, key=len, reverse=True)
        for written in (value, quote(value, safe=""))
    ]


def _redacted(text: str, values: list[tuple[str, str]]) -> str:
    for written, shown in values:
        text = text.replace(written, shown)
    # Most texts contain nothing suspicious, so skip the slow patterns.
    folded = text.casefold()  # the patterns ignore case as well
    if any(sign in folded for sign in _SUSPICIOUS):
        for pattern, shown in _PATTERNS:
            text = pattern.sub(
                lambda found, shown=shown: found[0] if VIEW in found[0] else found.expand(shown), text
            )
    return text


def beginning(text: str, most: int) -> str:
    """Return at most `most` characters from the beginning of a text, without any part of a secret.

    >>> beginning("postgres://ann:s3cret@db:5432/runs is gone", 24)
    'postgres://ann:[hidde...'
    """
    text = redacted(text[: most + _LONGEST])
    return text if len(text) <= most else f"{text[: most - 3]}..."


def both_ends(text: str, most: int) -> str:
    """Return the beginning and end of a text, together at most `most` characters, without secrets.

    >>> both_ends("a" * 20 + "b" * 20, 20)
    'aaaaaaaa ... bbbbbbbb'
    """
    kept = most + _LONGEST
    # For speed, redact only the text that may be shown, and the rest of a secret at the cut.
    text = redacted(text if len(text) <= 2 * kept else text[:kept] + text[-kept:])
    half = (most - 5) // 2
    return text if len(text) <= most else f"{text[: half + 1]} ... {text[-half - 1 :]}"


def without_secrets(settings: Any, *, by_name: bool = True) -> Any:
    """Hide the secrets in settings (JSON values): fields with a secret's name, and parts of texts.

    `by_name=False` ignores field names, for data with fixed names such as a sample's `token`.

    >>> without_secrets({"judge": {"api_key": "sk-1"}, "max_tokens": 8, "token": None, "passwords": ["a"], "password": ["a"]})
    {'judge': {'api_key': '[hidden]'}, 'max_tokens': 8, 'token': None, 'passwords': ['[hidden]'], 'password': ['[hidden]']}
    >>> without_secrets({"base_url": "http://ann:pw@host/v1"})
    {'base_url': 'http://ann:[hidden]@host/v1'}
    """
    values = _secret_values(os.environ)

    def hidden(part: Any, name: str) -> Any:
        if isinstance(part, dict):
            return {_redacted(str(key), values): hidden(each, str(key)) for key, each in part.items()}
        if isinstance(part, list | tuple):
            return [hidden(each, name) for each in part]
        if not isinstance(part, str):
            return part
        return _HIDDEN if by_name and part and is_secret_name(name) else _redacted(part, values)

    return hidden(settings, "")


# Untrusted text

_JOINERS = "\u200c\u200d"
"""Harmless zero-width characters, which are part of words and emoji."""
_STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories to escape: control characters, format characters (which reverse or hide text),
surrogates, and line and paragraph separators."""


def readable(text: str) -> str:
    r"""Escape characters that affect terminals. Newlines stay, and tabs become spaces.

    >>> print(readable("\x1b[31mred\r\u202etxt.exe"))
    \x1b[31mred\r\u202etxt.exe
    >>> readable("one\n\ttwo")
    'one\n    two'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c
        if c == "\n" or c in _JOINERS or unicodedata.category(c) not in _STEERING
        else "    "
        if c == "\t"
        else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def show(text: str, stream: TextIO | None = None, *, end: str = "\n") -> None:
    """Print untrusted text (prompts, paths, errors) safely, by default to standard error."""
    stream = sys.stderr if stream is None else stream
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(encodable(readable(redacted(text)), encoding), file=stream, end=end, flush=True)


def show_json(value: Any, stream: TextIO | None = None) -> None:
    """Print a value as one line of ASCII JSON, by default to standard output."""
    # `json.dumps` does not escape DEL.
    line = json.dumps(value, default=str).replace("\x7f", "\\u007f")
    print(line, file=sys.stdout if stream is None else stream, flush=True)


def one_line(text: str) -> str:
    r"""Return a text as one line, with newlines and control characters escaped.

    >>> print(one_line("\x1b[2Jtwo\nlines"))
    \x1b[2Jtwo\nlines
    """
    return readable(text).replace("\n", "\\n")


def encodable(text: str, encoding: str) -> str:
    """Escape the characters of a text that an encoding lacks.

    >>> print(encodable("0.5 ±0.1 \u732b", "ascii"))
    0.5 +/-0.1 \u732b
    """
    try:
        text.encode(encoding)
        return text
    except (UnicodeEncodeError, LookupError):
        known = "ascii" if encoding.lower() in ("ascii", "us-ascii", "ansi_x3.4-1968") else encoding
        try:
            "±".encode(known)
        except (UnicodeEncodeError, LookupError):
            text = text.replace("±", "+/-")
        try:
            return text.encode(known, "backslashreplace").decode(known)
        except LookupError:
            return text.encode("ascii", "backslashreplace").decode("ascii")


def cut(text: str, characters: int) -> str:
    """Shorten a text to about this many characters from its beginning and end.

    >>> cut("0123456789", 4)
    '01 ... (6 characters) ... 89'
    """
    if len(text) <= characters:
        return text
    half = characters // 2
    return f"{text[:half]} ... ({len(text) - 2 * half:,} characters) ... {text[-half:]}"


def cut_lines(text: str, lines: int) -> str:
    r"""Shorten a text to about this many of its first and last lines.

    >>> cut_lines("1\n2\n3\n4\n5\n6", 4)
    '1\n2\n... (2 lines) ...\n5\n6'
    """
    every = text.split("\n")
    if len(every) <= lines:
        return text
    half = lines // 2
    return "\n".join([*every[:half], f"... ({len(every) - 2 * half:,} lines) ...", *every[-half:]])
