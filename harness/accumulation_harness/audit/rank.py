"""Which of several ranks a process is, as torchrun and srun say it."""

from __future__ import annotations

import os
from dataclasses import dataclass

STARTERS = (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))


@dataclass(frozen=True)
class Rank:
    """One of the processes that train together."""

    number: int
    world: int
    local: int  # among those of its machine

    @classmethod
    def of_environment(cls) -> Rank:
        """Raises ValueError where no launcher has said it."""
        for names in STARTERS:
            given = [os.environ.get(name, "") for name in names]
            if all(number.isdecimal() for number in given[:2]):
                return cls(int(given[0]), int(given[1]), int(given[2]) if given[2].isdecimal() else 0)
        raise ValueError(
            "expected to be started by torchrun (RANK, WORLD_SIZE) or srun (SLURM_PROCID, SLURM_NTASKS), got neither's variables"
        )

    @property
    def variables(self) -> dict[str, str]:
        """What torch's `env://` reads."""
        return {"RANK": str(self.number), "WORLD_SIZE": str(self.world), "LOCAL_RANK": str(self.local)}
