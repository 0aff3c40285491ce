"""The hand-written sweep in several processes: `accumulation-harness bench.sweep_in_processes WORKERS AXIS=VALUES...`.

Every process takes the next cell of the grid when it is done with one, as a launcher that one adds to the script would have it.
"""

import itertools
import multiprocessing
import sys

from omegaconf import DictConfig, OmegaConf

from accumulation_harness.bench import sweep_by_hand


def cell(overrides: tuple[str, ...]) -> None:
    """Train one cell of the grid, as the script does."""
    config = OmegaConf.merge(OmegaConf.structured(sweep_by_hand.Config), OmegaConf.from_dotlist(list(overrides)))
    assert isinstance(config, DictConfig)
    sweep_by_hand.main.__wrapped__(config)  # what Hydra's decorator calls


if __name__ == "__main__":
    workers, *axes = sys.argv[1:]
    names, values = zip(*((name, text.split(",")) for name, _, text in (axis.partition("=") for axis in axes)), strict=True)
    grid = [tuple(f"{name}={value}" for name, value in zip(names, one, strict=True)) for one in itertools.product(*values)]
    with multiprocessing.get_context("spawn").Pool(int(workers)) as pool:
        pool.map(cell, grid, chunksize=1)
