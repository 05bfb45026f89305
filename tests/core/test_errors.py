import pytest

from nearlight.core.errors import BadInput, MissingPart


def test_bad_input_is_a_value_error_and_a_missing_part_is_not():
    assert issubclass(BadInput, ValueError)
    assert not issubclass(MissingPart, ValueError)
    with pytest.raises(RuntimeError, match="pip install x"):
        raise MissingPart("pip install x")
