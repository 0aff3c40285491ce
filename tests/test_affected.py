"""`accumulation-harness affected`: what files of the shapes that public projects use pin, and which advisories concern them."""

import json

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from accumulation_harness.affected import __main__ as affected
from accumulation_harness.affected import pins
from tests.commands import python

ADVISORIES = affected.read(affected.ADVISORIES)
ACCELERATE = ("accelerate-schedule-per-micro-batch", "accelerate-mean-of-means")  # both in 0.15.0
UV = """version = 1
requires-python = ">=3.11"

[[package]]
name = "transformers"
version = "4.46.3"
source = { registry = "https://pypi.org/simple" }
dependencies = [{ name = "torch" }]
wheels = [{ url = "https://files.pythonhosted.org/packages/51/51/transformers-4.46.3-py3-none-any.whl", hash = "sha256:a" }]

[[package]]
name = "own-project"
version = "0.1.0"
source = { editable = "." }
"""
POETRY = """[[package]]
name = "transformers"
version = "4.46.3"
optional = false

[package.dependencies]
numpy = ">=1.17"

[metadata]
lock-version = "2.1"
"""
PYPROJECT = """[project]
name = "own"
dependencies = ["transformers[torch]==4.46.3 ; python_version >= '3.9'", "torch>=2.4"]

[project.optional-dependencies]
dev = ["pytest"]

[dependency-groups]
train = ["deepspeed==0.18.9", {include-group = "dev"}]
"""
CONDA = """name: own
channels: [pytorch, conda-forge]
dependencies:
  - python=3.11
  - conda-forge::transformers=4.46.3=pyhd8ed1ab_0 # a build
  - pytorch::pytorch>=2.4
  - pip
  - pip:
      - deepspeed==0.18.9
      - -r more.txt
"""
PIXI = """version: 6
packages:
- conda: https://conda.anaconda.org/conda-forge/noarch/transformers-4.46.3-pyhd8ed1ab_0.conda
- conda: https://conda.anaconda.org/conda-forge/linux-64/ld_impl_linux-64-2.45.1-default_0.conda
  sha256: a
- pypi: https://files.pythonhosted.org/packages/a/b/accelerate-1.0.1-py3-none-any.whl
  name: accelerate
  version: 1.0.1
  requires_dist:
  - torch>=1.10.0
  - deepspeed==0.18.9 ; extra == 'all'
"""
CONDA_LOCK = "version: 1\npackage:" + "".join(
    f"""
- name: transformers
  version: 4.46.3
  manager: conda
  platform: {platform}
  url: https://conda.anaconda.org/conda-forge/noarch/transformers-4.46.3-pyhd8ed1ab_0.conda
- name: pytorch
  version: {torch}"""
    for platform, torch in (("linux-64", "2.13.0"), ("osx-arm64", "2.12.0"))
)
COMPILED = """#    uv pip compile pyproject.toml
accelerate==1.0.1 \\
    --hash=sha256:aaaa \\
    --hash=sha256:bbbb
    # via transformers
Transformers == 4.46.3
    # via -r requirements.in
"""
LINKS = """--extra-index-url https://download.pytorch.org/whl/cu121
-e .
transformers @ git+https://github.com/huggingface/transformers@v4.46.3
-e git+https://github.com/huggingface/trl.git@main#egg=trl
git+https://github.com/huggingface/peft.git
https://files.pythonhosted.org/packages/a/b/deepspeed-0.18.9-py3-none-any.whl
torch==2.5.1+cu121
"""
SHAPES = {  # name of the file -> what it holds, what is read beside transformers 4.46.3
    "uv.lock": (UV, {"own-project": "0.1.0"}),
    "poetry.lock": (POETRY, {}),
    "pdm.lock": (POETRY.replace("optional", "requires_python = '>=3.9'\noptional"), {}),
    "pylock.toml": ('lock-version = "1.0"\n[[packages]]\nname = "transformers"\nversion = "4.46.3"\n', {}),
    "Pipfile.lock": (json.dumps({"_meta": {}, "default": {"transformers": {"version": "==4.46.3"}}, "develop": {}}), {}),
    "pyproject.toml": (PYPROJECT, {"torch": None, "pytest": None, "deepspeed": "0.18.9"}),
    "environment.yml": (CONDA, {"python": None, "pytorch": None, "pip": None, "deepspeed": "0.18.9"}),
    "pixi.lock": (PIXI, {"accelerate": "1.0.1", "ld-impl-linux-64": "2.45.1"}),
    "conda-lock.yml": (CONDA_LOCK, {"pytorch": "2.12.0"}),
    "requirements.txt": (COMPILED, {"accelerate": "1.0.1"}),
    "requirements-gpu.txt": (LINKS, {"deepspeed": "0.18.9", "torch": "2.5.1+cu121", "trl": None, "peft": None}),
    "Dockerfile": (
        "FROM x\nRUN pip install 'transformers[torch]==4.46.3' torch>=2.1 deepspeed==0.18.9\n",
        {"deepspeed": "0.18.9"},
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_of_pins(name, tmp_path, capsys):
    text, others = SHAPES[name]
    path = tmp_path / name
    path.write_text(text)
    if name.endswith(("requirements.txt", "-gpu.txt", "pyproject.toml")) or name == "environment.yml":
        (tmp_path / "more.txt").write_text("")
    read = {pin.package: pin.version for pin in pins.of(path)}
    assert read == {"transformers": Version("4.46.3"), **{one: version and Version(version) for one, version in others.items()}}
    assert affected.main([str(path)]) == 1
    told = capsys.readouterr().out
    assert told.count("transformers 4.46.3") == 1, told
    assert "transformers-heads-added" in told and "transformers-mean-of-means" not in told
    assert ("pytorch 2.13.0" in told) == ("2.13.0" in text) and "pytorch 2.12.0" not in told
    path.write_text(text.replace("4.46.3", "4.48.0"))
    others_ignored = [part for one in ADVISORIES if one["id"] != "transformers-heads-added" for part in ("--ignore", one["id"])]
    assert affected.main([str(path), *others_ignored]) == 0


def test_a_folder_and_files_that_include_each_other(tmp_path, capsys):
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "base.txt").write_text("transformers==4.45.2\n-r train.txt\n")
    (tmp_path / "requirements" / "train.txt").write_text("-r base.txt\naccelerate==0.15.0\n")
    assert affected.main([str(tmp_path), "--format", "json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert {row["id"] for row in told["affected"]} == {"transformers-mean-of-means", *ACCELERATE}
    row = told["affected"][0]
    assert row["version"] == "4.45.2" and row["pinned"] and row["where"].endswith("base.txt:1") and row["remedy"]


@pytest.mark.parametrize(
    ("asked", "is_told"),
    [
        ("torchtune>=0.3", True), ("torchtune", True), ("torchtune~=0.3", True), ("torchtune>0.3.0,<0.6", True),
        ("torchtune<0.4", True), ("torchtune>=0.4", False), ("torchtune~=0.4", False), ("torchtune==0.4.*", False),
        ("torchtune!=0.3.1,>=0.4", False),
    ],
)  # fmt: skip
def test_a_range_is_told_and_fails_nothing(asked, is_told, tmp_path, capsys):
    path = tmp_path / "requirements.txt"
    path.write_text(asked)
    assert affected.main([str(path)]) == 0
    assert ("torchtune-mean-of-means" in capsys.readouterr().out) == is_told


@pytest.mark.parametrize(
    ("asked", "specifiers"),
    [
        ("^4.45.2", ">=4.45.2,<5"), ("^0.18.9", ">=0.18.9,<0.19"), ("~4.45.2", ">=4.45.2,<4.46"), ("~4", ">=4,<5"),
        ("4.45.2", "==4.45.2"), ("*", ""),
    ],
)  # fmt: skip
def test_poetry_has_its_own_ranges(asked, specifiers, tmp_path):
    path = tmp_path / "pyproject.toml"
    path.write_text(f'[tool.poetry.dependencies]\npython = "^3.11"\nkeras = "{asked}"\nlocal = {{path = "x"}}\n')
    [pin] = [pin for pin in pins.of(path) if pin.package == "keras"]
    assert pin.admitted == SpecifierSet(specifiers) if pin.version is None else f"=={pin.version}" == specifiers


def test_ones_own_advisories_and_refusals(tmp_path, capsys):
    (tmp_path / "requirements.txt").write_text("tool-by-another-name==1.0\n")
    own = {
        "also": ["tool_by_another_name"],
        "id": "tool-1",
        "package": "Tool",
        "title": "t",
        "affected": "<2",
        "settings": "s",
        "finding": ["mean_of_means"],
        "error": {},
        "remedy": "r",
    }
    pattern = own | {"id": "tool-pattern", "affected": None}  # of a script that has no releases
    (tmp_path / "own.json").write_text(json.dumps({"schema": 1, "advisories": [own, pattern]}))
    ask = [str(tmp_path / "requirements.txt"), "--advisories", str(tmp_path / "own.json")]
    assert affected.main(ask) == 1 and affected.main([*ask, "--ignore", "tool-1"]) == 0
    capsys.readouterr()
    (tmp_path / "broken.json").write_text('{"advisories": [{"id": "x"}]}')
    (tmp_path / "uv.lock").write_text("[[package]\n")
    for bad in (
        ["--ignore", "tool-2", *ask], [str(tmp_path / "not_there.txt")], [str(tmp_path / "uv.lock")],
        [*ask[:1], "--advisories", str(tmp_path / "broken.json")], [str(tmp_path.parent / "nowhere")],
    ):  # fmt: skip
        assert affected.main(bad) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_what_is_installed_is_asked_of_without_torch():
    done = python("-X", "importtime", "-m", "accumulation_harness", "affected", code=None)
    assert done.returncode in (0, 1) and "known packages" in done.stdout
    assert not [line for line in done.stderr.splitlines() if line.split("|")[-1].strip() in ("torch", "numpy")]
