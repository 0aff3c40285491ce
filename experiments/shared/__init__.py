"""Measurements that several questions share."""

from __future__ import annotations

from accumulation_harness.config.questions import Question, Study

QUESTION = Question(studies={"convergence": Study()})
