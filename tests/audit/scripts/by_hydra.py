"""@hydra.main with a configuration beside it; it writes into the folder that Hydra makes."""

import logging

import hydra
import torch
import toy
from omegaconf import DictConfig

log = logging.getLogger(__name__)


@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    torch.manual_seed(cfg.seed)
    model = toy.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.trainer.lr, weight_decay=0.01)
    loader = torch.utils.data.DataLoader(toy.data(96), batch_size=cfg.trainer.batch_size, shuffle=True, drop_last=True)
    accumulate = cfg.trainer.accumulate_grad_batches
    for epoch in range(cfg.trainer.max_epochs):
        for i, (x, y) in enumerate(loader, start=epoch * len(loader)):
            loss = torch.nn.functional.cross_entropy(model(x), y) / accumulate
            loss.backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        log.info("epoch %d: %.3f", epoch, loss.item())
        torch.save(model.state_dict(), "last.ckpt")


if __name__ == "__main__":
    main()
