"""Are N accumulated micro-batches of b the same computation as one batch of B = N·b?"""

from accumulation_harness.config.questions import Question

QUESTION = Question(place=10, core=True)
