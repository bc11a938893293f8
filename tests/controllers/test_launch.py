"""How a command ends: with a message and what to do about it, and never with a traceback of an exception of ours."""

import pytest

from weft.controllers.launch import launch
from weft.dataflow.config import Config
from weft.dataflow.errors import LeaseError, StalledError, UserError, WeftError


class Settings(Config):
    pass


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("steps=0: at least 1"), 2, ["error: steps=0: at least 1"]),
        (StalledError("rows are in flight"), 1, ["StalledError: rows are in flight", StalledError.advice]),
        (LeaseError("lease 2 was released"), 1, ["LeaseError: lease 2 was released", LeaseError.advice]),
    ],
)
def test_an_exception_of_ours_ends_a_script_with_its_message_and_advice(
    error: WeftError, code: int, said: list[str], capsys: pytest.CaptureFixture[str]
):
    def main(settings: Settings) -> None:
        raise error

    assert launch(main, []) == code
    assert capsys.readouterr().err.splitlines() == said
