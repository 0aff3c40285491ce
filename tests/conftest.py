"""One thread for every test: the suite runs on small machines, several tests side by side."""

import torch

torch.set_num_threads(1)
