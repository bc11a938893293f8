"""Numbers, units and notations, by hand."""

from fractions import Fraction

import pytest

from weft.algorithms.graders.numbers import is_words, key, plain, quantity_of, with_decimal_comma


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("-.5", Fraction(-1, 2)),
        ("−7", -7),
        ("1,234,567.5", Fraction(2469135, 2)),
        (r"11,\! 111", 11111),
        (r"32{,}000", 32000),
        ("1 000", 1000),
        (r"\$3.50", Fraction(7, 2)),
        ("$-3", -3),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac34", Fraction(-3, 4)),
        (r"5\frac{1}{2}", Fraction(11, 2)),
        ("5 1/2", Fraction(11, 2)),
        ("6/8", Fraction(3, 4)),
        ("0.3/0.4", Fraction(3, 4)),
        (r"1.5 \times 10^{3}", 1500),
        ("2e-3", Fraction(1, 500)),
        (r"10\text{ cm}^2", 10),
        ("7 green apples", 7),
        (r"90^\circ", 90),
        ("2^3", 8),
        ("10^{-2}", Fraction(1, 100)),
        ("1.250.000", 1250000),
        ("twenty-five apples", 25),
        (r"1.5~\text{million dollars}", 1500000),
    ],
)
def test_numbers_are_recognized(text: str, value: int | Fraction):
    quantity = quantity_of(text)
    assert quantity is not None and quantity.value == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "3x",
        "3 x",
        "5xy",
        r"2\pi",
        "2 pi",
        "3 sin x",
        "1, 2",
        "9^9^9",
        "1/0",
        "7!",
        "(3, 4)",
        "--3",
        "9" * 2000,
        "3 or 4",
    ],
)
def test_other_texts_are_not_numbers(text: str):
    assert quantity_of(text) is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("28%", "28", True),
        ("28%", "0.28", True),
        ("0.28%", "28%", False),
        ("0.28", "28", False),
        ("0.3333333", "1/3", True),
        ("0.333", "1/3", False),
        ("5 m", "5 meters", True),
        ("5 m", "5 km", False),
        ("5 km", "5", True),
        ("5 m^2", "5 m", False),
        ("12 square feet", "12 feet", False),
        ("12 square feet", "12 ft^2", True),
        ("16 square units", "16 units", False),
        ("16 square units", "16 cm²", True),
        ("10 m/s", "10 m/s^2", False),
        ("60 mph", "60 miles per hour", True),
        ("60 km/h", "60 m/s", False),
        ("2.5 hours", "150 minutes", True),
        ("$0.50", "50 cents", True),
        ("20 °C", "20 °F", False),
        ("5 in total", "5 cm", True),
        ("100", "101", False),
        ("10000001", "10000002", False),
        ("0.0001", "0.0002", False),
    ],
)
def test_which_numbers_mean_the_same(one: str, other: str, same: bool):
    first, second = quantity_of(one), quantity_of(other)
    assert first is not None and second is not None
    assert first.equals(second) is same and second.equals(first) is same


def test_a_decimal_comma_where_it_cannot_separate_thousands():
    assert [
        (q := with_decimal_comma(t)) and float(q.value)
        for t in ("2,74 €", "0,111", "1,000", "1,2,3", "7")
    ] == [
        2.74,
        0.111,
        None,
        None,
        None,
    ]


def test_ways_of_writing():
    assert plain(r"\[ \left( 1,\, 2 \right) \].") == "(1, 2)" and plain(r"\tfrac12") == r"\frac{1}{2}"
    assert key(r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}") == r"\begin{pmatrix}1\\2\end{pmatrix}"
    assert (
        key(r"\textbf{(C)}") == key("C") == "C" and key("x^{2}") == key("x^2") and key("x") != key("X")
    )
    assert is_words("no solution") and not is_words("n") and not is_words("2 apples")
