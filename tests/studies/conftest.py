"""The setting of a trial on a softmax regression small enough for numpy: `tests/toy_setting.py`."""

from tests.toy_setting import toy_setting

__all__ = ["toy_setting"]
