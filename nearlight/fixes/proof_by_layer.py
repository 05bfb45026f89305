"""The proof of a model too large to prove whole: one decoder layer at a time.

The plain model runs once and every layer's inputs are kept. Then each layer runs alone, plain,
patched and in fp64, on those inputs and a random upstream gradient; last, the model without its
layers (embedding, final norm, head and loss), whose layers are stood in for by what the last one
gave. Memory stays at the model and one part of it in fp64.
"""

from __future__ import annotations

import copy
import enum
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from nearlight.core import backend
from nearlight.core.float64 import KeepFloat64, float64_copy
from nearlight.core.numerics import NUM_DRAWS, Judgement
from nearlight.core.progress import Progress, silent
from nearlight.core.report import Proof
from nearlight.fixes import proof_runs
from nearlight.fixes.fix import Fix, NothingToDo
from nearlight.fixes.proof_runs import (
    Results,
    Row,
    by_draws,
    free_bytes,
    gradients,
    judged,
    needs,
    repeatable,
    settled,
    worst_first,
)
from nearlight.profiler.target import Batch, Target


@dataclass(frozen=True)
class _Captured:
    """What the layers were called with, and what the last one returned."""

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    output: Any


@dataclass(frozen=True)
class _Setting:
    """How every part is run."""

    target: Target
    fixes: Sequence[Fix]
    device: str
    used: Counter[str]
    """How often each fix found a place."""
    num_inputs: int = 1 + NUM_DRAWS

    @property
    def is_training(self) -> bool:
        return self.target.task == "train"


def prove_by_layer(
    target: Target,
    model: nn.Module,
    fixes: Sequence[Fix],
    batch: Batch,
    device: str = "cpu",
    progress: Progress = silent,
) -> Proof:
    """Prove fixes on one layer of a model at a time.

    Args:
        target: what `model` belongs to. Unless it is live, layers are dropped from the model
            once they are proved, which frees their memory.
        model: with its weights, as found, in the target's dtype.
        fixes: what is to be proved.
        batch: one sequence.
        device: "cpu" runs each part in fp32, "cuda" in the model's dtype.
        progress: told what goes on.

    Returns:
        Rows named like the model's own parts, the worst one first; without rows and with the
        reason where the model is no stack of layers called one after another.
    """
    name, stack = longest_stack(model)
    if stack is None:
        return Proof(False, [], f"not run: {type(model).__name__} has no list of layers")
    missing = _missing_memory(model, stack, device, target.is_live)
    if missing:
        return Proof(False, [], f"not run: {missing}")
    progress(f"the plain model's {len(stack)} layers")
    captured = _capture(target, model, stack, batch, device)
    if isinstance(captured, str):
        return Proof(False, [], f"not run: {captured}")
    stand_ins = nn.ModuleList(
        _StandIn(layer, captured.output, index == 0) for index, layer in enumerate(stack)
    )
    setting = _Setting(target, fixes, device, Counter())
    rows: list[Row] = []
    for index, call in enumerate(captured.calls):
        progress(f"layer {index + 1} of {len(stack)}")
        rows += _prove_layer(setting, f"{name}.{index}", stack[index], call)
        if not all(row["passed"] for row in rows):
            # The proof has failed: further draws of other layers cannot change that.
            setting = replace(setting, num_inputs=1)
        if not target.is_live:
            stack[index] = nn.Identity()
    progress("what stands before and behind the layers")
    rows += _prove_ends(setting, model, name, stand_ins, batch)
    for fix in fixes:
        if not setting.used[fix.name]:
            reason = "it changes no layer and nothing around the layers"
            rows.append({"name": fix.name, "passed": False, "reason": reason})
    passed = all(row["passed"] for row in rows)
    return Proof(passed, worst_first(rows), f"one layer at a time, all {len(stack)} and the head")


def longest_stack(model: nn.Module) -> tuple[str, nn.ModuleList | None]:
    """Return the longest list of modules, with its name: a decoder's layers."""
    stacks = [
        (name, part)
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and len(part)
    ]
    return max(stacks, key=lambda item: len(item[1]), default=("", None))


def _missing_memory(model: nn.Module, stack: nn.ModuleList, device: str, is_live: bool) -> str:
    """Say what is missing for the largest part, which is what stands around the layers."""
    of_layers = {id(parameter): parameter for parameter in stack.parameters()}
    around = [p for p in model.parameters() if id(p) not in of_layers]
    lookups = _lookups(model)
    count = sum(parameter.numel() for parameter in around)
    trained = sum(p.numel() for p in around if id(p) not in lookups)
    # The part in fp32 with its fp64 copy and gradients, or with three sets of gradients later.
    needed = max(12 * count + 8 * trained, 4 * count + 16 * trained)
    freed = sum(p.numel() * p.element_size() for p in of_layers.values())
    free = free_bytes(device) + (0 if is_live else freed)
    if needed <= free:
        return ""
    return f"{needs(needed, free, device)} for what stands around the layers"


def _capture(
    target: Target, model: nn.Module, stack: nn.ModuleList, batch: Batch, device: str
) -> _Captured | str:
    """Run the plain model without gradients; a reason where its layers are no chain."""
    calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = [[] for _ in stack]
    outputs: list[Any] = []

    def enter(index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        args, kwargs = _with_tensors((args, kwargs), torch.Tensor.detach)
        if args and torch.is_tensor(args[0]):
            args = (args[0].clone(), *args[1:])  # a layer may add to it in place
        calls[index].append((args, kwargs))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output)

    with ExitStack() as hooks:
        for index, layer in enumerate(stack):
            hooked = layer.register_forward_pre_hook(partial(enter, index), with_kwargs=True)
            hooks.callback(hooked.remove)
        hooks.callback(stack[-1].register_forward_hook(leave).remove)
        hooks.enter_context(_task_mode(model, target))
        with repeatable(device), torch.no_grad():
            # A live model may lie elsewhere than the proof.
            place = next(model.parameters()).device
            target.loss(model, {key: value.to(place) for key, value in batch.items()})
    kind = type(model).__name__
    if any(len(of_layer) != 1 for of_layer in calls):
        return f"the longest list of modules in {kind} is not called once each"
    if any(not args or not torch.is_tensor(args[0]) for ((args, _),) in calls):
        return f"the layers of {kind} do not take their hidden states first"
    output = outputs[0]
    if not torch.is_tensor(output) and not (
        isinstance(output, tuple) and torch.is_tensor(output[0])
    ):
        return f"the layers of {kind} return {type(output).__name__}"
    return _Captured([of_layer[0] for of_layer in calls], output)


@contextmanager
def _task_mode(model: nn.Module, target: Target) -> Iterator[None]:
    """Train or evaluate as the task says, without a cache in training; restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    config: Any = getattr(model, "config", None)
    use_cache = getattr(config, "use_cache", None)
    try:
        model.train(target.task == "train")
        if use_cache is not None and target.task != "decode":
            config.use_cache = False
        yield
    finally:
        for module, training in modes:
            module.training = training
        if use_cache is not None:
            config.use_cache = use_cache


def _with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with its tensors changed, in containers and objects (caches) as well."""
    if torch.is_tensor(value):
        return change(value)
    if isinstance(value, (list, tuple)):
        items = [_with_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _with_tensors(item, change) for key, item in value.items()}
    is_plain = isinstance(value, (enum.Enum, nn.Module, type)) or callable(value)
    if is_plain or not hasattr(value, "__dict__"):
        return value
    changed = copy.copy(value)
    for key, item in vars(value).items():
        vars(changed)[key] = _with_tensors(item, change)
    return changed


def _three_ways(
    setting: _Setting, part: nn.Module, run: Callable[[int, nn.Module, torch.dtype | None], Results]
) -> list[Row]:
    """Run a part in fp64, plain and patched, one after the other: only results are kept."""
    dtype = torch.float32 if setting.device == "cpu" else None

    def attempt(draw: int) -> dict[str, Judgement]:
        with repeatable(setting.device), KeepFloat64():
            truth = run(draw, float64_copy(part), torch.float64)
        with repeatable(setting.device):
            plain = run(draw, part, dtype)
        with repeatable(setting.device), backend.force("triton"), _applied_here(setting, part):
            ours = run(draw, part, dtype)
        return judged(ours, plain, truth)

    return by_draws(attempt, setting.num_inputs)


@contextmanager
def _applied_here(setting: _Setting, part: nn.Module) -> Iterator[None]:
    """Apply the fixes that have a place in this part."""
    with ExitStack() as stack:
        for fix in setting.fixes:
            try:
                stack.callback(fix.apply(part))
            except NothingToDo:
                continue
            setting.used[fix.name] += 1
        yield


def _shaken(tensor: torch.Tensor, draw: int) -> torch.Tensor:
    """Return the tensor with other roundings: each element off by a bit of bf16 or so."""
    if draw == 0:
        return tensor
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(draw))
    return (tensor.float() * (1 + 2**-8 * noise.to(tensor.device))).to(tensor.dtype)


def _prove_layer(
    setting: _Setting,
    name: str,
    layer: nn.Module,
    captured: tuple[tuple[Any, ...], dict[str, Any]],
) -> list[Row]:
    def run(draw: int, part: nn.Module, dtype: torch.dtype | None) -> Results:
        call = ((_shaken(captured[0][0], draw), *captured[0][1:]), captured[1])
        args, kwargs = _with_tensors(call, partial(_moved, setting.device, dtype))
        hidden = args[0].clone().requires_grad_(setting.is_training)
        with torch.set_grad_enabled(setting.is_training):
            output = part(hidden, *args[1:], **kwargs)
        output = output if torch.is_tensor(output) else output[0]
        results = {f"output of {name}": output.detach()}
        if setting.is_training:
            generator = torch.Generator().manual_seed(draw)
            upstream = torch.randn(output.shape, generator=generator)
            # Rounded once, so that all three get the same values.
            upstream = upstream.to(args[0].device, _narrow(call[0][0].dtype)).to(output.dtype)
            output.backward(upstream)
            assert hidden.grad is not None
            results[f"input gradient of {name}"] = hidden.grad
            prefix = "gradient of "
            results |= {
                f"{prefix}{name}.{key.removeprefix(prefix)}": value
                for key, value in gradients(part).items()
            }
        return results

    return _three_ways(
        setting, settled(copy.deepcopy(layer), setting.device, setting.is_training), run
    )


def _moved(device: str, dtype: torch.dtype | None, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else None)


def _narrow(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float64 else dtype


class _StandIn(nn.Module):
    """Stands for a layer: the first one gives what the last layer gave, the others pass it on."""

    def __init__(self, like: nn.Module, output: Any, gives: bool) -> None:
        super().__init__()
        # Models ask their layers for their kind of attention.
        simple = (str, int, float, bool)
        vars(self).update(
            {k: v for k, v in vars(like).items() if isinstance(v, simple) and not k.startswith("_")}
        )
        hidden = output if torch.is_tensor(output) else output[0]
        self.rest = None if torch.is_tensor(output) else output[1:]
        self.found = hidden.detach()
        self.hidden = nn.Parameter(self.found.clone()) if gives else None
        self.entered: torch.Tensor | None = None

    def give(self, draw: int) -> None:
        """Give a draw of what the last layer gave from now on."""
        assert self.hidden is not None
        self.hidden.data.copy_(_shaken(self.found, draw))

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.hidden is not None:
            self.entered = x.detach()
            # The value of `hidden`; what stands before the layers gets the gradient as well.
            x = self.hidden + (x - x.detach()) if torch.is_grad_enabled() else self.hidden
        return x if self.rest is None else (x, *self.rest)


def _prove_ends(
    setting: _Setting, model: nn.Module, name: str, stand_ins: nn.ModuleList, batch: Batch
) -> list[Row]:
    # Deep copy takes the stand-ins for the layers, which it never sees.
    ends = copy.deepcopy(model, {id(model.get_submodule(name)): stand_ins})
    ends = settled(ends, setting.device, setting.is_training)
    _freeze_lookups(ends)
    given = f"gradient of {name}.0.hidden"

    def run(draw: int, part: nn.Module, dtype: torch.dtype | None) -> Results:
        first = cast(_StandIn, part.get_submodule(f"{name}.0"))
        first.give(draw)
        in_dtype = proof_runs.cast(batch, dtype) if dtype is not None else batch
        results = proof_runs.run(setting.target, part, in_dtype)
        assert first.entered is not None
        results[f"input of {name}.0"] = first.entered
        if given in results:
            results[f"gradient of what {name} gave"] = results.pop(given)
        return results

    return _three_ways(setting, ends, run)


def _freeze_lookups(ends: nn.Module) -> None:
    """Take no gradient of embeddings that nothing else uses: their lookup is nobody's fix.

    At a vocabulary of 128k and width 4096 it would be 8 GiB more in fp64; what they feed the
    first layer is compared.
    """
    for weight in _lookups(ends).values():
        weight.requires_grad_(False)


def _lookups(model: nn.Module) -> dict[int, torch.Tensor]:
    """Return the weights of embeddings that no other module shares, by id."""
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return {id(e.weight): e.weight for e in embeddings if uses[id(e.weight)] == 1}
