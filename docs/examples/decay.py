"""How fast weight decay shrinks a weight, by the size of its gradients' noise."""

import torch

from mvngrad import Adam, AdamW, MVNGrad

LR, WARM_UP, STEPS = 1e-3, 300, 200
ARMS = {
    "Adam": (Adam, {"weight_decay": 5e-4}),
    "MVNGrad": (MVNGrad, {"weight_decay": 5e-4}),
    "Adam, floor": (Adam, {"weight_decay": 5e-4, "eps": 1e-3}),
    "MVNGrad, floor": (MVNGrad, {"weight_decay": 5e-4, "eps_s": 1e-8}),
    "AdamW": (AdamW, {"weight_decay": 0.5}),
}


def shrinkage(optimizer_class: type, options: dict[str, float], noise: float) -> float:
    """The share that a step takes from a weight of 1 whose gradients are noise, in percent."""
    torch.manual_seed(0)
    x = torch.nn.Parameter(torch.ones(1000))
    optimizer = optimizer_class([x], lr=LR, betas=(0.9, 0.99), **options)
    shrunk = 0.0
    for step in range(WARM_UP + STEPS):
        x.data.fill_(1.0)
        half = noise * torch.randn(500)
        x.grad = torch.cat([half, -half])  # so that the noise of the mean cancels
        optimizer.step()
        if step >= WARM_UP:
            shrunk += 1 - x.detach().double().mean().item()
    return 100 * shrunk / STEPS


def main() -> None:
    print(f"{'noise':8}", *(f"{name:>15}" for name in ARMS))
    for power in (-5, -4, -3, -2, -1):
        shares = [shrinkage(optimizer_class, options, 10.0**power) for optimizer_class, options in ARMS.values()]
        print(f"{10.0**power:<8.0e}", *(f"{share:14.4f}%" for share in shares))


if __name__ == "__main__":
    main()
