"""Which regime is a training in? One model with small batches and with all data at once."""

from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import nn

from mvngrad import AdamW
from mvngrad.diagnostics import Monitor, diagnose


def train(batch_size: int, path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(1024, 20)
    y = x @ torch.randn(20, 1) + 0.5 * torch.randn(1024, 1)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = AdamW(model.parameters(), lr=3e-5, betas=(0.9, 0.99))
    with Monitor(optimizer, every=50, sink=path):
        for _ in range(400):
            rows = torch.randperm(1024)[:batch_size]
            optimizer.zero_grad()
            (model(x[rows]) - y[rows]).square().mean().backward()
            optimizer.step()


def main() -> None:
    for batch_size in (4, 1024):
        path = Path(mkdtemp()) / "monitor.jsonl"
        train(batch_size, path)
        print(f"batch size {batch_size}\n{diagnose(path)}\n")


if __name__ == "__main__":
    main()
