"""SophiaG with accelerate and gradient accumulation: python examples/integrations/accelerate_sophia.py

The prepared optimizer's ``step`` does nothing but at the end of an accumulation; that is when the curvature is updated.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from byte_model import ByteModel, language_loss, windows

import sorder


def main(epochs: int = 8) -> list[float]:
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    network = ByteModel()
    sophia = sorder.SophiaG(network.parameters(), lr=3e-3, update_interval=5)
    batches = torch.utils.data.DataLoader(windows(), batch_size=4, shuffle=True)  # type: ignore[arg-type, var-annotated]
    model, optimizer, loader = accelerator.prepare(network, sophia, batches)

    losses = []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = language_loss(model(batch[:, :-1]), batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    if sophia.curvature_due:
                        # Labels are sampled from the model; this micro-batch is enough for the curvature.
                        sophia.update_curvature(lambda batch=batch: sorder.gnb_loss(model(batch[:, :-1])))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.2f} at the first step, {losses[-1]:.2f} at the last")
