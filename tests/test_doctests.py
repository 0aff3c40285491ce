"""The examples in docstrings, of every module of the package that has one."""

import doctest
import importlib

import pytest

from tests.test_imports import modules

WITH_EXAMPLES = [name for name, path in modules().items() if ">>> " in path.read_text()]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_of_a_module(name):
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried and not failed
