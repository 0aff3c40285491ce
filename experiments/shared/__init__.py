"""Measurements that several questions share."""

from accumulation_harness.config.questions import Question, Study

QUESTION = Question(studies={"convergence": Study()})
