"""SophiaH in Hugging Face's Trainer: python examples/integrations/trainer_sophia.py

The Trainer calls ``optimizer.step()`` without a closure, after ``backward``. Just before, it calls the callbacks'
``on_pre_optimizer_step``: there the curvature is updated, from the last batch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from byte_model import ByteModel, language_loss, windows
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

import sorder


class LanguageModel(ByteModel):
    """Returns what the Trainer wants: the loss first."""

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": language_loss(super().forward(tokens[:, :-1]), tokens)}


class SophiaTrainer(Trainer):
    """Remembers its last batch, and updates the curvature from it."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.closure = lambda: model(**inputs)["loss"]
        return super().compute_loss(model, inputs, *args, **kwargs)

    def update(self) -> None:
        sophia: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        if sophia.curvature_due:
            sophia.update_curvature(self.closure)


class BeforeStep(TrainerCallback):
    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.call()


def main(epochs: int = 6) -> list[float]:
    set_seed(0)
    model = LanguageModel()
    sophia = sorder.SophiaH(model.parameters(), lr=3e-3, update_interval=5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(sophia, lambda step: 1.0)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, num_train_epochs=epochs, per_device_train_batch_size=8, max_grad_norm=1.0, logging_steps=1,
            report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        rows = [{"tokens": row} for row in windows()]
        trainer = SophiaTrainer(model, args, train_dataset=rows, optimizers=(sophia, scheduler))
        trainer.add_callback(BeforeStep(trainer.update))
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.2f} at the first step, {losses[-1]:.2f} at the last")
