"""One text form for the name of an arm: what is written is what is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accumulation_harness.config.arm_name import ArmName

names = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1).filter(lambda text: "\n" not in text)


@given(name=names, accumulation_steps=st.integers(1, 10**6), replicate=st.integers(0, 100))
def test_what_is_written_is_read_back(name, accumulation_steps, replicate):
    arm = ArmName(name, accumulation_steps, replicate)
    assert ArmName.parse(str(arm)) == arm


@pytest.mark.parametrize("text", ["", "accumulated", "accumulated/4", "-4", "null-1.", "null-.1", "null-1.2.3", "full-x"])
def test_what_names_no_arm_is_refused(text):
    with pytest.raises(ValueError, match="expected the name of an arm"):
        ArmName.parse(text)
