"""What the tests of all ops share: one way to hold an op to the tolerance rule."""

import inspect
from functools import partial

import pytest
import torch

from nearlight.core.numerics import judge
from nearlight.workbench import trial


@pytest.fixture
def assert_right():
    return _assert_right


def _assert_right(
    op, *args, upstream=None, plain=None, through=lambda function: function, **kwargs
):
    """Hold an op's outputs and gradients to the rule; the truth is its reference in fp64.

    Args:
        op: its record.
        args, kwargs: what its function takes. Gradients are asked for the inputs that require
            one, or for all that the record differentiates where none does.
        upstream: one gradient per output; random ones by default.
        plain: plain PyTorch's way; the reference by default. It gets what it has names for.
        through: `(function) -> function`, what surrounds the op.

    Returns:
        The op's outputs and gradients.
    """
    inputs = dict(inspect.signature(op.function).bind(*args, **kwargs).arguments)
    if not trial.differentiable(inputs):
        inputs = trial.fresh(inputs, _differentiated(op))
    ours, reference = through(partial(op.function, backend="triton")), through(op.reference)
    plain = reference if plain is None else partial(_call, plain)
    outputs = trial.flatten(plain(**inputs))
    if upstream is None:
        generator = torch.Generator().manual_seed(7919)
        upstream = [
            torch.randn(
                output.shape,
                generator=generator,
                dtype=torch.promote_types(output.dtype, torch.float32),
            )
            for output in outputs
        ]
    upstream = [upstream] if isinstance(upstream, torch.Tensor) else upstream
    upstream = [g.to(output.dtype) for g, output in zip(upstream, outputs, strict=True)]
    actual, expected = trial.run(ours, inputs, upstream), trial.run(plain, inputs, upstream)
    double = torch.float64
    truth = trial.run(reference, trial.to_dtype(inputs, double), trial.to_dtype(upstream, double))
    for name, one, two, three in _results(actual, expected, truth):
        assert one.dtype == two.dtype and one.shape == two.shape, name
        judgement = judge(one, two, three)
        assert judgement.passed, f"{name}: {judgement.reason}"
    return actual


def _results(*results):
    """Yield the name of each output and gradient, and the tensors."""
    for index, outputs in enumerate(zip(*(result.outputs for result in results), strict=True)):
        yield f"output {index}", *outputs
    for name, gradient in results[0].gradients.items():
        gradients = [gradient, *(result.gradients[name] for result in results[1:])]
        if any(each is not None for each in gradients):
            yield f"gradient of {name}", *gradients


def _differentiated(op):
    """Return the names of all inputs that a case of the record differentiates."""
    cpu = torch.device("cpu")
    cases = {tuple(case.shape): case for case in reversed(op.check_cases)}.values()
    made = (op.make_inputs(case, cpu, torch.Generator()) for case in cases)
    return {name for inputs in made for name in trial.differentiable(inputs)}


def _call(function, **inputs):
    names = inspect.signature(function).parameters
    return function(**{name: value for name, value in inputs.items() if name in names})
