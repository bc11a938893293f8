import pickle
import re
import traceback

import pytest

from weft.dataflow import errors
from weft.dataflow.buffer.segments import Segment
from weft.dataflow.errors import DamagedSegment, DeadlineError, SampleError, StalledError, WeftError


def tree(root: type[WeftError] = WeftError) -> dict[str, str]:
    """Return exception -> base class, for the whole tree."""
    below = {one.__name__: root.__name__ for one in root.__subclasses__()}
    return below | {name: base for one in root.__subclasses__() for name, base in tree(one).items()}


def test_the_drawing_is_the_tree():
    drawn: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"(    [ │├└─]*)(\w+)", line):
            depth, name = len(match[1]), match[2]
            above = [(d, n) for d, n in above if d < depth]
            if above:
                drawn[name] = above[-1][1]
            above.append((depth, name))
    apart = {"SystemExit": "BaseException", "Ended": "SystemExit"}
    apart |= dict.fromkeys(("Cancelled", "NeedsMainThread", "Planned", "Silent"), "BaseException")
    assert drawn == {**tree(), **apart}, (
        "what ends a call or a process is no error of Weft's, and is drawn apart"
    )


SPECIAL = {
    "DamagedSegment": (Segment("n0", "f", 0, 8, 1), "f", "the file is missing"),
    "SampleError": ("bad", (1, 2)),
    "RequestError": (400, "invalid_request_error", "n: 0 is below 1"),
}


@pytest.mark.parametrize("name", ["WeftError", *tree()])
def test_an_exception_crosses_processes_as_it_is(name: str):
    error = getattr(errors, name)(*SPECIAL.get(name, ("what happened",)))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and copy.text == error.text and vars(copy) == vars(error)


def test_the_advice_is_below_the_message_also_in_a_traceback():
    error = StalledError("nothing can move")
    advice = "`weft buffer why RUN GROUP` shows what a group waits for, or how it ended."
    assert str(error) == "nothing can move"
    assert error.text == f"nothing can move\n{advice}"
    assert "".join(traceback.format_exception(error)).splitlines()[-1] == advice


def test_exceptions_subclass_the_matching_python_ones():
    assert issubclass(DeadlineError, TimeoutError) and issubclass(SampleError, ValueError)
    assert issubclass(DamagedSegment, RuntimeError)
