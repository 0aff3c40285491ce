"""Two targets in two folders, whose modules have the same names."""

from tests.commands import python

MODULE = """
from helper import WHO
import shared.part

class Made:
    def __init__(self):
        from late import LATE
        import shared.other as other
        self.known = WHO, shared.part.WHO, LATE, other.WHO
"""


def test_each_target_sees_its_own_modules(tmp_path):
    """Those imported at once and those imported late, of packages too; another import of a folder gives the same modules."""
    for name in ("a", "b"):
        (tmp_path / name / "shared").mkdir(parents=True)
        (tmp_path / name / "target.py").write_text(MODULE)
        for file in ("helper.py", "shared/part.py"):
            (tmp_path / name / file).write_text(f"WHO = {name!r}\n")
        (tmp_path / name / "shared" / "__init__.py").write_text("")
        (tmp_path / name / "shared" / "other.py").write_text("from .part import WHO\n")
        (tmp_path / name / "late.py").write_text(f"LATE = {name!r}\n")
    code = (
        "import sys; from accumulation_harness.config.targets import load\n"
        "load('t', f'{sys.argv[1]}/a/target.py:Made')()  # as a task, whose model is made before its optimizer is loaded\n"
        "made = [load('t', f'{sys.argv[1]}/{name}/target.py:Made') for name in 'abab']\n"
        "assert made[:2] == made[2:]\n"
        "print([made[k]().known for k in (1, 0, 1)])\n"
    )
    assert python("-c", code, tmp_path).stdout == f"{[(name,) * 4 for name in 'bab']}\n"
