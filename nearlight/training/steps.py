"""What the optimizers share: groups that are checked as they come, and a step with a closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer


class GroupwiseOptimizer(Optimizer):
    """An optimizer that checks each group before it is kept and steps one group at a time."""

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise TypeError or ValueError unless a group's parameters and options are allowed."""
        raise NotImplementedError

    def step_group(self, group: dict[str, Any]) -> None:
        """Step along the gradients of a group; some of its parameters may have none."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; options that it lacks are the optimizer's."""
        super().add_param_group(param_group)
        try:
            self.check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch has one signature for no closure, one for one
        self, closure: Callable[[], Any] | None = None
    ) -> Any:
        """Take a step along the gradients; return what the closure, called first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.step_group(group)
        return loss
