"""LightningCLI: `fit`, with a module and a data module, and a checkpoint."""

import lightning as L
import torch
import toy
from lightning.pytorch.cli import LightningCLI


class Module(L.LightningModule):
    def __init__(self, lr: float = 0.02) -> None:
        super().__init__()
        self.lr, self.model = lr, toy.model()

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.model(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Data(L.LightningDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return torch.utils.data.DataLoader(toy.data(96), batch_size=self.batch_size, shuffle=True)


if __name__ == "__main__":
    LightningCLI(Module, Data, seed_everything_default=5)
