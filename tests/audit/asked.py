"""The audit that most tests ask for: batches of 16 rows, as one batch and as 4 micro-batches."""

from accumulation_harness.audit import audit


def audited(train, **options):
    return audit(train, **{"batch_size": 16, "accumulation_steps": (4,), **options})


def causes_of(report):
    return {finding.cause for finding in report.findings}
