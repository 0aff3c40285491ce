"""How commands end when their output or their surroundings are not as usual: real processes."""

import os
import subprocess
import sys

import pytest

from accumulation_harness.system.terminal import MOST_CHARACTERS, one_line

FULL = "standard output: expected a file that can be written (No space left on device)\n"


def shell(body, around, folder, **environment):
    """`body` as a command, in a shell line where `{}` stands for it."""
    (folder / "command.py").write_text(
        f"import sys\nfrom accumulation_harness.system.terminal import reporting_errors\n\n"
        f"def main():\n    {body}\n\nsys.exit(reporting_errors(main))\n"
    )
    line = around.format(f"{sys.executable} {folder / 'command.py'}") + "; exit ${PIPESTATUS[0]}"
    inherited = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False, env=inherited | environment
    )


@pytest.mark.parametrize(
    ("around", "code", "err"),
    [
        ("{}", 0, ""),
        ("{} > /dev/full", 2, FULL),
        ("{} > /dev/full 2>&1", 2, ""),
        ("{} | true", 0, ""),
        ("{} >&-", 0, ""),
        ("{} >&- 2>&- <&-", 0, ""),
    ],
)
def test_streams(tmp_path, around, code, err):
    done = shell("print('a line' * 100000, flush=True); print('another'); return 0", around, tmp_path)
    assert done.returncode == code and done.stderr.startswith(err) and bool(done.stderr) == bool(err), done.stderr


def test_a_closed_stream_is_not_the_next_file_that_is_opened(tmp_path):
    done = shell("file = open('/dev/null'); print(file.fileno(), file=sys.stderr); return 0", "{} <&- >&-", tmp_path)
    assert int(done.stderr) > 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_a_terminal_cannot_show_is_escaped(tmp_path, encoding):
    done = shell("print('\\u2192 \\udcff'); return 1", "{}", tmp_path, PYTHONIOENCODING=encoding)
    assert done.returncode == 1 and "\\udcff" in done.stdout and not done.stderr


@pytest.mark.parametrize("error", ["OSError(28, 'No space', 'x')", "MemoryError()", "ImportError('lib.so:\\nno segment')"])
def test_what_the_surroundings_refuse_is_one_line_and_a_traceback_on_request(tmp_path, error):
    done = shell(f"raise {error}", "{}", tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and error.partition("(")[0] in done.stderr
    assert "Traceback" in shell(f"raise {error}", "{}", tmp_path, HYDRA_FULL_ERROR="1").stderr


def test_a_bug_keeps_its_traceback(tmp_path):
    assert "ZeroDivisionError" in shell("return 1 // 0", "{}", tmp_path).stderr


def test_arguments_are_refused_in_one_line(tmp_path):
    body = "import argparse; argparse.ArgumentParser().parse_args(['--no\\nsuch']); return 0"
    done = shell(body, "{}", tmp_path)
    assert (done.returncode, done.stderr) == (2, "unrecognized arguments: --no such\n")


@pytest.mark.parametrize(
    "command",
    [
        "accumulation_harness run steps=0",
        "accumulation_harness.measure.plan",
        "accumulation_harness.sweep.status",
        "accumulation_harness.analysis.report",
    ],
)
def test_too_little_memory_for_the_libraries_is_told_before_they_are_loaded(command):
    line = f"ulimit -v 500000; {sys.executable} -m {command}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "ulimit -v 500000: expected at least 851968, which libraries take\n")


def test_a_line_has_an_end():
    assert len(one_line("x" * 10**6)) < MOST_CHARACTERS + 10
    assert one_line("a\n  b\r\tc") == "a b c"
