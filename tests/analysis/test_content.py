import math

import pytest

from accumulation_harness.analysis.content import Matrix, number


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123456, "0.0123"), (1.234e-15, "1.2e-15"), (1e-3, "0.001"), (9.99e-4, "1.0e-03"), (9999.0, "1e+04"), (1e4, "1.0e+04"),
     (0.0, "0"), (-0.5, "-0.5"), (math.nan, "-"), (math.inf, "inf")],
)  # fmt: skip
def test_numbers_as_a_reader_wants_them(value: float, text: str) -> None:
    assert number(value) == text


def test_a_precision_starts_after_all_columns_of_those_before() -> None:
    matrix = Matrix(precisions=(("float64", 2), ("float32", 3)), columns=(), bodies=(), caption="")
    assert matrix.starts == {0, 2, 5}
