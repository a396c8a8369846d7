"""SophiaH in Lightning, with automatic optimisation: python examples/integrations/lightning_sophia.py

Lightning calls ``optimizer.step(closure)`` with a closure that clears the gradients, evaluates the loss, calls
``backward`` and clips. SophiaH takes the Hessian from that same evaluation when an update is due: nothing else is
needed.
"""

from __future__ import annotations

import lightning
import torch
from byte_model import ByteModel, language_loss, windows
from torch import Tensor

import sorder


class LanguageModel(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = ByteModel()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = language_loss(self.model(batch[:, :-1]), batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sorder.SophiaH(self.parameters(), lr=3e-3, update_interval=5)


def main(epochs: int = 6) -> LanguageModel:
    lightning.seed_everything(0, verbose=False)
    module = LanguageModel()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="auto",
        devices=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(windows(), batch_size=8, shuffle=True))  # type: ignore[arg-type]
    return module


if __name__ == "__main__":
    losses = main().losses
    print(f"loss {losses[0]:.2f} at the first step, {losses[-1]:.2f} at the last")
