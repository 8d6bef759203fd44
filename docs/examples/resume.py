"""A training loop with a schedule, a Monitor and checkpoints, which continues where it was stopped, bit for bit."""

import os
import tempfile
from pathlib import Path

import torch
from torch import nn

from mvngrad import MVNGradW
from mvngrad.diagnostics import Monitor, diagnose, read_records

STEPS = 600


def train(folder: Path, stop_after: int = STEPS) -> nn.Module:
    """Train from the newest checkpoint in `folder`, if there is one, and stop after some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = MVNGradW(model.named_parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    path, first = folder / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first = saved["step"]
    with Monitor(optimizer, every=50, sink=folder / "monitor.jsonl") as monitor:
        monitor.step = first  # so that a resumed run goes on in the same file
        for step in range(first, stop_after):
            inputs = torch.randn(64, 20, generator=torch.Generator().manual_seed(step))
            loss = nn.functional.cross_entropy(model(inputs), (inputs[:, 0] > 0).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            monitor.log(loss=loss)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    torch.save({**states, "step": stop_after}, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)  # a crash leaves the old file or the new one
    return model


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder) / "whole", Path(folder) / "parts"
        whole.mkdir()
        parts.mkdir()
        model = train(whole)
        train(parts, stop_after=250)
        resumed = train(parts)
        pairs = zip(model.parameters(), resumed.parameters(), strict=True)
        print("resumed run equal, bit for bit:", all(torch.equal(a, b) for a, b in pairs))
        records = read_records(parts / "monitor.jsonl")
        print("records at steps", ", ".join(str(record["step"]) for record in records))
        print(diagnose(records).groups[0].finding)


if __name__ == "__main__":
    main()
