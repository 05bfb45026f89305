import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from nearlight.core.errors import BadInput
from nearlight.profiler.target.functions import check_batch, check_made, function_target

GOOD = """
import torch
from torch import nn
from helper import WIDTH

CALLS = 0

def make():
    global CALLS
    CALLS += 1
    model = nn.Linear(WIDTH, 1)
    loss = lambda model, batch: model(batch["input"]).pow(2).mean()
    return model, {"input": torch.ones(4, WIDTH)}, loss

def plain():
    return nn.Linear(WIDTH, 1), torch.ones(4, WIDTH)

def needs(argument):
    return make()

def fails():
    raise RuntimeError("no CUDA\\nhere")

NUMBER = 3
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "helper.py").write_text("WIDTH = 6\n")
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    yield path
    sys.modules.pop("helper", None)


def test_model_batch_and_loss_of_a_function(file):
    before = list(sys.path)
    target = function_target(f"{file}:make", "train")
    assert sys.path == before
    model, batch = target.make("cpu", True)
    assert model.training and isinstance(model, nn.Linear)
    assert (target.batch, target.seq, target.dtype) == (None, None, "")
    loss = target.loss(model, batch)
    assert torch.equal(loss, model(torch.ones(4, 6)).pow(2).mean())
    assert target.make_batch()["input"].shape == (4, 6)


def test_each_model_is_a_new_one(file):
    target = function_target(f"{file}:make", "train")
    assert sys.modules["_nearlight_target_mine"].CALLS == 0
    assert target.make_model() is not target.make_model()
    assert sys.modules["_nearlight_target_mine"].CALLS == 2


def test_the_loss_works_on_a_model_of_another_call(file):
    target = function_target(f"{file}:make", "train")
    assert target.loss(nn.Linear(6, 1), {"input": torch.ones(2, 6)}).ndim == 0


def test_a_tensor_goes_to_the_forwards_first_argument(file):
    target = function_target(f"{file}:plain", "prefill")
    model, batch = target.make("cpu", True)
    assert set(batch) == {"input"} and not model.training
    assert target.loss(model, batch).shape == (4, 1)


def test_under_fake_tensors_nothing_is_real(file):
    target = function_target(f"{file}:make", "train")
    with FakeTensorMode():
        model, batch = target.make("cpu", False)
        loss = target.loss(model, batch)
    assert all(isinstance(t, FakeTensor) for t in (*model.parameters(), *batch.values(), loss))


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("{file}:missing", r"has no function 'missing'; it has make, plain, needs, fails$"),
        ("{file}:NUMBER", r"has no function 'NUMBER'"),
        ("{file}:needs", r"called without arguments \(missing a required argument: 'argument'\)"),
        ("{file.parent}/no.py:make", r"there is no file .*no\.py$"),
    ],
)
def test_a_name_that_leads_nowhere(file, name, complaint):
    with pytest.raises(BadInput, match=complaint):
        function_target(name.format(file=file), "train")


def test_a_function_that_fails_is_told_in_one_line(file):
    with pytest.raises(BadInput, match=r":fails fails: RuntimeError: no CUDA here$"):
        function_target(f"{file}:fails", "train").make_model()


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("def make(:", "SyntaxError"),
        ("import not_a_module", "ModuleNotFoundError: No module named 'not_a_module'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", r"broken\.py fails: SystemExit: 3$"),
        ("class Own(BaseException): pass\nraise Own('x')", r"broken\.py fails: Own: x$"),
    ],
)
def test_a_file_that_fails_is_told_in_one_line(tmp_path, source, complaint):
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(BadInput, match=complaint) as caught:
        function_target(f"{path}:make", "train")
    assert "\n" not in str(caught.value)
    assert "_nearlight_target_broken" not in sys.modules


def test_an_interrupt_is_not_taken_for_a_failure(tmp_path):
    path = tmp_path / "stopped.py"
    path.write_text("def make():\n    raise KeyboardInterrupt\nmake()")
    with pytest.raises(KeyboardInterrupt):
        function_target(f"{path}:make", "train")
    assert "_nearlight_target_stopped" not in sys.modules
    path.write_text("def make():\n    raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        function_target(f"{path}:make", "train").make_model()


def test_a_function_that_exits_and_one_with_nothing_to_train(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import sys, torch\nfrom torch import nn\n"
        "def exits(): sys.exit('no data')\n"
        "def frozen(): return nn.Linear(2, 1).requires_grad_(False), torch.ones(1, 2)\n"
    )
    with pytest.raises(BadInput, match=r":exits fails: SystemExit: no data$"):
        function_target(f"{path}:exits", "train").make_model()
    with pytest.raises(BadInput, match=r":frozen: all parameters are frozen"):
        function_target(f"{path}:frozen", "train").make("cpu", False)
    function_target(f"{path}:frozen", "prefill").make("cpu", False)


MODEL, BATCH = nn.Linear(2, 1), {"input": torch.zeros(1, 2)}


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (None, r"returned NoneType; it must return \(model, batch\) or"),
        (MODEL, "returned Linear; it must"),
        ((MODEL,), "returned a tuple of 1"),
        ((MODEL, BATCH, None, 1), "returned a tuple of 4"),
        ((BATCH, MODEL), "returned dict as the model"),
        ((MODEL, BATCH, 0.5), "returned float as loss_fn"),
        ((MODEL, {}), "the batch is dict"),
        ((MODEL, "text"), "the batch is str"),
        ((MODEL, {"input": [1, 2]}), "'input' is list"),
        ((MODEL, torch.zeros(0, 2)), r"the batch is empty, 'input' has shape \(0, 2\)"),
        ((MODEL, {"m": torch.ones(1), "input_ids": torch.zeros(2, 0)}), r"'input_ids' .* \(2, 0\)"),
        ((MODEL, (torch.zeros(1), torch.zeros(1))), "has 2 tensors, Linear.forward takes 1"),
    ],
)
def test_what_a_function_must_not_return(made, complaint):
    with pytest.raises(BadInput, match=complaint):
        check_made(made, "f.py:make")


def test_a_tuple_goes_to_the_forwards_arguments_in_order():
    first, second = torch.zeros(1), torch.ones(1)
    batch = check_batch(nn.Bilinear(1, 1, 1), [first, second], "t")
    assert list(batch) == ["input1", "input2"] and batch["input2"] is second
