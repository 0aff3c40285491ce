"""A generator and a discriminator, each with an optimizer of its own: the discriminator sees every row as well as a drawn one."""

import argparse

import torch
from torch import nn
from torch.nn.functional import softplus


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=4)
    cfg = parser.parse_args()
    torch.manual_seed(1)
    draw = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
    judge = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    opt_d, opt_j = torch.optim.Adam(draw.parameters(), lr=1e-3), torch.optim.Adam(judge.parameters(), lr=1e-3)
    rows, noise = torch.randn(96, 2) + 2, torch.randn(96, 3)
    for window in torch.arange(96).split(cfg.micro * cfg.accumulate):
        parts = window.split(cfg.micro)
        opt_j.zero_grad()
        for ids in parts:
            fake = draw(noise[ids]).detach()
            ((softplus(-judge(rows[ids])).mean() + softplus(judge(fake)).mean()) / len(parts)).backward()
        opt_j.step()
        opt_d.zero_grad()
        for ids in parts:
            (softplus(-judge(draw(noise[ids]))).mean() / len(parts)).backward()
        opt_d.step()


if __name__ == "__main__":
    main()
