"""What stands in the place of torch._dynamo, in a process of its own."""

import pytest

from tests.commands import python
from tests.slow import slow

STEP = """
import sys
import torch
from accumulation_harness.system import dynamo

dynamo.postpone()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())

def step():
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

step()
assert "torch._dynamo.eval_frame" not in sys.modules
{asked}
real = sys.modules["torch._dynamo"]
assert torch._dynamo is real and real.__file__ and torch._dynamo.config is sys.modules["torch._dynamo.config"]
step()
dynamo.postpone()
assert sys.modules["torch._dynamo"] is real
"""


@pytest.mark.parametrize(
    "asked",
    [
        "import torch._dynamo.config as found; assert found.__spec__.loader is not None and found.suppress_errors is False",
        slow("from torch._dynamo.utils import counters"),
        slow("from torch._dynamo import OptimizedModule"),
        pytest.param(
            "x = torch.ones(1, 2); assert torch.equal(torch.compile(model, backend='eager')(x), model(x))", marks=pytest.mark.slow
        ),
        slow("compiled = torch.compile(step, backend='eager'); compiled(); compiled()"),
    ],
)
def test_whatever_is_asked_is_answered_by_the_real_module(asked):
    python("-W", "ignore", "-c", STEP.format(asked=asked))
