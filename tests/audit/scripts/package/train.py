"""A module of a package, which imports its neighbours relatively, with a command made by typer."""

import torch
import typer

from .steps import windows

app = typer.Typer()


@app.command()
def run(micro_batch: int = 8, accumulate: int = 1, epochs: int = 2) -> None:
    train(micro_batch, accumulate, epochs)


def train(micro_batch, accumulate, epochs=2):
    torch.manual_seed(3)
    import toy

    model, (x, y) = toy.model(), toy.data(96).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for window in windows(len(x), micro_batch, accumulate):
            for rows in window:
                loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
                (loss / accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    app()
