"""How the soak judges answers and memory."""

import pytest

import memory
from answers import Answer, judged

ALONE = Answer([7, 8, 9], [{7: -0.1, 5: -2.4}, {8: -0.690, 6: -0.697}, {9: -0.2, 4: -1.7}])


@pytest.mark.parametrize(
    ("found", "new", "kind"),
    [
        ([7, 8, 9], 3, "equal"),
        ([7, 8], 2, "equal"),
        ([7, 8], 3, "short"),
        ([7, 6, 1], 3, "tie"),  # what follows another token may be anything
        ([7, 5, 9], 3, "wrong"),  # not one of the likely tokens
        ([5, 8, 9], 3, "wrong"),  # much less likely
        ([7, 8, 4], 3, "wrong"),
    ],
)
def test_an_answer_is_compared_with_the_one_alone(found, new, kind):
    assert judged(found, ALONE, new) == kind


def test_growth_of_memory_is_the_slope_in_mib_per_minute():
    assert memory.growth([(0, 100), (30, 101), (60, 102)]) == pytest.approx(2)
    assert memory.growth([(0, 100), (30, 101), (60, 100)]) == pytest.approx(0)
