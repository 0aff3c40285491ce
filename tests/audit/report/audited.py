"""A file with a training function, right or wrong, and what the command says of it."""

from accumulation_harness.audit.command import judge, parser

SIZES = ("--batch-size", "8", "--accumulation-steps", "2,4")
RIGHT, WRONG = "accumulation_steps", "1"  # what the loss is divided by
FILE = '''\
"""A loop of our own."""
import torch


def train(batch_size, accumulation_steps):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = torch.randn(24, 4), torch.arange(24) % 3
    for window in torch.arange(24).split(batch_size * accumulation_steps):
        for rows in window.split(batch_size):
            loss = torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
            (loss / {divisor}).backward()
        optimizer.step()
        optimizer.zero_grad()
'''
LINE = 13  # of the backward


def write(folder, divisor):
    (folder / "loop.py").write_text(FILE.format(divisor=divisor))
    return "loop.py:train"


def said(target, *options):
    """Exit code, stdout, stderr; the audited file is where this process is, and later options take precedence."""
    return judge(parser().parse_args([target, *SIZES, *options]))
