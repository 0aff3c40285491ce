"""The audit that most tests ask for: batches of 16 rows, as one batch and as 4 micro-batches; and what a folder holds."""

from accumulation_harness.audit import audit


def audited(train, **options):
    return audit(train, **{"batch_size": 16, "accumulation_steps": (4,), **options})


def causes_of(report):
    return {finding.cause for finding in report.findings}


def named(train, *causes, **options):
    """The report of an audit that judges all, finds these causes and no other, and is equivalent where there are none."""
    report = audited(train, **options)
    found = {(finding.accumulation_steps, finding.cause): finding for finding in report.findings}
    assert causes_of(report) == {*causes} and len(found) == len(report.findings), str(report)
    assert not report.problems and report.equivalent == (not causes), str(report)
    return report


def everything(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
