"""What the example's --optimizer promises, class by class."""

from __future__ import annotations

import copy
import importlib
import io
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

# In torch-optimizer 0.3; a class that a later version adds is not tried here, and not promised.
FROM_TORCH_OPTIMIZER = [
    "a2gradexp", "a2gradinc", "a2graduni", "accsgd", "adabelief", "adabound", "adafactor", "adamod", "adamp", "aggmo",
    "apollo", "diffgrad", "lamb", "lars", "madgrad", "novograd", "pid", "qhadam", "qhm", "radam",
    "ranger", "rangerqh", "rangerva", "sgdp", "sgdw", "shampoo", "swats", "yogi",
]  # fmt: skip


@pytest.fixture
def optimizers(_path: None) -> Any:
    pytest.importorskip("torch_optimizer")
    return importlib.import_module("optimizers")


def test_names(optimizers: Any) -> None:
    assert set(FROM_TORCH_OPTIMIZER) <= optimizers.torch_optimizers().keys()
    assert not {"lookahead", "adahessian"} & optimizers.torch_optimizers().keys()


@pytest.mark.filterwarnings("ignore:This overload of add")
@pytest.mark.parametrize("name", FROM_TORCH_OPTIMIZER)
def test_each_of_torch_optimizer_trains_and_resumes(optimizers: Any, name: str) -> None:
    torch.manual_seed(0)
    model = importlib.import_module("gpt").GPT(256, 16, 1, 2)
    tokens = torch.randint(256, (2, 9))

    def advance(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        def loss() -> torch.Tensor:
            return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

        return [optimizers.step(optimizer, loss, loss).item() for _ in range(steps)]

    optimizer = optimizers.make(name, model, None)
    losses = advance(model, optimizer, 2)
    twin = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)  # as a checkpoint has it
    buffer.seek(0)
    resumed = optimizers.make(name, twin, None)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    losses += advance(model, optimizer, 8)
    assert losses[2:] == advance(twin, resumed, 8)
    assert math.isfinite(losses[-1]) and losses[-1] < losses[0]
