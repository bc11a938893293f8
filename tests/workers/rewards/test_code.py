"""The code reward: layouts of tests, scores, and failures that are not scored."""

import json
from pathlib import Path
from typing import Any

import pytest

from weft.dataflow.batch import Batch
from weft.dataflow.errors import NoSandboxError, SampleError, SandboxError
from weft.workers import sandbox
from weft.workers.reward import RewardConfig, RewardWorker
from weft.workers.rewards import code as module
from weft.workers.rewards.code import Code, last_code
from weft.workers.sandbox import Limits, working_engine

PATIENT = Limits(wall_s=300.0)
CODE, SHARE = Code(limits=PATIENT), Code(limits=PATIENT, share=True)

HUMANEVAL: dict[str, Any] = {
    "prompt": 'from typing import List\n\n\ndef total(numbers: List[int]) -> int:\n    """Return the sum."""\n',
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
    "entry_point": "total",
}
MBPP: dict[str, Any] = {
    "test_list": ["assert double(1) == 2", "assert double(2) == 4", "assert double('a') == 'aa'"],
    "test_setup_code": "",
}
ADD = "a, b = map(int, input().split())\nprint(a + b)"
PYTEST = """
import pytest
from solution import double

@pytest.mark.parametrize("n", [1, 2])
def test_numbers(n):
    assert double(n) == 2 * n

def test_text():
    assert double("a") == "aa"
"""


@pytest.fixture(scope="session")
def needs_sandbox() -> None:
    try:
        working_engine()
    except NoSandboxError as error:
        pytest.skip(str(error))


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nIt works."


# Which code


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("```python\nx = 1\n```\nBetter:\n```\nx = 2\n```", "x = 2"),
        ("```python\nx = 1\n```\nRun it:\n```bash\npython x.py\n```", "x = 1"),
        ("````md\n```python\nx = 1\n```\n````\n```py\nx = 2\n```", "x = 2"),
        ("~~~python\nx = '''\n```\n'''\n~~~", "x = '''\n```\n'''"),
        ("  ```Python\n  x = 1\n  ```", "  x = 1"),
        ("```python\nx = 1", "x = 1"),
        ("```python\nx = 1\n```\n```python\nx = 2", "x = 1"),
        ("```c\nint x;\n```", "int x;"),
        ("x = 1\n", "x = 1\n"),
        ("<think>```python\nx = 1\n```</think>\n```python\nx = 2\n```", "x = 2"),
        ("<think>```python\nx = 1\n```", ""),
        ("```python\n```", ""),
    ],
)
def test_the_last_block_of_python_counts(response: str, code: str):
    assert last_code(response) == code


# Layouts


@pytest.mark.usefixtures("needs_sandbox")
@pytest.mark.parametrize(
    "tests",
    [
        [{"input": "1 2", "output": "3"}, {"input": "5 5\n", "output": "10\n"}],
        {"inputs": ["1 2", "5 5"], "outputs": ["3", "10"]},
        {"input": "1 2", "output": "3"},
        {"inputs": [["1 2"], ["5 5"]], "outputs": [["3"], ["10 "]]},
        json.dumps([{"input": "1 2", "output": "3"}]),
    ],
)
def test_programs_read_standard_input(tests: object):
    assert CODE(fenced(ADD), tests=tests) == 1
    assert CODE(fenced(ADD.replace("+", "-")), tests=tests) == 0


@pytest.mark.usefixtures("needs_sandbox")
def test_a_program_must_print_exactly_the_output_and_exit_with_0():
    tests = [{"input": "", "output": "1\n2\n"}]
    assert CODE(fenced("print('1  \\n2\\n\\n')"), tests=tests) == 1
    for wrong in ("print('1 2')", "print('1\\n2\\n3')", "print('1\\n2'); exit(1)", "", "not python("):
        assert CODE(fenced(wrong), tests=tests) == 0, wrong


@pytest.mark.thorough
@pytest.mark.usefixtures("needs_sandbox")
def test_pytest_files_import_the_solution():
    right, wrong = "def double(x):\n    return x + x", "def double(x):\n    return 2 * abs(x)"
    assert CODE(fenced(right), tests=PYTEST) == 1
    assert CODE(fenced(right), answer=PYTEST) == 1
    assert SHARE(fenced(wrong), tests={"test_double.py": PYTEST}) == pytest.approx(2 / 3)
    assert SHARE(fenced("no python"), tests=PYTEST) == 0


@pytest.mark.usefixtures("needs_sandbox")
@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (fenced("def total(numbers: List[int]) -> int:\n    return sum(numbers)"), 1),
        ("    return sum(numbers)\n", 1),
        (fenced("    return sum(numbers)"), 1),
        (fenced("def total(numbers):\n    return 3"), 0),
        (fenced("def other(numbers):\n    return sum(numbers)"), 0),
    ],
)
def test_humaneval_responses_are_functions_or_continuations(response: str, reward: float):
    chat = f"<|im_start|>user\nComplete:\n{HUMANEVAL['prompt']}<|im_end|>\n<|im_start|>assistant\n"
    assert CODE(response, **HUMANEVAL) == reward
    assert CODE(response, **HUMANEVAL | {"prompt": chat}) == reward


@pytest.mark.usefixtures("needs_sandbox")
def test_mbpp_asserts_count_one_by_one():
    wrong = fenced("def double(x):\n    return 2 * abs(x)")
    assert CODE(fenced("def double(x):\n    return x + x"), **MBPP) == 1
    assert (CODE(wrong, **MBPP), SHARE(wrong, **MBPP)) == (0, pytest.approx(2 / 3))
    setup: dict[str, Any] = {
        "test_list": ["assert double(math.pi) > 6"],
        "test_imports": ["import math"],
    }
    assert CODE(fenced("def double(x):\n    return x + x"), **setup) == 1
    setup["test_imports"] = "import math"
    assert CODE(fenced("def double(x):\n    return x + x"), **setup) == 1


@pytest.mark.usefixtures("needs_sandbox")
def test_an_answer_holds_any_layout_as_json():
    double = fenced("def double(x):\n    return x + x")
    assert CODE(double, answer=json.dumps(MBPP)) == 1
    assert CODE(double, answer=json.dumps(MBPP["test_list"])) == 1
    total = fenced("def total(numbers):\n    return sum(numbers)")
    assert CODE(total, answer=json.dumps({k: HUMANEVAL[k] for k in ("test", "entry_point")})) == 1
    assert CODE(fenced(ADD), answer=json.dumps({"tests": [{"input": "1 2", "output": "3"}]})) == 1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "no tests in None"),
        ({"answer": "42"}, "no tests in 42"),
        ({"tests": []}, "no tests in"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, "as many outputs as inputs"),
        ({"tests": {"inputs": [[1]], "outputs": [1], "fn_name": "f"}}, "function 'f'"),
        ({"tests": {"inputs": ["1"], "outputs": None}}, "as many outputs as inputs"),
        ({"tests": {"test_a.py": 5}}, "the file 'test_a.py' in tests must be a text, not 5"),
        ({"test": "def check(candidate): pass"}, "no 'entry_point'"),
        ({"test_list": []}, "'test_list' must be a list of asserts"),
        ({"test_list": 5}, "'test_list' must be a list of asserts"),
    ],
)
def test_a_row_without_known_tests_is_an_error_of_the_data(row: dict[str, Any], said: str):
    with pytest.raises(SampleError, match=said):
        CODE(fenced("x = 1"), **row)


# Scores that the policy earns


HACKS = [
    "import sys\nsys.exit(0)",
    "import os\nos._exit(0)",
    "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "import sys\nprint('1 1')\nsys.stdout.write('0' * 32 + ' 3 3\\n')\ndouble = None",
    "import sys\nsys.stdin.read()\ndouble = print",
    "raise SystemExit",
    "import atexit, os\natexit.register(os._exit, 0)\ndef double(x): return 0",
]


@pytest.mark.usefixtures("needs_sandbox")
@pytest.mark.parametrize("hack", HACKS)
def test_ending_early_or_printing_a_verdict_earns_nothing(hack: str):
    assert SHARE(fenced(hack), **MBPP) == 0


@pytest.mark.thorough
@pytest.mark.usefixtures("needs_sandbox")
@pytest.mark.parametrize("hack", HACKS)
def test_ending_early_or_printing_a_verdict_of_pytest_earns_nothing(hack: str):
    assert SHARE(fenced(hack), tests=PYTEST) == 0


@pytest.mark.thorough
@pytest.mark.usefixtures("needs_sandbox")
def test_a_program_at_a_limit_scores_0_and_keeps_the_tests_that_it_passed():
    tight = Code(limits=Limits(wall_s=300.0, cpu_s=2.0), share=True)
    loops = "def double(x):\n    while x == 'a': pass\n    return x + x"
    assert tight(fenced(loops), **MBPP) == pytest.approx(2 / 3)
    assert tight(fenced("while True: pass"), **MBPP) == 0
    assert tight(fenced("while True: pass"), tests=[{"input": "", "output": ""}]) == 0


@pytest.mark.usefixtures("needs_sandbox")
def test_a_program_cannot_make_later_tests_unscored():
    saboteur = "import os, shutil\nif os.path.exists('main.py'):\n    os.remove('main.py')\n    os.mkdir('main.py')\nprint(1)"
    tests = [{"input": "", "output": "1"}, {"input": "", "output": "1"}]
    assert SHARE(fenced(saboteur), tests=tests) == 0.5


# Failures of the machine


def test_without_a_sandbox_nothing_is_scored(monkeypatch: pytest.MonkeyPatch):
    def none() -> str:
        raise NoSandboxError("none works")

    monkeypatch.setattr(sandbox, "working_engine", none)
    with pytest.raises(NoSandboxError):
        Code().prepare()
    with pytest.raises(NoSandboxError):
        CODE(fenced(ADD), tests=[{"input": "1 2", "output": "3"}])


@pytest.mark.usefixtures("needs_sandbox")
@pytest.mark.parametrize("row", [MBPP, {"tests": [{"input": "", "output": ""}]}])
def test_a_killed_sandbox_is_not_scored(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    class Killed(sandbox.Sandbox):
        def run(self, *arguments: object, **named: object) -> sandbox.Result:
            self._launcher._process.kill()
            return super().run(*arguments, **named)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(module, "Sandbox", Killed)
    with pytest.raises(SandboxError, match="ended the sandbox"):
        SHARE(fenced("while True: pass"), **row)


@pytest.mark.usefixtures("needs_sandbox")
def test_the_grader_works_before_a_run_starts():
    Code(limits=PATIENT).prepare()


# As a reward function


def test_a_reward_worker_reads_the_columns_of_each_layout():
    config = RewardConfig(function=Code(), tokenizer="m")
    assert config.needs == ()
    assert {"prompt", "tests", "test", "entry_point", "test_list", "answer"} <= {*config.may_read}
    assert config.verdict("reward") == "reward"
    assert RewardConfig(function=Code(share=True), tokenizer="m").verdict("reward") is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of three texts."""
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("model")
    words = {"": 0, "x = 1": 1, "x = 2": 2}
    Tokenizer(models.WordLevel(words, unk_token="")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@pytest.mark.usefixtures("needs_sandbox")
def test_a_reward_worker_scores_rows_and_drops_those_whose_sandbox_was_killed(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    made: list[sandbox.Sandbox] = []

    def make(limits: Limits) -> sandbox.Sandbox:
        made.append(sandbox.Sandbox(limits))
        if len(made) == 2:
            made[-1]._launcher._process.kill()
            made[-1]._launcher._process.wait()  # a program could end before
        return made[-1]

    rows = Batch.of(sample_id=[7, 8, 9], response_ids=[[1], [1], [2]], test_list=[["assert x == 1"]] * 3)
    worker = RewardWorker(RewardConfig(function=CODE, tokenizer=model))
    monkeypatch.setattr(module, "Sandbox", make)
    scored: dict[int, float] = {}
    with pytest.raises(SandboxError) as caught:
        for part, _ in worker.score(rows):
            scored |= zip(part["sample_id"].to_pylist(), part["reward"].to_pylist(), strict=True)
    assert scored == {7: 1.0, 9: 0.0}
    assert caught.value.sample_ids == (8,)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.usefixtures("needs_sandbox")
def test_values_of_arrow_columns_are_read():
    rows = Batch.of(
        tests=[[{"input": "1 2", "output": "3"}], None],
        test_list=[None, ["assert double(1) == 2"]],
    )
    first, second = (
        dict(zip(rows.columns, values, strict=True))
        for values in zip(*(rows[c].to_pylist() for c in rows.columns), strict=True)
    )
    assert CODE(fenced(ADD), **first) == 1
    assert CODE(fenced("def double(x):\n    return x + x"), **second) == 1
