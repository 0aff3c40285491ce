import pytest
import torch

from accumulation_harness.config import Precision
from accumulation_harness.recipes.determinism import deterministic


@pytest.mark.parametrize("precision", Precision)
def test_settings_of_torch_are_put_back(precision):
    def settings():
        return (
            torch.get_deterministic_debug_mode(),
            torch.backends.cudnn.benchmark,
            torch.backends.cuda.matmul.allow_tf32,
            bool(torch.backends.mkldnn.enabled),
        )

    before = settings()
    with pytest.raises(ZeroDivisionError), deterministic(precision):
        inside = settings()
        raise ZeroDivisionError
    assert settings() == before
    assert inside == (2, False, False, precision != Precision.float16 and bool(torch.backends.mkldnn.enabled))
