import gc
import json

import pytest

from tests.audit.report.audited import RIGHT, WRONG, said, write

SAVED = ("a.sarif", "a.xml", "a.md", "a.json")


@pytest.fixture(scope="session", params=[RIGHT, WRONG])
def folder(request, tmp_path_factory):
    """Where a right or a wrong loop was audited in a job of GitHub, with all that was written; its name is the divisor."""
    made = tmp_path_factory.mktemp("job") / str(request.param)
    made.mkdir()
    gc.freeze()  # what the tests hold need not be looked through in every run
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        for name, value in {"ACTIONS": "true", "STEP_SUMMARY": str(made / "summary"), "WORKSPACE": str(made.parent)}.items():
            patch.setenv(f"GITHUB_{name}", value)
        saves = [word for name in SAVED for word in ("--save", name)] + ["--report", "issue.md"]
        code, out, err = said(write(made, made.name), *saves)
    (made / "answer").write_text(json.dumps([code, out, err]))
    return made


@pytest.fixture
def wrong(folder):
    return folder.name == WRONG
