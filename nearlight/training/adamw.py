"""AdamW with the interface of `torch.optim`, one launch to a group of parameters."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.optim.optimizer import ParamsT

from nearlight.core.blockwise import pack, unpack
from nearlight.core.rows import refuse_dtensor
from nearlight.ops import adamw
from nearlight.ops.adamw.registration import order_of
from nearlight.training.steps import GroupwiseOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
IS_SIGNED = {"exp_avg": True, "exp_avg_sq": False}
# Below, a moment costs little and eight bits save nothing.
MIN_8BIT_SIZE = 4096


class AdamW(GroupwiseOptimizer):
    """Adam with decoupled weight decay; moments in fp32 or eight bits, for fp32 to bf16 parameters.

    p = (1 − lr λ) p − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε), after m and v took in g.

    Nothing synchronises: t lies on the parameters' device, and so may the learning rate, so that a
    step can be captured in a CUDA graph and lr changed by `lr.fill_`. A state dict of
    `torch.optim.AdamW` can be loaded. Gradients are left as they are.

    Args:
        params: parameters or groups of them: fp32, bf16, fp16 or fp64, any strides, CPU or CUDA.
        lr: learning rate, or a tensor of one number.
        betas: β₁ and β₂ within [0, 1).
        eps: ε.
        weight_decay: λ.
        maximize: follow the gradients upwards.
        amsgrad: only False; it is here to be refused in words.
        state: "fp32", or "8bit" for moments in blocks of 256 (fp64 parameters keep fp64).
        min_8bit_size: smaller tensors keep fp32. A shard is judged by its own size: where tensors
            are sharded by hand, give 0 and cut them at multiples of 256 elements, and every
            sharding computes the same bits.
        stochastic_rounding: round bf16 parameters stochastically.
        seed: of that rounding.
        backend: "auto", "triton" or "reference", as in `nearlight.ops.adamw`.

    Raises:
        ValueError: a number out of range, `amsgrad`, or a parameter on another device than its
            group's first.
        TypeError: a DTensor, or a complex or sparse parameter or gradient.

    Source: Loshchilov & Hutter 2019, arXiv:1711.05101.

    Example:
        >>> import torch
        >>> from nearlight.training import AdamW
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = AdamW([weight], lr=0.5, weight_decay=0.0)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([0.5000, 0.5000])
    """

    # torch's GradScaler then hands over its scale and its finding, and does not synchronise.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        amsgrad: bool = False,
        state: Literal["fp32", "8bit"] = "fp32",
        min_8bit_size: int = MIN_8BIT_SIZE,
        stochastic_rounding: bool = False,
        seed: int = 0,
        backend: str = "auto",
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "maximize": maximize, "amsgrad": amsgrad, "state": state,
            "min_8bit_size": min_8bit_size, "stochastic_rounding": stochastic_rounding,
            "seed": seed, "backend": backend,
        }  # fmt: skip
        super().__init__(params, defaults)

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise unless a group's options are allowed and its parameters dense, on one device."""
        _check_options(group)
        for param in group["params"]:
            refuse_dtensor("AdamW", param)
            if not param.is_floating_point() or param.layout != torch.strided:
                raise TypeError(
                    f"AdamW: a parameter of {param.dtype} and layout {param.layout}; allowed are "
                    "dense fp32, bf16, fp16 and fp64"
                )
            if param.device != group["params"][0].device:
                raise ValueError(
                    f"AdamW: parameters on {group['params'][0].device} and {param.device} in one "
                    "group; make a group for each device"
                )

    def step_group(self, group: dict[str, Any]) -> None:
        """Step along the gradients of a group, in one launch."""
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            return
        grad_scale, found_inf = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        grads = []
        for param in params:
            if param.grad is None or param.grad.is_sparse:
                raise TypeError(
                    "AdamW: a sparse gradient; allowed are dense ones: pass `sparse=False` to the "
                    "embedding, or give its weight to torch.optim.SparseAdam"
                )
            grads.append(param.grad)
            if not self.state[param]:
                self.state[param] = _new_state(param, group)
        lr = group["lr"]
        if isinstance(lr, torch.Tensor):
            lr = lr.to(params[0].device, non_blocking=True)
        grad_scale, found_inf = (
            None if x is None else x.to(params[0].device, non_blocking=True)
            for x in (grad_scale, found_inf)
        )
        steps = [self.state[param]["step"] for param in params]
        torch._foreach_add_(steps, 1.0)
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))
        exp_avgs, exp_avg_sqs = ([self.state[param][name] for param in params] for name in MOMENTS)
        adamw(
            params, grads, exp_avgs, exp_avg_sqs, steps,
            lr=lr, betas=group["betas"], eps=group["eps"],
            weight_decay=group["weight_decay"], maximize=group["maximize"],
            grad_scale=grad_scale, found_inf=found_inf,
            seed=group["seed"] if group["stochastic_rounding"] else None,
            backend=group["backend"],
        )  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of `torch.optim.AdamW` without `amsgrad`.

        Moments take the form that their group stores here, whatever form they are loaded in.
        """
        loaded = [{**self.defaults, **group} for group in state_dict["param_groups"]]
        for group in loaded:
            _check_options(group)
        own = ("state", "min_8bit_size", "stochastic_rounding", "seed", "backend")
        kept = [{name: group[name] for name in own} for group in self.param_groups]
        super().load_state_dict(state_dict)
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        given = dict(zip(params, names, strict=True))
        for group, former, theirs in zip(
            self.param_groups, kept, state_dict["param_groups"], strict=True
        ):
            for name in own:
                group[name] = theirs.get(name, former[name])
            for name in set(group) - {"params", "param_names", "initial_lr", *self.defaults}:
                if name in ("foreach", "capturable", "differentiable", "fused",
                            "decoupled_weight_decay"):  # fmt: skip
                    del group[name]  # torch's ways to launch
            for param in group["params"]:
                # torch casts what it loads to the parameter's dtype: fp32 moments to bf16.
                source = state_dict["state"].get(given[param])
                if source:
                    self.state[param] = _loaded_state(source, param, group)


def _check_options(group: dict[str, Any]) -> None:
    lr, state = group["lr"], group["state"]
    if isinstance(lr, torch.Tensor):
        if lr.numel() != 1:
            raise ValueError(f"AdamW: lr has {lr.numel()} numbers; allowed is one")
    elif lr < 0:
        raise ValueError(f"AdamW: lr={lr}; allowed is 0 and more")
    for name in ("eps", "weight_decay"):
        if not group[name] >= 0:
            raise ValueError(f"AdamW: {name}={group[name]}; allowed is 0 and more")
    if not all(isinstance(b, float | int) and 0 <= b < 1 for b in group["betas"]):
        raise ValueError(f"AdamW: betas={group['betas']}; allowed are two numbers within [0, 1)")
    if group["amsgrad"]:
        raise ValueError("AdamW: amsgrad=True is not offered; use torch.optim.AdamW for it")
    if state not in ("fp32", "8bit"):
        raise ValueError(f"AdamW: state={state!r}; allowed are 'fp32' and '8bit'")


def _is_narrow(param: torch.Tensor, group: dict[str, Any]) -> bool:
    is_large = param.numel() >= group["min_8bit_size"]
    return group["state"] == "8bit" and is_large and param.dtype != torch.float64


def _empty_moment(param: torch.Tensor) -> torch.Tensor:
    """Return a moment that lies in memory as the op walks over its parameter."""
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    return torch.empty_strided(param.shape, order_of(param), dtype=dtype, device=param.device)


def _new_state(param: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
    state = {"step": torch.zeros((), dtype=torch.float32, device=param.device)}
    for name in MOMENTS:
        state[name] = _empty_moment(param).zero_()
        if _is_narrow(param, group):
            state[name] = pack(state[name].flatten(), IS_SIGNED[name])
    return state


def _loaded_state(
    source: dict[str, Any], param: torch.Tensor, group: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the state of a parameter in the form its group stores; a copy."""
    step = torch.as_tensor(source["step"], dtype=torch.float32)
    state = {"step": step.detach().clone().reshape(()).to(param.device)}
    for name in MOMENTS:
        moment = source[name].detach().to(param.device)
        state[name] = _empty_moment(param)
        if moment.dtype == torch.uint8 and _is_narrow(param, group):
            state[name] = moment.clone()
            continue
        # Blocks run along memory: of a permuted parameter as its elements lie there.
        flat = state[name].as_strided((param.numel(),), (1,))
        if moment.dtype == torch.uint8:
            flat.copy_(unpack(moment, param.numel(), IS_SIGNED[name]))
        else:
            state[name].copy_(moment)
        if _is_narrow(param, group):
            state[name] = pack(flat, IS_SIGNED[name])
    return state
