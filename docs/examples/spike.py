"""One gradient spike through Adam and MVN-Grad."""

import torch

from mvngrad import Adam, MVNGrad

STEPS, SPIKE_AT = 400, 200


def largest_update(optimizer_class: type, spike: float, **options: float) -> tuple[float, float]:
    """The largest update before the spike, and from then on, in units of lr."""
    torch.manual_seed(0)
    x = torch.nn.Parameter(torch.zeros(1000))
    optimizer = optimizer_class([x], lr=1.0, betas=(0.9, 0.5), **options)
    updates = []
    for step in range(STEPS):
        before = x.detach().clone()
        x.grad = torch.randn(1000) * (spike if step == SPIKE_AT else 1.0)
        optimizer.step()
        updates.append((x.detach() - before).abs().max().item())
    return max(updates[100:SPIKE_AT]), max(updates[SPIKE_AT:])


def main() -> None:
    for name, optimizer_class, options in (
        ("Adam", Adam, {}),
        ("MVNGrad", MVNGrad, {}),
        ("MVNGrad, z_clip=3", MVNGrad, {"z_clip": 3.0}),
    ):
        for spike in (1e2, 1e4, 1e6):
            before, after = largest_update(optimizer_class, spike, **options)
            print(f"{name:18} spike {spike:9,.0f}: largest update {before:6.2f} before, {after:12,.2f} after")


if __name__ == "__main__":
    main()
