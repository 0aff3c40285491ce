"""Does a training forward of transformers fill a key-value cache? Counts its bytes over the micro-batch; prints rows of CSV.

Run with the release on the path, one after another: `python -m scoreboard.key_value_cache >> rows.csv`. The rows are
recorded in experiments/recorded/key_value_cache.csv, from which the ledger decides D3.
"""

from __future__ import annotations

import torch
import transformers

SIZES = (1, 2, 4, 8)
LENGTH = 16


def tensors(cache: object) -> list[torch.Tensor]:
    """Keys and values of every layer, in the forms that caches have had."""
    if cache is None:
        return []
    layers = getattr(cache, "layers", None)
    if isinstance(cache, tuple):
        pairs = list(cache)
    elif layers is not None:
        pairs = [(layer.keys, layer.values) for layer in layers]
    else:
        pairs = list(zip(cache.key_cache, cache.value_cache, strict=True))
    return [tensor for pair in pairs for tensor in pair if tensor is not None]


def defaults() -> dict[str, dict[str, bool]]:
    """What each way to train passes to the forward: a loop of one's own nothing, the Trainer its `use_cache` where it has one."""
    field = transformers.TrainingArguments.__dataclass_fields__.get("use_cache")
    return {"loop": {}, "Trainer": {} if field is None else {"use_cache": field.default}}


def measure(size: int, given: dict[str, bool]) -> tuple[int, int]:
    """Bytes of the cache after a forward in training mode, and of those that autograd does not hold anyway."""
    settings = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).train()
    ids = torch.randint(0, 64, (size, LENGTH), generator=torch.Generator().manual_seed(0))
    saved: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(input_ids=ids, labels=ids, **given)
    held = tensors(outputs.past_key_values)
    each = [(tensor.numel() * tensor.element_size(), tensor.untyped_storage().data_ptr()) for tensor in held]
    return sum(size for size, _ in each), sum(size for size, key in each if key not in saved)


if __name__ == "__main__":
    for way, given in defaults().items():
        for size in SIZES:
            print(transformers.__version__, way, size, *measure(size, given), sep=",")
