import pytest

from nearlight.core.errors import BadInput, MissingPart, one_line, said


def test_bad_input_is_a_value_error_and_a_missing_part_is_not():
    assert issubclass(BadInput, ValueError)
    assert not issubclass(MissingPart, ValueError)
    with pytest.raises(RuntimeError, match="pip install x"):
        raise MissingPart("pip install x")


def test_any_error_is_one_line():
    assert one_line(OSError("a\n  b")) == "OSError: a b"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 1000))) == 300
    assert one_line(ValueError("half \ud800")) == r"ValueError: half \ud800"


def test_a_message_that_cannot_be_made_is_said():
    class Odd(Exception):
        def __str__(self):
            raise KeyError("k")

    assert said(Odd()) == "its message raised KeyError"
