"""MVN-Grad and AdamW on 5,000 digits of MNIST, in a training loop of your own."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mvngrad import MVNGradW
from mvngrad_lab.tasks.mnist import data


def train(optimizer_class: type, lr: float, seed: int, epochs: int = 5) -> float:
    """Test accuracy in percent."""
    torch.manual_seed(seed)
    digits = data.load_sample()
    images, test = data.normalize(digits.train_images), data.normalize(digits.test_images)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = optimizer_class(model.parameters(), lr=lr, weight_decay=0.01)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(100):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), digits.train_labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return 100 * (model(test).argmax(1) == digits.test_labels).double().mean().item()


def main(seeds: int = 5) -> None:
    for optimizer_class in (torch.optim.AdamW, MVNGradW):
        for lr in (3e-4, 1e-3, 3e-3):
            values = torch.tensor([train(optimizer_class, lr, seed) for seed in range(seeds)])
            spread = f" ± {values.std():.1f}" if seeds > 1 else ""
            print(f"{optimizer_class.__name__:9} lr {lr:g}: {values.mean():.1f}{spread} % of test digits, n={seeds}")


if __name__ == "__main__":
    main()
