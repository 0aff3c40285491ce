"""The audit that most tests ask for: batches of 16 rows, as one batch and as 4 micro-batches; and what a folder holds."""

from accumulation_harness.audit import audit


def audited(train, **options):
    return audit(train, **{"batch_size": 16, "accumulation_steps": (4,), **options})


def causes_of(report):
    return {finding.cause for finding in report.findings}


def everything(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
