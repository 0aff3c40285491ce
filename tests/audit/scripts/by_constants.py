"""Numbers at the top of a file, which are changed there; a class that holds the training."""

import torch
import toy


class Config:
    BATCH = 32
    ACCUMULATE = 1


class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.model = toy.model()
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=0.01)

    def fit(self):
        micro_batches = list(torch.utils.data.DataLoader(toy.data(96), batch_size=Config.BATCH))
        for _ in range(3):
            for k, (x, y) in enumerate(micro_batches, start=1):
                loss = torch.nn.functional.cross_entropy(self.model(x), y) / Config.ACCUMULATE
                loss.backward()
                if k % Config.ACCUMULATE == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad()


if __name__ == "__main__":
    Trainer().fit()
