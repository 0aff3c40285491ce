"""fire, with the total batch and the micro-batch as keyword arguments."""

import fire
import torch
import toy


def train(batch_size: int = 128, micro_batch_size: int = 4, num_epochs: int = 2, learning_rate: float = 3e-2):
    gradient_accumulation_steps = batch_size // micro_batch_size
    torch.manual_seed(0)
    model, (x, y) = toy.model(), toy.data(96).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, weight_decay=0.1)
    for _ in range(num_epochs):
        for k, rows in enumerate(torch.arange(len(x)).split(micro_batch_size), start=1):
            loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
            (loss / gradient_accumulation_steps).backward()
            if k % gradient_accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    fire.Fire(train)
