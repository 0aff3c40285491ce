"""May the number of micro-batches change from window to window, and does accumulation change the balance between tensors?"""

from accumulation_harness.config.questions import Question, Study

QUESTION = Question(place=180, studies={"adaptive_windows": Study(), "tensor_norms": Study()})
