"""Math: some answers of each kind, and comparisons that do not end. A benchmark has the labelled
set."""

import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from weft.algorithms.graders import equality, math
from weft.algorithms.graders.math import PROCESS, Math
from weft.dataflow.errors import SampleError

PATIENT = Math()
SLOW = r"\boxed{\sum_{k=1}^{10^{12}} \frac{1}{k^{3/2}}}"
"""A sum that sympy computes term by term."""


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(math, "DEADLINE_S", 60.0)


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (
            r"\frac{3}{4}",
            [r"So $\boxed{\dfrac34}$.", "The answer is 0.75.", "#### 3/4"],
            [r"\boxed{\frac43}", ""],
        ),
        (r"x^2-5x+6", [r"\boxed{(x-2)(x-3)}"], [r"\boxed{(x-2)(x+3)}"]),
        (r"[-2,7]", [r"\boxed{x \in [-2, 7]}"], [r"\boxed{(-2,7)}"]),
        (r"\{1,2,3\}", [r"\boxed{3, 2, 1}"], [r"\boxed{1, 2}"]),
        (r"(3,-1)", [r"\boxed{(3, -1)}"], [r"\boxed{(-1,3)}"]),
        (r"3\sqrt{13}", [r"\boxed{\sqrt{117}}", "3*sqrt(13)"], [r"\boxed{13\sqrt3}"]),
        (
            r"\begin{pmatrix}1\\-2\end{pmatrix}",
            [r"$\boxed{\begin{bmatrix} 1 \\ -2 \end{bmatrix}}$"],
            [r"\boxed{1}"],
        ),
        (
            r"\text{Evelyn}",
            ["The answer is Evelyn.", "The winner is Evelyn!"],
            [r"\boxed{\text{Briana}}", "Evelyn is not."],
        ),
        (r"\text{(C)}", [r"\boxed{C}", "The answer is (C)."], [r"\boxed{\text{(D)}}"]),
        (
            r"Hence $x = \boxed{12}$.",
            ["It is 12."],
            [r"\boxed{21}", "The answer is $x^{12}$.", r"\boxed{9^{9^{9^9}}}"],
        ),
        (r"\frac{1}{2004!}", [r"\boxed{1/2004!}"], [r"\boxed{\frac{1}{2006!}}", r"\boxed{0}"]),
        (
            r"\frac{1}{3}",
            [r"\boxed{0.\overline{3}}", r"The answer is 0.\overline{3}."],
            [r"\boxed{0.\overline{4}}"],
        ),
        (r"0.1\overline{6}", [r"\boxed{\frac16}", "1/6"], [r"\boxed{0.1}", r"\boxed{0.16}"]),
        (
            r"25\pi",
            [r"\boxed{25π cm²}", "The area is 25π cm².", r"\boxed{25\pi\text{ cm}^2}"],
            [r"\boxed{25}", "The area is 5π cm²."],
        ),
        (r"25\pi cm", [r"\boxed{25π}"], [r"\boxed{25π m}", "25π cm²"]),
        (
            "3:4",
            ["The ratio is 3:4.", r"\boxed{3 : 4}"],
            ["The ratio is 4:3.", "It was 3:4, and is 3:5."],
        ),
        (
            "8",
            ["答案：8", "所以答案是 8。", "The answer is between 7 and 9, so 8."],
            ["答案：9", "答案：8 × 2 = 16"],
        ),
        ("42", [r"\boxed{\text{The answer is }42}"], [r"\boxed{\text{The answer is }43}"]),
        ("7", ["The answer is 7, so 8 is wrong."], ["The answer is between 7 and 9, so 8"]),
        (
            "2x + 3",
            ["<answer>2x + 3</answer>", "<answer>f(x) = 2x + 3</answer>"],
            ["<answer>2x - 3</answer>"],
        ),
        (
            r"\frac{1}{3\cdot 2^{2006}}",
            [r"\boxed{\frac{2}{3 \cdot 2^{2007}}}"],
            [r"\boxed{\frac{2^{2005}+1}{3\cdot 2^{2006}}}"],
        ),
        (r"\frac{2^{1000}-1}{2^{1000}}", [r"\boxed{1-2^{-1000}}"], [r"\boxed{1}"]),
        (r"\frac{x}{2^{600}}", [r"\boxed{2^{-600}x}"], [r"\boxed{\frac{2x}{2^{600}}}"]),
        (r"(\frac{1}{2^{300}}, 1)", [r"\boxed{(2^{-300}, 1)}"], [r"\boxed{(\frac{3}{2^{300}}, 1)}"]),
        (r"6\sqrt{3}\text{ cm}^2", [r"\boxed{6\sqrt{3}}"], [r"\boxed{6\sqrt{3}\text{ cm}}"]),
        ("5 m", ["It is 5 m long."], [r"\boxed{5\text{ m}^2}", "The answer is 5 square meters."]),
        ("3 hours", ["The answer is 3 hours."], ["The answer is 3 minutes."]),
        (
            "6",
            [r"\boxed{5}. Wait, no. It should be 6."],
            [r"\boxed{6}. Wait, no: \boxed{5", "It is not 6 but 5."],
        ),
        ("London", ["The capital is not Paris but London."], ["The capital is not London but Paris."]),
        ("The answer is 10000", [r"\boxed{10000}"], [r"\boxed{1000}"]),
        ("She has 15 apples left.", [r"\boxed{15}", "The answer is 15."], [r"\boxed{20}"]),
        ("There are 120 ways to arrange them.", [r"\boxed{120}"], [r"\boxed{720}"]),
        ("0.000032", ["The concentration is 3.2e-5."], ["The concentration is 3.2e5."]),
        ("no solution", [r"\boxed{\text{No solutions}}"], [r"\boxed{\text{one solution}}"]),
        (
            "42",
            [r"<think>\boxed{41}</think> \boxed{42}"],
            [r"\boxed{42", r"\boxed{__import__('os').system('true')}"],
        ),
    ],
)
def test_formulas(answer: str, right: list[str], wrong: list[str]):
    for response in right:
        assert PATIENT(response, answer) == 1, response
    for response in wrong:
        assert PATIENT(response, answer) == 0, response


def test_an_endless_comparison_gives_no_verdict_and_a_new_process_takes_over(
    monkeypatch: pytest.MonkeyPatch,
):
    assert PATIENT(r"\boxed{1}", "1") == 1
    before = PROCESS.pid
    began = time.monotonic()
    monkeypatch.setattr(math, "DEADLINE_S", 0.5)  # waited out
    with pytest.raises(SampleError, match=r"the comparison with '2' took longer than 0\.5 s"):
        Math()(SLOW, "2")  # waited out
    monkeypatch.setattr(math, "DEADLINE_S", 60.0)
    assert time.monotonic() - began < 30 and PROCESS.pid is None
    assert PATIENT(r"\boxed{x+1}", "1+x") == 1 and PROCESS.pid not in (None, before)


def test_a_process_that_dies_is_no_verdict():
    assert PATIENT("1", "1") == 1 and PROCESS.pid is not None
    os.kill(PROCESS.pid, 9)
    with pytest.raises(
        SampleError, match=r"the process that compares formulas ended \(signal 9\) at '1'"
    ):
        PATIENT("1", "1")


def test_answers_that_cannot_be_compared_get_no_verdict():
    with pytest.raises(SampleError, match="both answers are too large"):
        PATIENT(r"\boxed{9^{9^{9^9}}}", "8^{8^{8^8}}")
    with pytest.raises(
        SampleError, match=r"the answer 'He has 3 pears and 4 figs\.' is a sentence; give the number"
    ):
        PATIENT("7", "He has 3 pears and 4 figs.")
    with pytest.raises(SampleError, match="the answer '' is empty"):
        PATIENT("1", "")


def test_threads_ask_one_process_and_each_gets_its_own_reply():
    found: dict[int, float] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: PATIENT(rf"\boxed{{{n}}}", str(n % 3))}))
        for n in range(9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {n: float(n < 3) for n in range(9)}


def test_a_grader_is_a_value_that_imports_nothing_heavy(tmp_path: Path):
    assert pickle.loads(pickle.dumps(Math())) == Math()
    code = "import sys, weft.algorithms.graders.math; print({'sympy', 'math_verify', 'torch'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize(
    ("given", "answer", "right"),
    [
        ("½", r"\frac12", 1),
        ("2½", "2.5", 1),
        ("x²", "x^2", 1),
        ("10⁻⁶", "10^{-6}", 1),
        ("3√2", r"\sqrt{18}", 1),
        ("√(x+1)", r"\sqrt{x+1}", 1),
        (r"\boldsymbol{42}", "42", 1),
        (r"\textcolor{red}{42}", "42", 1),
        (r"\hspace{1mm}42", "42", 1),
        ("3,4", "4,3", 1),
        ("3,4", "4,5", 0),
        ("0", "0.0000001", 0),
    ],
)
def test_answers_in_many_notations_are_recognized(given: str, answer: str, right: int):
    assert PATIENT(rf"\boxed{{{given}}}", answer) == right


def test_a_comparison_that_fails_in_the_library_is_reported_and_counts_as_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def verify(gold: object, given: object, *, raise_on_error: bool = False, **settings: object) -> bool:
        if raise_on_error:
            raise TypeError("cannot determine truth value")
        return False

    parse, _ = equality._math_verify()
    monkeypatch.setattr(equality, "_math_verify", lambda: (parse, verify))
    monkeypatch.setattr(equality, "_reports", itertools.count(1))
    for _ in range(15):
        assert not equality.is_right(r"\boxed{x+2}", "x+1")
    assert len(caplog.messages) == equality.MAX_REPORTS
    assert "counts as wrong: TypeError('cannot determine truth value')" in caplog.messages[0]
    assert caplog.messages[-1].endswith("further ones are not reported")
