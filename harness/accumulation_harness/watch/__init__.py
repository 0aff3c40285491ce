"""Watch a training run as it is: are its windows of accumulated micro-batches what one large batch would compute?"""

from accumulation_harness.watch.report import Report
from accumulation_harness.watch.session import Watch, watch

__all__ = ["Report", "Watch", "watch"]
