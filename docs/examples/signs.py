"""An optimizer of your own: mvngrad train mnist --optimizer signs:SignMomentum,beta=0.95 --lr 3e-4"""

import torch


class SignMomentum(torch.optim.Optimizer):
    """x -= lr * sign(m), with m an average of the gradients."""

    def __init__(self, params, lr=1e-3, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for x in group["params"]:
                m = self.state[x].setdefault("m", torch.zeros_like(x))
                m.lerp_(x.grad, 1 - group["beta"])
                x.sub_(group["lr"] * m.sign())
