"""AdamW with warm-up, decay and gradient clipping; fp32 master weights where the policy computes in bf16.

A bf16 weight has 8 bits of mantissa: steps below 1/256 of a weight vanish, and at usual rates nearly all are.
So the optimizer keeps fp32 copies, steps those and rounds them into the policy. A policy in fp32 is stepped
in place: no copies. Decoupled weight decay: https://arxiv.org/abs/1711.05101.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .errors import CheckpointError, ConfigError
from .policy import Policy

STATE_FILE = "optimizer.safetensors"
STEPS_FILE = "optimizer.json"
MASTER, MEAN, SQUARE = "master", "exp_avg", "exp_avg_sq"


@dataclass(frozen=True)
class OptimizerConfig:
    """`rate` is reached after `warmup` steps (linearly), held up to step `hold`, then falls with the inverse
    square root of the step: no end of the run has to be known. `hold` 0 means it never falls.
    `clip` bounds the norm of the gradient."""

    rate: float = 1e-3
    warmup: int = 10
    hold: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.rate < 1 and self.warmup >= 0 and self.hold >= 0 and self.clip > 0):
            raise ConfigError(
                f"The optimizer's rate {self.rate}, warmup {self.warmup}, hold {self.hold} or clip "
                f"{self.clip} is out of range; rates lie between 0 and 1, the others are not negative."
            )

    def rate_at(self, step: int) -> float:
        """The rate of step `step` (the first is 0)."""
        warm = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        fall = math.sqrt(self.hold / step) if self.hold and step > self.hold else 1.0
        return self.rate * warm * fall


class Optimizer:
    """Steps the weights of one policy. `steps` counts the steps made."""

    def __init__(self, policy: Policy, config: OptimizerConfig) -> None:
        self.config = config
        self.steps = 0
        self._named: dict[str, nn.Parameter] = dict(policy.model.named_parameters())
        self._masters: dict[str, Tensor] = {
            name: weight if weight.dtype == torch.float32 else weight.detach().float()
            for name, weight in self._named.items()
        }
        self._inner = torch.optim.AdamW(
            self._masters.values(),
            lr=config.rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )

    @torch.no_grad()
    def reset(self) -> None:
        """As new, for the policy's weights as they are now."""
        self._inner.state.clear()
        self.steps = 0
        for name, weight in self._named.items():
            if self._masters[name] is not weight:
                self._masters[name].copy_(weight)

    def refresh(self) -> None:
        """Back to the full rate, where it has begun to fall: the tasks became harder."""
        self.steps = min(self.steps, self.config.hold) if self.config.hold else self.steps

    def accumulate(self) -> None:
        """Takes over the gradients of a backward pass: sums over micro-batches are made in fp32."""
        for name, weight in self._named.items():
            master = self._masters[name]
            if master is weight or weight.grad is None:
                continue
            if master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad += weight.grad
            weight.grad = None

    def step(self) -> float:
        """One step with the gathered gradients, which it forgets. Returns their norm before clipping.

        A norm that is not finite changes nothing: the caller sees it in the returned value.
        """
        masters = list(self._masters.values())
        norm = nn.utils.clip_grad_norm_(masters, self.config.clip).item()
        if math.isfinite(norm):
            for group in self._inner.param_groups:
                group["lr"] = self.config.rate_at(self.steps)
            self._inner.step()
            self.steps += 1
            self._round()
        self._inner.zero_grad(set_to_none=True)
        return norm

    @torch.no_grad()
    def _round(self) -> None:
        for name, weight in self._named.items():
            if self._masters[name] is not weight:
                weight.copy_(self._masters[name])

    def state(self) -> dict[str, Tensor]:
        """Moments and masters, as `kind/name` -> fp32 tensor (live, not copies)."""
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            moments = self._inner.state.get(master, {})
            if moments:
                tensors[f"{MEAN}/{name}"] = moments["exp_avg"]
                tensors[f"{SQUARE}/{name}"] = moments["exp_avg_sq"]
            if master is not self._named[name]:
                tensors[f"{MASTER}/{name}"] = master
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Goes on from a `state()` after `steps` steps. Raises CheckpointError if it is another model's,
        before anything is changed."""
        self._check_state(tensors)
        self._inner.state.clear()
        for name, master in self._masters.items():
            if master is not self._named[name]:
                master.copy_(tensors[f"{MASTER}/{name}"])
            if f"{MEAN}/{name}" in tensors:
                self._inner.state[master] = {
                    "step": torch.tensor(float(steps), device=master.device),
                    "exp_avg": tensors[f"{MEAN}/{name}"].to(master.device, torch.float32).clone(),
                    "exp_avg_sq": tensors[f"{SQUARE}/{name}"].to(master.device, torch.float32).clone(),
                }
        self.steps = steps
        self._round()

    def _check_state(self, tensors: Mapping[str, Tensor]) -> None:
        shapes = {
            f"{kind}/{name}": master.shape
            for name, master in self._masters.items()
            for kind in (MEAN, SQUARE, MASTER)
        }
        needed = {f"{MASTER}/{n}" for n, master in self._masters.items() if master is not self._named[n]}
        # A weight that no gradient ever reached has no moments, but then it has neither.
        halves = {f"{SQUARE}{n.removeprefix(MEAN)}" for n in tensors if n.startswith(f"{MEAN}/")}
        wrong = [n for n, t in tensors.items() if n not in shapes or t.shape != shapes[n]]
        wrong += sorted((needed | halves) - tensors.keys())
        if wrong:
            raise CheckpointError(
                f"The optimizer's state does not belong to this model (tensor {wrong[0]!r}); "
                "start from the checkpoint without it."
            )

    def save(self, folder: Path) -> None:
        """Writes the state into `folder` as safetensors and JSON."""
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.state().items()}
        save_file(tensors, folder / STATE_FILE)
        (folder / STEPS_FILE).write_text(json.dumps({"steps": self.steps}) + "\n")

    def load(self, folder: Path) -> None:
        """Goes on from what `save` wrote. Raises CheckpointError if it is missing, damaged or another's."""
        try:
            tensors = load_file(folder / STATE_FILE)
            steps = json.loads((folder / STEPS_FILE).read_bytes())["steps"]
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise CheckpointError(
                f"The optimizer's state in {folder} cannot be read ({error}); delete that folder to go on "
                "with a fresh optimizer."
            ) from error
        self.load_state(tensors, int(steps))
