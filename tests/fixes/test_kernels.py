import pytest

from nearlight.fixes.fix import NothingToDo
from nearlight.fixes.kernels import FIXES
from nearlight.nn import is_patched

PLACES = {
    "patch:rms_norm": 5,
    "patch:rope": 2,
    "patch:swiglu": 2,
    "patch:linear_cross_entropy": 2,  # the model and its head
}


def snapshot(model):
    return {
        name: (type(module), {key: id(value) for key, value in vars(module).items()})
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("fix", FIXES, ids=lambda fix: fix.name)
def test_a_fix_applies_and_is_undone_exactly(fix, make_model):
    model = make_model("GPT2" if fix.name == "patch:layer_norm" else "Llama")
    before = snapshot(model)
    undo = fix.apply(model)
    expected = PLACES.get(fix.name, 5)
    assert sum(is_patched(module) for module in model.modules()) == expected
    undo()
    assert snapshot(model) == before


def test_undoing_in_reverse_order_leaves_the_earlier_fix(make_model):
    model = make_model()
    first, second = (f for f in FIXES if f.name in ("patch:rope", "patch:swiglu"))
    first.apply(model)
    between = snapshot(model)
    undo = second.apply(model)
    assert snapshot(model) != between
    undo()
    assert snapshot(model) == between, "undoing the second fix took the first one out as well"


def test_a_model_without_a_place_says_why(make_model):
    by_name = {fix.name: fix for fix in FIXES}
    with pytest.raises(NothingToDo, match="layer_norm"):
        by_name["patch:layer_norm"].apply(make_model("Llama"))
    with pytest.raises(NothingToDo, match="GELU"):
        by_name["patch:swiglu"].apply(make_model("Gemma2"))
