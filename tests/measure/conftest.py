"""The setting of a trial on a softmax regression small enough for numpy: `tests/toy_setting.py`."""

from tests.toy_setting import make_numpy, toy_setting

__all__ = ["make_numpy", "toy_setting"]
