"""A loop of your own, or a whole trial, judged: the path under which users import both."""

from accumulation_harness.measure.trial import Candidate, TrialResult, judge_loop, run_trial, split_plan, standard_candidates

__all__ = ["Candidate", "TrialResult", "judge_loop", "run_trial", "split_plan", "standard_candidates"]
